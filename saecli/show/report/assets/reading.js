// A text, or two, each token shaded by its strongest code or by one latent's, or by attribution to what the model said
// next; a token's latents under the pointer.

const NAMES = ["Text", "Compared with"], MOST_LISTED = 200, MOST_RANKED = 10;

// Of a document of `sae read`: its elements, and what a key does. `actions` makes a token's further buttons, `onChoose`
// hears which latent shades the text.
function reading(data, actions = () => null, onChoose = () => {}) {
  const compared = data.compare;
  const why = data.why;
  const latents = new Map([...(compared ?? data).latents, ...(why?.latents ?? [])].map((one) => [one.latent, { ...one,
    parts: (compared ? [one.here, one.there] : [one]).map((part) => ({ ...part,
      fires: part.positions.map((at, index) => [at, part.codes[index]]),
      attributed: part.positions.map((at, index) => [at, part.attributions?.[index]]) })) }]));
  let byCode = !why; // else by attribution
  let chosen = null; // the latent that shades the texts; null for each token's strongest
  const texts = (compared ? [data.tokens, compared.tokens] : [data.tokens]).map((tokens, which) => ({ tokens, which, spans: [], focus: 0, marked: null }));
  const peek = h("div", { class: "peek card", role: "status" });

  // The code, or the attribution, that shades each token of a text, by position.
  function valuesOf(text) {
    const part = chosen == null ? null : latents.get(chosen).parts[text.which];
    if (part) return new Map(byCode ? part.fires : part.attributed);
    if (!byCode) return new Map(text.tokens.map((token, at) => [at, token.attribution]));
    return new Map(text.tokens.flatMap((token, at) => token.latents.slice(0, 1).map((one) => [at, one.code])));
  }

  function shade() {
    const shades = texts.map(valuesOf), values = shades.flatMap((of) => [...of.values()]);
    const sizes = values.map(Math.abs).sort((a, b) => a - b), largest = Math.max(1e-12, sizes.at(-1) ?? 0);
    const least = chosen == null && byCode ? Math.min(largest, sizes[0] ?? largest) : 0;
    texts.forEach((text, which) => text.spans.forEach((span, at) => {
      const value = shades[which].get(at) ?? 0;
      span.classList.toggle("fires", value !== 0);
      span.classList.toggle("negative", value < 0);
      span.style.setProperty("--share", (0.1 + 0.9 * (Math.abs(value) - least) / (largest - least || 1)).toFixed(3));
    }));
    const label = chosen == null ? null : latents.get(chosen).label;
    const all = byCode ? "each token's strongest code" : "attribution to all latents";
    const one = `${byCode ? "" : "attribution to "}latent ${chosen}${label ? `: ${label}` : ""}`;
    caption.replaceChildren(chosen == null ? `shaded by ${all}` : h("b", {}, `shaded by ${one}`));
    reset.hidden = chosen == null;
    reset.textContent = byCode ? "by the strongest" : "by all latents";
    swap.textContent = byCode ? "by attribution" : "by code";
    scale.replaceChildren(ramp(+least.toPrecision(3), +largest.toPrecision(3), values.some((value) => value < 0)));
    const rows = body.flatMap((part) => [...part.querySelectorAll("tr[data-latent]")]);
    rows.forEach((row) => row.classList.toggle("chosen", row.dataset.latent === `${chosen}`));
  }

  function choose(latent) {
    chosen = latents.has(latent) ? latent : null;
    shade();
    onChoose(chosen);
  }

  const pick = (latent) => h("button", { type: "button", class: "pick", title: "shade the text by it",
    onclick: () => choose(latent) }, `${latent}`);

  // A token's latents and their codes, or attributions, the largest first.
  function ranked(text, at) {
    if (byCode) return text.tokens[at].latents.map(({ latent, code }) => [latent, code]);
    const values = [...latents.values()].map(({ latent, parts }) => [latent, new Map(parts[0].attributed).get(at)]);
    return values.filter(([, value]) => value).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, MOST_RANKED);
  }

  function place(span, ...content) {
    peek.replaceChildren(...content.filter(Boolean));
    span.after(peek); // so that Tab goes from the token to its latents
    peek.hidden = false;
    const room = span.parentElement.clientWidth - peek.offsetWidth;
    peek.style.left = `${Math.max(0, Math.min(span.offsetLeft, room))}px`;
    peek.style.top = `${span.offsetTop + span.offsetHeight}px`;
  }

  const rankedList = (entries) => h("ol", { class: "ranked" }, entries.map(([latent, value]) => {
    const { label } = latents.get(latent) ?? {};
    const row = h("li", { class: value < 0 ? "down" : "up" }, h("span", {}, latents.has(latent) ? pick(latent)
      : `${latent}`, label ? ` ${label}` : ""), h("span", { class: "value" }, number(+value.toPrecision(3))));
    row.style.setProperty("--share", Math.abs(value / entries[0][1]).toFixed(3));
    return row;
  }));

  function show(text, at) {
    const token = text.tokens[at], own = chosen == null && byCode ? null : valuesOf(text).get(at);
    place(text.spans[at],
      h("p", {}, token.text ? chip(token.text) : h("span", { class: "muted" }, "further part of the character before"),
        h("span", { class: "muted" }, ` position ${at}${token.role ? `, ${token.role}` : ""}`)),
      token.special ? muted("special, or the first of a window: no codes") : null,
      own ? h("p", {}, chosen == null ? "all latents: " : `latent ${chosen}: `, h("b", {}, number(+own.toPrecision(3)))) : null,
      rankedList(ranked(text, at)), ...[actions(text, at)].flat());
  }

  // Mark the tokens from the focused one to another, and list their latents by the sum of their codes there.
  function mark(text, to) {
    const first = Math.min(text.focus, to), last = Math.max(text.focus, to), sums = new Map();
    unmark();
    text.spans.slice(first, last + 1).forEach((span) => span.classList.add("marked"));
    for (const token of text.tokens.slice(first, last + 1)) {
      for (const { latent, code } of token.latents) sums.set(latent, (sums.get(latent) ?? 0) + code);
    }
    const largest = [...sums].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, MOST_RANKED);
    place(text.spans[last], h("p", {}, `${last + 1 - first} tokens: `, h("span", { class: "muted" },
      "latents by the sum of their codes")), rankedList(largest));
    text.marked = to;
  }

  function unmark() {
    for (const text of texts) {
      text.marked = null;
      text.spans.forEach((span) => span.classList.remove("marked"));
    }
  }

  function focus(text, at) {
    text.spans[text.focus].tabIndex = -1;
    text.focus = Math.max(0, Math.min(text.spans.length - 1, at));
    text.spans[text.focus].tabIndex = 0;
    text.spans[text.focus].focus();
  }

  function textCard(text) {
    const pieces = text.tokens.flatMap(({ text: word, special, role }, at) => {
      const span = h("span", { class: special ? "token special" : "token", tabindex: at ? -1 : 0,
        onpointerenter: () => { if (text.marked === null) show(text, at); },
        onfocus: () => { unmark(); text.focus = at; show(text, at); },
        onpointerdown: (event) => {
          if (!event.shiftKey) return;
          event.preventDefault(); // the focus stays, and no letters are selected
          mark(text, at);
        } },
      word ? word.split("\n").map(readable).join("↵\n") : "·");
      text.spans.push(span);
      const turns = role && role !== "template" && role !== text.tokens[at - 1]?.role;
      return [!turns ? null : h("span", { class: `role ${role}` }, role), span];
    });
    const words = h("div", { class: "words prompt", dir: "auto", onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step && event.target.classList.contains("token")) {
        event.preventDefault();
        const to = (event.shiftKey ? text.marked ?? text.focus : text.focus) + step;
        if (!event.shiftKey) focus(text, to);
        else if (text.spans[to]) mark(text, to);
      }
    }, 
    onpointerleave: () => { peek.hidden = text.marked === null; } }, pieces);
    return card(texts.length > 1 ? NAMES[text.which] : "Text", words);
  }

  const figures = (value) => number(+value.toPrecision(4));
  const figure = (value) => h("td", { class: "figure" }, figures(value));
  const placesOf = (one) => (one.inputs ?? [one]).map(({ layer, site }) => `layer ${layer}, ${site}`).join(" and ");

  const attributed = ({ attributed: { latents: by, error, rest } }) => `${figures(by)} attributed to latents, `
    + `${figures(error)} to the reconstruction error, ${figures(rest)} to the rest: bias, special tokens, curvature.`;

  // What one SAE's latents do to it when removed; `name` makes the cell of a latent.
  function removals(answer, name) {
    const rows = answer.latents.map(({ latent, label, predicted, measured, positions, attributions }) => {
      const sizes = attributions.map(Math.abs), most = positions[sizes.indexOf(Math.max(...sizes))];
      const shades = answer === why ? { class: "open", "data-latent": latent, onclick: () => choose(latent) } : {};
      return h("tr", shades,
      h("td", { class: "figure" }, name(latent), label ? h("span", {}, ` ${label}`) : null), figure(predicted),
      figure(measured), h("td", {}, most == null ? "–" : chip(data.tokens[most].text)));
    });
    const parts = [[`these ${rows.length} together`, "together"], ["all latents", "all"], ["reconstruction error", "error"]];
    rows.push(...parts.map(([words, part]) => h("tr", {}, h("td", { class: "figure" }, words),
      figure(answer.removed[part].predicted), figure(answer.removed[part].measured), h("td", {}, "–"))));
    return h("table", {}, h("thead", {}, h("tr", {}, ["removed", "predicted change", "measured change", "most at"].map((head) =>
      h("th", { scope: "col" }, head)))), h("tbody", {}, rows));
  }

  function whyTable() {
    const name = (word) => `log p(${alone(word)})`;
    const asked = why.against == null ? name(why.token) : `${name(why.token)} − ${name(why.against)}`;
    const title = `Why ${alone(why.token)}${why.against == null ? "" : `, not ${alone(why.against)}`}`;
    const { jointly } = why.removed;
    return h("section", { class: "card latents listed" }, h("h2", {}, title), h("p", {},
      `${asked} after ${alone(data.tokens[why.position].text)} is ${figures(why.value)}: ${attributed(why)}`),
    removals(why, pick), why.also.flatMap((other) => [h("p", {}, h("b", {}, `${other.run}, ${placesOf(other)}: `),
      attributed(other)), removals(other, (latent) => `${latent}`)]),
    jointly ? h("p", {}, `Without the latents of all these tables at once: predicted ${figures(jointly.predicted)}, `
      + `measured ${figures(jointly.measured)}.`) : null);
  }

  function listed() {
    const heads = ["latent", ...texts.flatMap((_, which) => (which ? ["compared with", "at", "tokens"]
      : ["largest code", "at", "tokens"])), "in the store"];
    const inStore = (share) => (share === 0 ? `< ${percent(1 / data.store_rows)}` : percent(share));
    const rows = [...latents.values()].slice(0, MOST_LISTED).map(({ latent, label, frequency, parts }) => h("tr", { class: "open",
      "data-latent": latent, onclick: () => choose(latent) },
    h("td", { class: "figure" }, pick(latent), label ? h("span", {}, ` ${label}`) : null),
    parts.flatMap((part) => [h("td", { class: "figure" }, number(+part.code.toPrecision(4))),
      h("td", {}, part.token == null ? "–" : chip(part.token)), h("td", { class: "figure" }, number(part.fires_on))]),
    h("td", { class: "figure" }, frequency == null ? "–" : inStore(frequency))));
    const title = texts.length > 1 ? "Latents that differ most" : "Strongest latents";
    const more = latents.size - rows.length;
    return h("section", { class: "card latents listed" }, h("h2", {}, title), h("table", {}, h("thead", {}, h("tr", {}, heads.map(
      (head) => h("th", { scope: "col" }, head)))), h("tbody", {}, rows)),
    more > 0 ? muted(`${number(more)} more are listed with their tokens`) : null,
    data.store_rows ? muted(`In the store: how often it fires on ${number(data.store_rows)} rows of it.`) : null);
  }

  const caption = h("span", { role: "status" }), scale = h("span", { class: "spring" });
  const reset = h("button", { type: "button", onclick: () => choose(null) }, "by the strongest");
  const swap = h("button", { type: "button", hidden: !why, onclick: () => { byCode = !byCode; shade(); } });
  const counts = texts.map(({ tokens }) => `${number(tokens.length)} tokens`).join(" and ");
  const heading = h("p", { class: "muted" }, [data.model, placesOf(data), counts].map((word) => h("bdi", { class: "part" }, word)));
  const keys = h("p", { class: "muted" }, "Keys: ", h("kbd", {}, "←"), " and ", h("kbd", {}, "→"), " go through tokens, with ",
    h("kbd", {}, "Shift"), " they mark some, ",
    h("kbd", {}, "Tab"), " to a token's latents, ", h("kbd", {}, "Esc"), " goes back to the strongest.");
  const body = [h("div", { class: "bar-of-tools shading" }, caption, reset, swap, scale),
    h("div", { class: "texts" }, texts.map(textCard)), why ? whyTable() : null, listed()].filter(Boolean);

  function onKey(event) {
    if (event.key !== "Escape") return;
    if (peek.contains(document.activeElement)) texts.find((text) => text.spans.includes(peek.previousSibling))
      .spans.find((span) => span === peek.previousSibling).focus();
    peek.hidden = true;
    unmark();
    choose(null);
  }

  shade();
  return { heading, body, keys, onKey, choose, latents };
}
