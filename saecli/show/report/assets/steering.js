// A text continued, plain and with some latents' codes changed, side by side.

const METHODS = { add: "add to its code", clamp: "set its code to", ablate: "set its code to 0" };

function editRow(edit, changed, remove) {
  const scale = h("input", { type: "number", step: "any", value: edit.scale, "aria-label": `scale of latent ${edit.latent}`,
    oninput: () => { slider.value = scale.value; edit.scale = Number(scale.value); changed(); } });
  const reach = Math.max(20, 2 * Math.abs(edit.scale));
  const slider = h("input", { type: "range", min: -reach, max: reach, step: reach / 100, value: edit.scale,
    "aria-label": `slider of latent ${edit.latent}`,
    oninput: () => { scale.value = slider.value; edit.scale = Number(slider.value); changed(); } });
  const method = h("select", { "aria-label": `change of latent ${edit.latent}`, onchange: () => {
    edit.method = method.value;
    scale.disabled = slider.disabled = edit.method === "ablate";
    changed();
  } }, Object.entries(METHODS).map(([name, words]) => h("option", { value: name, selected: name === edit.method }, words)));
  scale.disabled = slider.disabled = edit.method === "ablate";
  return h("div", { class: "bar-of-tools edit" }, h("a", { href: link({ view: "latent", latent: edit.latent }) },
    `latent ${edit.latent}`), method, slider, scale,
  h("button", { type: "button", "aria-label": `leave latent ${edit.latent} out`, onclick: remove }, "✕"));
}

function nextTokens(next) {
  const heads = ["next token", "plain", "steered"];
  return h("section", { class: "card latents listed" }, h("h2", {}, "The first token"), h("table", {}, h("thead", {},
    h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, next.tokens.map((token, at) => h("tr", {},
    h("td", {}, chip(token)), [next.plain[at], next.steered[at]].map((p) => h("td", { class: "figure" }, percent(p))))))));
}

// The pieces of a text; a piece that is one token can be asked about.
function pieces(parts, prompt, asks) {
  let before = prompt;
  return parts.map(([text, id]) => {
    const words = readable(text).replaceAll("↵", "↵\n"), asked = { text: before, token: id };
    before += text;
    if (!asks || id === null) return h("span", {}, words);
    return h("a", { class: "token", href: link({ view: "text", ...asked }), title: "why this token?" }, words);
  });
}

function steeringView(view, state) {
  const edits = Array.isArray(state.edits) ? state.edits : [];
  const prompt = h("textarea", { id: "prompt", rows: 3, "aria-label": "text to continue" });
  prompt.value = state.text ?? "";
  const most = h("input", { type: "number", min: 1, max: 512, value: state.most ?? 40, "aria-label": "new tokens" });
  const heat = h("input", { type: "number", min: 0, max: 10, step: "any", value: state.temperature ?? 0, "aria-label": "temperature" });
  const latent = h("input", { type: "number", min: 0, placeholder: "latent", "aria-label": "latent to change" });
  const rows = h("div", {}), said = h("p", { class: "muted", role: "status" });
  const texts = { plain: h("p", { class: "words" }), steered: h("p", { class: "words" }) }, first = h("div", {});
  let stopped = null;
  const stop = h("button", { type: "button", hidden: true, onclick: () => stopped?.abort() }, "Stop");
  const asked = () => ({ text: prompt.value, edits, most: Number(most.value), temperature: Number(heat.value) });
  const keep = () => remember({ view: "steer", ...asked() });
  const draw = () => rows.replaceChildren(...edits.map((edit) => editRow(edit, keep, () => {
    edits.splice(edits.indexOf(edit), 1);
    draw();
    keep();
  })));
  const add = () => {
    const number = Number(latent.value);
    if (latent.value === "" || edits.some((edit) => edit.latent === number)) return;
    edits.push({ latent: number, method: "add", scale: 5 });
    latent.value = "";
    draw();
    keep();
  };
  const show = (event) => {
    if (event.error) said.textContent = event.error;
    if (event.next) {
      first.replaceChildren(nextTokens(event.next));
      said.textContent = event.notes.join(" ");
    }
    for (const name of ["plain", "steered"]) {
      if (event[name]) texts[name].replaceChildren(h("span", { class: "muted" }, readable(prompt.value)),
        ...pieces(event[name], prompt.value, name === "plain" && event.done));
    }
  };
  const run = async () => {
    stopped?.abort();
    const own = stopped = new AbortController();
    keep();
    answered = structuredClone(current); // edits change in place
    stop.hidden = false;
    said.textContent = "…";
    first.replaceChildren();
    Object.values(texts).forEach((text) => text.replaceChildren());
    try {
      await grow("steer", asked(), show, own.signal);
    } catch (error) {
      if (error.name !== "AbortError") said.textContent = error.message;
    }
    if (own === stopped) stop.hidden = true;
  };
  view.replaceChildren(h("header", {}, h("h1", { tabindex: "-1" }, "Steer")),
    h("form", { class: "card", onsubmit: (event) => { event.preventDefault(); add(); run(); } }, prompt, rows,
      h("div", { class: "bar-of-tools" }, h("label", { class: "go" }, latent), h("button", { type: "button", onclick: add }, "Change a latent"),
        h("label", {}, h("span", {}, "tokens"), most), h("label", {}, h("span", {}, "temperature"), heat),
        h("button", { type: "submit", disabled: !!frozen }, "Continue"), stop), said),
    h("div", { class: "pair sides" }, card("Plain", texts.plain), card("Steered", texts.steered)), first);
  draw();
  if (state.text && (frozen || state.go)) run();
  return () => stopped?.abort();
}
