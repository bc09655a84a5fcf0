// The overview of all latents and the page of each. `load` gives a latent's content as a promise; `labelling` makes the
// element by which labels are written, where they can be.

function latentPages(data, views, load, labelling = () => null) {
  const table = latentTable(data);
  let scrolled = 0;

  function rowsOf(split, rows) {
    return `${number(rows)} ${{ test: "held-out rows", train: "training rows" }[split] ?? "rows"}`;
  }

  function tiles() {
    const { measures, firing } = data, total = data.latents.frequency.length;
    const on = `on ${rowsOf(measures.split, measures.rows)}`, these = `these ${rowsOf(data.heading.split, firing.rows)}`;
    const dead = measures.dead_fraction;
    const entries = [["FVU", number(measures.fvu), `fraction of variance unexplained, ${on}`],
      ["L0", number(measures.l0), `latents that fire on a row, of ${number(total)}, ${on}`],
      ["cosine", number(measures.cosine), `between row and reconstruction, ${on}`],
      ["dead", dead == null ? "–" : percent(dead), dead == null
        ? "not known: sae train counts at its end which latents fire on no training row"
        : "of the latents fire on none of the training rows"],
      ["silent", number(firing.silent), `latents fire on none of ${these}, ${percent(firing.silent / total)}`],
      ["dense", number(firing.dense), `latents fire on more than ${percent(data.dense)} of ${these}`]];
    return h("dl", { class: "tiles" }, entries.map(([name, value, words]) => h("div", {}, h("dt", {}, name),
      h("dd", {}, value), h("dd", { class: "muted" }, words))));
  }

  // Names and values, also within lists and their parts, by number from 0.
  const flat = (entries, before = "") => Object.entries(entries).flatMap(([key, value]) => {
    const name = before + key.replaceAll("_", " ");
    return value !== null && typeof value === "object" ? flat(value, `${name} `) : [[name, value]];
  });

  function section(name, entries) {
    return h("div", {}, h("h3", {}, name), h("table", { class: "entries" }, h("tbody", {}, flat(entries).map(
      ([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, h("bdi", {},
        typeof value === "string" ? value : number(value))))))));
  }

  // A box to open a latent by its number.
  function jump() {
    const box = h("input", { type: "number", class: "jump", min: 0, max: data.latents.frequency.length - 1, required: true,
      placeholder: "latent", "aria-label": "latent to go to" });
    return h("form", { class: "go", onsubmit: (event) => {
      event.preventDefault();
      location.hash = link({ view: "latent", latent: Number(box.value) });
    } }, h("label", {}, h("span", {}, "Go to"), box));
  }

  // The charts that have something to show, and a sentence in place of the other.
  function charts() {
    const { l0, frequency } = data;
    const about = (low, high) => high - low > 1.01 ? `${number(low + 0.5)} to ${number(high - 0.5)}` : number(low + 0.5);
    const share = (low, high) => `on ${percent(low)} to ${percent(high)} of the rows`;
    const drawn = [];
    let sentence = null;
    const filled = l0.counts.flatMap((count, place) => count ? [place] : []);
    if (filled.length === 1) {
      sentence = h("p", { class: "muted instead" },
        `Every row has ${about(l0.edges[filled[0]], l0.edges[filled[0] + 1])} active latents.`);
    } else drawn.push(card("Active latents per row", bars("histogram of L0", { label: "L0" }, l0.edges, l0.counts, "rows", about)));
    if (frequency.counts.some(Boolean)) {
      drawn.push(card("How often latents fire", bars("histogram of firing frequencies", { log: true,
        label: "fraction of rows", show: percent }, frequency.edges, frequency.counts, "latents", share)));
    }
    const { batches, held_out } = data.training;
    if (batches.length + held_out.length > 1) {
      drawn.push(card("FVU in training", curves("FVU in training, by step", "step; dots: held-out rows", batches, held_out)));
    }
    return [h("div", { class: "charts" }, drawn), sentence];
  }

  function overviewPage() {
    const { heading, measures, firing } = data;
    const place = [heading.site, heading.layer != null && `layer ${heading.layer}`].filter(Boolean).join(" of ");
    const words = [`${number(heading.d_sae)} latents`, heading.activation, [place, heading.model].filter(Boolean).join(" of "),
      `${rowsOf(heading.split, firing.rows)} of ${heading.data}`].filter(Boolean);
    views.overview.append(...[
      h("header", {}, h("h1", { tabindex: "-1" }, h("bdi", {}, heading.run)), h("p", { class: "muted" }, words.map(
        (word) => h("bdi", { class: "part" }, word)))),
      ...data.notes.map((note) => h("p", { class: "notice" }, note)), tiles(),
      ...charts(), table.element(jump()),
      h("details", { class: "card" }, h("summary", {}, h("h2", {}, "Measures")), h("div", { class: "sections" },
        section("measures, as of sae eval", measures), section("firing", { split: heading.split, ...firing }))),
      h("footer", { class: "muted" }, "Written by ", h("code", {}, "sae report"), ". Keys: ", h("kbd", {}, "/"),
        " searches, ", h("kbd", {}, "g"), " goes to a number, ", h("kbd", {}, "←"), " and ", h("kbd", {}, "→"),
        " go through latents, ", h("kbd", {}, "Esc"),
        " goes back.")].filter(Boolean));
  }

  function neighbourIn(order, latent, step) {
    const at = order.indexOf(latent);
    return at < 0 ? order[0] : order[at + step];
  }

  function outside(latent) {
    const { neuronpedia } = data.heading;
    return neuronpedia && h("span", { class: "part" }, h("a", { href: `${neuronpedia}/${latent}`, target: "_blank",
      rel: "noreferrer" }, "its page on Neuronpedia"));
  }

  function aboutLatent(latent) {
    const label = data.latents.label?.[latent];
    const score = data.latents.score?.[latent];
    return [label ? h("b", { class: "part" }, readable(label)) : "",
      score ? h("span", { class: "part" }, `score ${score.toFixed(2)}, chance 0.5`) : "", h("bdi", { class: "part" }, data.heading.run),
      outside(latent) ?? ""];
  }

  function changed(latent) { // by another label
    table.changed(latent);
    views.latent.querySelector(".about").replaceChildren(...aboutLatent(latent));
  }

  function showLatent(latent) {
    const order = table.order();
    const turn = (name, step) => {
      const to = neighbourIn(order, latent, step);
      return to == null ? h("span", { class: "button off" }, name) : h("a", { class: "button", href: link({ view: "latent", latent: to }),
        rel: step < 0 ? "prev" : "next" }, name);
    };
    const content = h("div", { class: "muted", role: "status" }, "loading");
    const title = h("h1", { tabindex: "-1" }, `Latent ${latent}`);
    views.latent.replaceChildren(h("header", {}, h("nav", { class: "bar-of-tools" },
      h("a", { class: "button", href: link({ view: "latents" }), rel: "up" }, "All latents"), h("span", { class: "spring" }), jump(),
      turn("‹ previous", -1), turn("next ›", 1)), title, h("p", { class: "muted about" }, aboutLatent(latent)),
    labelling(latent) ?? ""), content);
    const place = table.place.get(latent);
    if (place == null) {
      content.textContent = Number.isInteger(latent) && latent < data.latents.frequency.length
        ? "This latent has no page; sae report --latent chooses which have." : "There is no such latent.";
      return title;
    }
    load(latent, place).then(
      (loaded) => content.replaceWith(latentPage(data, latent, loaded)),
      (error) => { content.textContent = `${error.message}.`; });
    return title;
  }

  // Show the page of a latent, or the overview for null.
  function show(latent) {
    if (!views.overview.hidden) scrolled = scrollY;
    const title = latent === null ? views.overview.querySelector("h1") : showLatent(latent);
    const began = views.overview.hidden && views.latent.hidden;
    views.overview.hidden = latent !== null;
    views.latent.hidden = latent === null;
    document.title = latent === null ? `${data.heading.run}: latents` : `latent ${latent} · ${data.heading.run}`;
    scrollTo(0, latent === null ? scrolled : 0);
    if (!began) title.focus({ preventScroll: true });
  }

  function onKey(event) {
    const typing = event.target.matches("input, select, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/" && !typing && !views.overview.hidden) {
      event.preventDefault();
      table.search.focus();
    } else if (event.key === "g" && !typing) {
      event.preventDefault();
      (views.latent.hidden ? views.overview : views.latent).querySelector(".jump").focus();
    } else if (!views.latent.hidden && !typing && ["ArrowLeft", "ArrowRight", "Escape"].includes(event.key)) {
      const rel = { ArrowLeft: "prev", ArrowRight: "next", Escape: "up" }[event.key];
      views.latent.querySelector(`a[rel=${rel}]`)?.click();
    }
  }

  views.overview.replaceChildren();
  overviewPage();
  return { show, onKey, changed };
}
