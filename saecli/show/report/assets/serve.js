// A page that answers: the state is in the address, and what was answered can be saved with the page in one file.

const frozen = JSON.parse(document.getElementById("data").textContent); // of a saved page: its state and answers
const views = Object.fromEntries(["overview", "latent", "tool"].map((id) => [id, document.getElementById(id)]));
const answers = new Map(Object.entries(frozen?.answers ?? {})); // of this view, by what was asked
const TABS = { text: "Text", latents: "Latents", steer: "Steer", runs: "Runs" };
let about, leave = null, pages = null, current = {};
let answered = null; // the state of the answers on the page, where a form is ahead of them
let visits = 0; // an answer that comes when the reader has gone on is not shown

// State as the part of an address after #: its view, then what differs from the default.
function link(state) {
  const { view, latent, ...more } = { run: current.run, ...state };
  if (more.run === about?.saes[0].run) delete more.run;
  const words = Object.entries(more).filter(([, value]) => value != null && value !== "").map(([key, value]) =>
    `${key}=${encodeURIComponent(typeof value === "string" ? value : JSON.stringify(value))}`);
  return `#${view === "latent" ? `latent/${latent}` : view}${words.length ? `?${words.join("&")}` : ""}`;
}

function parsed(hash) {
  const [place, words] = hash.slice(1).split("?"), [view, latent] = (place || "text").split("/");
  if (view !== "latent" && !Object.hasOwn(TABS, view)) throw new Error("There is no such view; choose one above.");
  const state = { view, latent: latent == null ? undefined : Number(latent), run: about.saes[0].run };
  for (const [key, value] of new URLSearchParams(words ?? "")) {
    state[key] = ["edits", "most", "temperature", "go", "shade", "token"].includes(key) ? JSON.parse(value) : value;
  }
  return state;
}

// Write the state into the address, without going there.
function remember(state) {
  current = { run: current.run, ...state };
  if (!frozen) history.replaceState(null, "", link(current));
}

// What a request fails with when the server has ended says little.
function sayGone(error) {
  throw error.name === "TypeError" ? new Error("The server does not answer; start sae serve again.") : error;
}

async function fetched(address, options) {
  const response = await fetch(address, options).catch(sayGone);
  if (response.ok) return response;
  throw new Error((await response.json().catch(() => ({}))).error ?? `status ${response.status}`);
}

async function ask(name, asked, fresh = false) {
  const key = `${name} ${JSON.stringify(asked)}`;
  if (answers.has(key) && (frozen || !fresh)) return answers.get(key);
  if (frozen) throw new Error("This page was saved without that; open it where it is served.");
  const posted = ["read", "label"].includes(name);
  const words = posted ? "" : `?${new URLSearchParams(asked)}`;
  const response = await fetched(`api/${name}${words}`, posted ? { method: "POST",
    headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked) } : {});
  const document = await response.json();
  if (name !== "label") answers.set(key, document);
  return document;
}

