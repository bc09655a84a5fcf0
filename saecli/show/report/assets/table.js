// The table of all latents: searched, sorted, and shown a page at a time.

const PAGE = 50;

function latentTable(data) {
  const { latents, dense } = data;
  const total = latents.frequency.length;
  const place = new Map(latents.chosen.map((latent, index) => [latent, index]));
  const of = (column) => (latent) => latents[column]?.[place.get(latent)];
  const topFrequency = Math.log10(latents.frequency.reduce((most, one) => Math.max(most, one), 1e-9)), floor = -6;

  const frequencyCell = (latent) => {
    const share = latents.frequency[latent];
    const length = share ? (Math.log10(share) - floor) / (topFrequency - floor) : 0;
    const bar = h("span", { class: "meter", "aria-hidden": "true" }, h("span", {}));
    bar.firstChild.style.width = `${Math.max(0, Math.min(1, length)) * 100}%`;
    return [h("span", {}, percent(share)), bar];
  };
  const tokensCell = (column) => (latent) => (of(column)(latent) ?? []).map(chip);
  const textCell = (latent) => {
    const [before, at, after] = of("snippets")(latent) ?? [];
    return [h("span", { class: "chips" }, tokensCell("tokens")(latent)), at == null ? null
      : h("span", { class: "snippet" }, readable(before), h("mark", {}, readable(at)), readable(after))];
  };
  const columns = [
    { name: "latent", key: (latent) => latent, show: (latent) => place.has(latent)
      ? h("a", { href: link({ view: "latent", latent }) }, latent) : h("span", { class: "muted" }, latent), first: 1 },
    { name: "fires on", key: (latent) => latents.frequency[latent], show: frequencyCell, first: -1 },
    { name: "mean", key: (latent) => latents.mean[latent], show: (latent) => number(latents.mean[latent]), first: -1,
      wide: true },
    { name: "largest", key: (latent) => latents.largest[latent], show: (latent) => number(latents.largest[latent]),
      first: -1, wide: true },
  ];
  if (latents.interest) {
    columns.push({ name: "interest", key: (latent) => of("interest")(latent) ?? null, first: -1,
      show: (latent) => of("interest")(latent)?.toFixed(2) ?? "–" });
  }
  const classOfLatent = (latent) => latents.classes[latents.class[latent]];
  if (latents.classes) {
    columns.push({ name: "class", key: classOfLatent, show: classOfLatent, first: 1, text: true, wide: true },
      { name: "nu elsewhere", key: (latent) => latents.nu[latent], show: (latent) => latents.nu[latent]?.toFixed(2) ?? "–",
        first: 1, wide: true });
  }
  const label = (latent) => latents.label?.[latent] || null;
  if (latents.label) {
    columns.push({ name: "label", key: (latent) => label(latent)?.toLowerCase() ?? null, first: 1, text: true,
      show: (latent) => readable(label(latent) ?? "") });
  }
  const score = (latent) => latents.score?.[latent] ?? null;
  if (latents.score?.some((one) => one !== null)) {
    columns.push({ name: "score", key: score, show: (latent) => score(latent)?.toFixed(2) ?? "–", first: -1, wide: true });
  }
  const verdict = (latent) => latents.verdict?.[latent] ?? null;
  if (latents.verdict) columns.push({ name: "in the model", key: verdict, show: verdict, first: 1, text: true });
  const words = (column) => (latent) => (of(column)(latent) ?? []).join("\u0000").trim().toLowerCase() || null;
  if (latents.tokens) columns.push({ name: "strongest at", key: words("tokens"), show: textCell, first: 1, text: true });
  if (latents.promoted) {
    columns.push({ name: "promotes", key: words("promoted"), show: tokensCell("promoted"), first: 1, text: true,
      wide: !!latents.tokens });
  }

  const searchedOf = (latent) => [label(latent) ?? "", verdict(latent) ?? "", ...(of("tokens")(latent) ?? []),
    (of("snippets")(latent) ?? []).join(""), ...(of("promoted")(latent) ?? [])].join("\n").toLowerCase();
  const searched = Array.from({ length: total }, (_, latent) => searchedOf(latent));
  const kinds = {
    "all latents": () => true, "those that fire": (latent) => latents.frequency[latent] > 0,
    "dense ones": (latent) => latents.frequency[latent] > dense, "silent ones": (latent) => !latents.frequency[latent],
  };
  for (const name of [...latents.classes ?? []].sort()) kinds[name] = (latent) => classOfLatent(latent) === name;
  if (latents.chosen.length < total) kinds["those with a page"] = (latent) => place.has(latent);
  const state = { query: "", kind: "all latents", column: columns[latents.interest ? 4 : 1], direction: -1, page: 0, order: [] };

  const search = h("input", { type: "search", id: "search", placeholder: latents.tokens || latents.promoted || latents.label
    ? "a token, some text or a number" : "a number", autocomplete: "off", spellcheck: "false",
  oninput: () => { state.query = search.value; state.page = 0; update(); } });
  const kind = h("select", { id: "kind", onchange: () => { state.kind = kind.value; state.page = 0; update(); } },
    Object.keys(kinds).map((name) => h("option", { value: name }, name)));
  const body = h("tbody", {});
  const count = h("p", { class: "muted", role: "status", id: "count" });
  const turn = (name, title, to) => h("button", { type: "button", "aria-label": title, title, onclick: () => {
    state.page = to(); draw();
  } }, name);
  const pages = () => Math.max(1, Math.ceil(state.order.length / PAGE));
  const pager = [turn("«", "first page", () => 0), turn("‹", "previous page", () => state.page - 1),
    turn("›", "next page", () => state.page + 1), turn("»", "last page", () => pages() - 1)];
  const heads = columns.map((column) => h("th", { scope: "col", class: classOf(column) }, h("button", { type: "button",
    onclick: () => {
      state.direction = state.column === column ? -state.direction : column.first;
      state.column = column;
      state.page = 0;
      update();
    } }, column.name)));

  function classOf(column) {
    return [column.text ? "text" : "figure", column.wide ? "wide" : ""].join(" ").trim();
  }

  function update() {
    const trimmed = state.query.trim().toLowerCase(), { key } = state.column;
    const found = [];
    for (let latent = 0; latent < total; latent += 1) {
      if (kinds[state.kind](latent) && (!trimmed || `${latent}` === trimmed || `#${latent}` === trimmed
        || searched[latent].includes(trimmed))) {
        found.push([key(latent), latent]);
      }
    }
    found.sort(([a, i], [b, j]) => {
      if (a === b) return i - j;
      if (a === null || b === null) return a === null ? 1 : -1; // what is missing comes last either way
      return (a < b ? -1 : 1) * state.direction;
    });
    state.order = found.map((entry) => entry[1]);
    draw();
  }

  function changed(latent) { // by another label
    searched[latent] = searchedOf(latent);
    update();
  }

  function draw() {
    const begin = state.page * PAGE, shown = state.order.slice(begin, begin + PAGE);
    heads.forEach((head, which) => {
      const sorted = columns[which] === state.column;
      head.setAttribute("aria-sort", sorted ? (state.direction > 0 ? "ascending" : "descending") : "none");
    });
    body.replaceChildren(...shown.map((latent) => h("tr", { class: place.has(latent) ? "open" : "", onclick: (event) => {
      if (place.has(latent) && !event.target.closest("a") && !`${getSelection()}`) location.hash = link({ view: "latent", latent });
    } }, columns.map((column) => h("td", { class: classOf(column) }, column.show(latent))))));
    count.textContent = shown.length ? `${number(begin + 1)}–${number(begin + shown.length)} of ${number(
      state.order.length)}` : "no latent matches";
    pager.forEach((button, which) => { button.disabled = which < 2 ? !state.page : state.page >= pages() - 1; });
  }

  update();
  const element = (tool) => h("section", { class: "card latents", "aria-label": "latents" },
    h("div", { class: "bar-of-tools" }, h("h2", {}, "Latents"),
      h("label", { class: "find" }, h("span", {}, "Search"), search), h("label", {}, h("span", {}, "Show"), kind), tool),
    h("table", {}, h("thead", {}, h("tr", {}, heads)), body),
    h("div", { class: "bar-of-tools foot" }, count,
      h("nav", { class: "pager", "aria-label": "pages of the table" }, pager)),
    h("p", { class: "muted explained" }, latents.interest ? `Interest, 0 to 1: contrast × (1 + agreement) / 2. Contrast is 1 − mean / largest `
      + `activation; agreement is the fraction of pairs of strongest texts that peak at the same token. It is 0 for a latent `
      + `that fires on more than ${percent(dense)} of the rows or on fewer than ${data.fewest} rows; one without a page has `
      + "none." : null, latents.classes ? " Class: by decoder norms and latent scaling; nu elsewhere is about 1 if the other "
      + "hook points have the latent too, and about 0 if they do not." : null));
  return { element, search, changed, order: () => state.order.filter((latent) => place.has(latent)), place };
}
