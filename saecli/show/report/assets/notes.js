// The reader's notes on latents, kept by the browser under the SAE's key: an entry each, so that two windows do not
// overwrite each other's.

function noteBook(heading) {
  const prefix = `saecli notes ${heading.key} `, notes = new Map();
  let storage = null;
  try {
    storage = window.localStorage; // a browser may refuse it to pages from disk
    for (let place = 0; place < storage.length; place += 1) take(storage.key(place));
  } catch (error) {
    if (!(error instanceof DOMException)) throw error;
  }
  addEventListener("storage", (event) => event.key && take(event.key));

  function take(key) {
    if (!key.startsWith(prefix)) return;
    const latent = Number(key.slice(prefix.length)), text = storage.getItem(key);
    if (text) notes.set(latent, text);
    else notes.delete(latent);
  }

  // Returns whether the browser keeps it beyond this window.
  function write(latent, text) {
    if (text) notes.set(latent, text);
    else notes.delete(latent);
    try {
      if (text) storage?.setItem(`${prefix}${latent}`, text);
      else storage?.removeItem(`${prefix}${latent}`);
      return storage !== null;
    } catch (error) {
      if (!(error instanceof DOMException)) throw error; // no space is left
      return false;
    }
  }

  function save() {
    const sorted = [...notes].sort(([a], [b]) => a - b).map(([latent, note]) => ({ latent, note }));
    const text = JSON.stringify({ run: heading.run, data: heading.data, key: heading.key, notes: sorted }, null, 1);
    const url = URL.createObjectURL(new Blob([`${text}\n`], { type: "application/json" }));
    h("a", { href: url, download: `notes-${heading.run.replace(/[^\w.-]+/g, "-")}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000); // not before the download has begun
  }

  function editor(latent) {
    const kept = "kept in this browser, for this SAE; the first page exports all notes";
    const state = muted(kept);
    const box = h("textarea", { id: "note", rows: 2, "aria-label": `note on latent ${latent}`, placeholder: "your note",
      oninput: () => {
        state.textContent = write(latent, box.value.trim()) ? kept
          : "this browser does not keep it; export the notes before you close this window";
      } });
    box.value = notes.get(latent) ?? "";
    return card("Note", box, state);
  }

  return { of: (latent) => notes.get(latent), count: () => notes.size, save, editor };
}