// Take server-sent events as they come; a saved page has the last.
async function grow(name, asked, take, signal) {
  const sent = { run: current.run, ...asked }, key = `${name} ${JSON.stringify(sent)}`, taken = {};
  if (frozen) {
    if (!answers.has(key)) throw new Error("This page was saved without that; open it where it is served.");
    take(answers.get(key));
    return;
  }
  const response = await fetched(`api/${name}`, { method: "POST", signal, body: JSON.stringify(sent),
    headers: { "Content-Type": "application/json" } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let left = ""; ;) {
    const { value, done } = await reader.read().catch(sayGone);
    if (done) return;
    const parts = (left + value).split("\n\n");
    left = parts.pop();
    for (const part of parts) {
      const event = JSON.parse(part.replace(/^data: /, ""));
      take(event);
      answers.set(key, Object.assign(taken, event));
    }
  }
}

// A run's overview; the first time its rows are encoded.
async function latentsView(state, latent, isHere) {
  const data = await ask("overview", { run: state.run });
  if (!isHere()) return;
  if (pages?.data !== data) {
    pages = latentPages(data, views, (number) => ask("latent", { run: state.run, latent: number }),
      (number) => labelForm(data, state.run, number));
    pages.data = data;
  }
  pages.show(latent);
  views.tool.hidden = true;
}

function labelForm(data, run, latent) {
  if (frozen) return null;
  const words = h("input", { value: data.latents.label[latent] ?? "", "aria-label": "label", placeholder: "label" });
  const said = h("span", { class: "muted", role: "status" });
  const write = async (label) => {
    try {
      const done = await ask("label", { run, latent, label });
      data.latents.label[latent] = done.label;
      data.latents.score[latent] = done.score;
      words.value = done.label ?? "";
      pages.changed(latent);
      said.replaceChildren(done.label ? "kept in labels.json " : "removed ", h("button", { type: "button", class: "more",
        onclick: () => write(done.before) }, "undo"));
    } catch (error) {
      said.textContent = error.message;
    }
  };
  return h("form", { class: "bar-of-tools label", onsubmit: (event) => { event.preventDefault(); write(words.value.trim() || null); } },
    words, h("button", { type: "submit" }, "Label"), h("a", { class: "button", href: link({ view: "steer",
      edits: [{ latent, method: "add", scale: +(data.latents.largest[latent] || 5).toPrecision(3) }] }) }, "Steer"), said);
}

function textView(view, state) {
  const text = h("textarea", { id: "prompt", rows: 3, "aria-label": "text" });
  text.value = state.text ?? "";
  const compare = h("textarea", { rows: 2, "aria-label": "text to compare" });
  compare.value = state.compare ?? "";
  const why = h("input", { "aria-label": "next token", placeholder: "a next token, to ask why" });
  why.value = state.why ?? "";
  const chat = h("input", { type: "checkbox", id: "chat", checked: !!state.chat });
  const results = h("div", { class: "results" }), said = h("p", { class: "muted", role: "status" });
  let shown = [], readings = 0;
  const run = async () => {
    const own = readings += 1;
    const asked = { text: text.value, compare: compare.value, why: why.value, token: state.token,
      chat: chat.checked ? "1" : "", beside: beside?.value, shade: state.shade };
    remember({ view: "text", ...asked });
    said.textContent = "…";
    const words = chat.checked ? [{ role: "user", content: text.value }] : text.value;
    const next = asked.token ?? asked.why; // a token's id, or its text
    const question = { text: words, ...(asked.compare ? { compare: asked.compare } : {}),
      ...(next === "" ? {} : { why: next }) };
    try {
      const runs = [current.run, asked.beside].filter(Boolean), documents = [];
      for (const name of runs) documents.push(await ask("read", { run: name, ...question }));
      if (own !== readings) return;
      shown = documents.map((document, which) => reading(document, (part, at) => tokenActions(document, part, at),
        (latent) => { if (!which) remember({ ...current, shade: latent ?? undefined }); }));
      said.textContent = documents.flatMap((document) => document.notes).join(" ");
      results.replaceChildren(...shown.flatMap((one, which) => [runs.length > 1 ? h("h2", {}, runs[which]) : "",
        one.heading, ...one.body]), shown[0].keys);
      if (asked.shade != null) shown[0].choose(asked.shade);
    } catch (error) {
      if (own === readings) said.textContent = error.message;
    }
  };
  const runAnew = () => {
    delete state.token; // of a link to this text
    run();
  };
  const tokenActions = (document, part, at) => {
    const token = part.tokens[at], before = part.tokens.slice(0, at).filter((one) => !one.special || at === 1);
    const open = token.latents.map(({ latent }) => h("a", { href: link({ view: "latent", latent }) }, `${latent}`));
    const asks = at > 1 && token.text && !token.role && part.which === 0
      ? h("a", { href: link({ view: "text", text: before.map((one) => one.text).join(""), token: token.token_id }) },
        "why this token?") : null;
    return [open.length ? h("p", { class: "muted" }, "open ", ...open.flatMap((one) => [one, " "])) : null, asks];
  };
  const others = about.saes.map((sae) => sae.run).filter((name) => name !== current.run);
  const beside = others.length ? h("select", { "aria-label": "run beside" }, h("option", { value: "" }, "no run beside"),
    others.map((name) => h("option", { value: name, selected: name === state.beside }, name))) : null;
  view.replaceChildren(h("header", {}, h("h1", { tabindex: "-1" }, "Text")),
    h("form", { class: "card", onsubmit: (event) => { event.preventDefault(); runAnew(); } }, text,
      h("details", { open: !!state.compare }, h("summary", {}, "Compare with another text"), compare),
      h("div", { class: "bar-of-tools" }, about.chat ? h("label", {}, chat, h("span", {}, "as a chat")) : null, why, beside,
        h("button", { type: "submit", disabled: !!frozen }, "Read")), said), results);
  if (state.text) run();
  addEventListener("keydown", onKey);
  function onKey(event) {
    if (event.target === text && event.key === "Enter" && (event.ctrlKey || event.metaKey)) runAnew();
    else shown.forEach((one) => one.onKey(event));
  }
  return () => {
    readings += 1;
    removeEventListener("keydown", onKey);
  };
}

async function saveFile() {
  const template = await (await fetched("frozen.html")).text();
  const kept = { hash: link(answered ?? current), answers: Object.fromEntries(answers) };
  const escaped = JSON.stringify(kept).replace(/[<>&\u2028\u2029]/g,
    (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`);
  const marker = '<script type="application/json" id="data">';
  const page = template.replace(`${marker}null`, () => marker + escaped);
  const file = URL.createObjectURL(new Blob([page], { type: "text/html" }));
  h("a", { href: file, download: `${current.run}-${current.view}.html` }).click();
  setTimeout(() => URL.revokeObjectURL(file), 10_000);
}

function menu() {
  const run = h("select", { "aria-label": "run", onchange: () => { location.hash = link({ text: current.text, run: run.value,
    view: current.view === "latent" ? "latents" : current.view }); } }, about.saes.map((sae) => h("option", { value: sae.run }, sae.run)));
  const to = (view) => link({ view, text: ["text", "steer"].includes(view) ? current.text : undefined });
  const tabs = Object.entries(TABS).map(([view, name]) => h("a", { class: "button tab", "data-view": view, href: to(view) }, name));
  const said = h("span", { class: "muted", role: "status" });
  const save = () => saveFile().then(() => { said.textContent = ""; }, (error) => { said.textContent = error.message; });
  const draw = () => {
    run.value = current.run;
    tabs.forEach((tab) => {
      const view = tab.dataset.view, here = view === current.view || (view === "latents" && current.view === "latent");
      tab.setAttribute("aria-current", here ? "page" : "false");
      tab.setAttribute("href", to(view));
    });
  };
  return { draw, element: h("nav", { class: "menu bar-of-tools", "aria-label": "views" }, tabs, h("span", { class: "spring" }),
    h("span", { class: "muted" }, about.model), about.saes.length > 1 ? run : h("bdi", {}, about.saes[0].run),
    frozen ? null : h("button", { type: "button", onclick: save }, "Save as a file"), said) };
}

async function go(hash, bar) {
  leave?.();
  leave = answered = null;
  const visit = visits += 1, isHere = () => visit === visits;
  try {
    const state = parsed(hash);
    if (!frozen && (state.view !== current.view || state.run !== current.run)) {
      for (const key of answers.keys()) if (!/^(about|overview) /.test(key)) answers.delete(key);
    }
    current = state;
    bar.draw();
    const isLatents = ["latents", "latent"].includes(state.view);
    views.tool.hidden = isLatents && !!pages;
    if (!isLatents) views.overview.hidden = views.latent.hidden = true;
    document.title = `${TABS[state.view] ?? "Latent"} · ${state.run}`;
    if (isLatents) {
      views.tool.replaceChildren(muted("The rows are encoded, which the first time takes some seconds to a minute."));
      await latentsView(state, state.view === "latent" ? state.latent : null, isHere);
    } else if (state.view === "runs") {
      await runsView(views.tool, state, isHere);
    } else {
      leave = (state.view === "steer" ? steeringView : textView)(views.tool, state);
    }
  } catch (error) {
    if (!isHere()) return;
    views.overview.hidden = views.latent.hidden = true;
    views.tool.hidden = false;
    views.tool.replaceChildren(h("p", { class: "notice", role: "alert" }, error.message));
  }
}

ask("about", {}).then((document) => {
  about = document;
  current = { run: about.saes[0].run };
  const bar = menu();
  views.overview.before(bar.element);
  addEventListener("keydown", (event) => { if (!views.overview.hidden || !views.latent.hidden) pages?.onKey(event); });
  addEventListener("hashchange", () => { if (location.hash !== link(current)) go(location.hash, bar); });
  go(frozen ? location.hash || frozen.hash : location.hash, bar);
});
