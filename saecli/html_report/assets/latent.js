// One latent's page, whose data are loaded when it is opened.

const files = new Map(); // by number: a promise of the file's content
const waiting = new Map();

// Each data file calls this. A page from disk may run scripts that lie beside it, but not read files.
window.saeLatents = (file, content) => waiting.get(file)?.(content);

function load(file) {
  if (!files.has(file)) {
    files.set(file, new Promise((resolve, reject) => {
      const name = `latents/${`${file}`.padStart(5, "0")}.js`;
      const script = h("script", { src: name, onload: () => { script.remove(); reject(new Error(`${name} is damaged`)); },
        onerror: () => {
          script.remove();
          files.delete(file);
          reject(new Error(`${name} cannot be loaded; it has to lie beside index.html`));
        } });
      waiting.set(file, resolve);
      document.head.append(script);
    }));
  }
  return files.get(file);
}

function shaded(text, value, largest, peak) {
  if (!value) return h("span", {}, readable(text));
  const share = Math.min(1, Math.abs(value) / largest);
  const token = h("span", { class: `fires ${value < 0 ? "negative" : ""} ${peak ? "peak" : ""}`,
    title: `${alone(text)}  ${number(+value.toPrecision(3))}` }, readable(text));
  token.style.setProperty("--share", (0.12 + 0.88 * share).toFixed(3));
  return token;
}

function excerpt(example, strings, scale) {
  if (!example.tokens) {
    return h("li", { class: "example" }, h("span", { class: "value" }, number(+example.code.toPrecision(4))),
      h("span", {}, `row ${number(example.row)}`));
  }
  const gaps = new Set(example.gaps);
  const pieces = example.tokens.flatMap((string, place) => [
    gaps.has(place) ? h("span", { class: "muted", title: "rows are missing here" }, " ⋯ ") : null,
    shaded(strings[string], example.codes[place] * scale, 1000 * scale, place === example.peak)]);
  return h("li", { class: "example" },
    h("p", { class: "source" }, h("b", { class: "value" }, number(+example.code.toPrecision(4))), " at ",
      chip(strings[example.tokens[example.peak]]), h("span", { class: "muted", title: `row ${number(example.row)} of the store` },
        ` document ${number(example.document)}, position ${number(example.position)}`)),
    h("p", { class: "words", dir: "auto" }, pieces));
}

function tokenList(title, entries, largest, kind) {
  return card(title, h("ol", { class: "ranked" }, entries.map(([text, value]) => {
    const row = h("li", { class: kind }, chip(text), h("span", { class: "value" }, number(+value.toPrecision(3))));
    row.style.setProperty("--share", Math.min(1, Math.abs(value) / largest).toFixed(3));
    return row;
  })));
}

function neighbourList(entries) {
  const list = card("Nearest decoder vectors", h("ol", { class: "ranked" }, entries.map(([other, cosine]) => {
    const row = h("li", { class: "near" }, h("a", { href: `#latent/${other}` }, `${other}`),
      h("span", { class: "value" }, cosine.toFixed(3)));
    row.style.setProperty("--share", Math.max(0, cosine).toFixed(3));
    return row;
  })), muted("by cosine"));
  list.classList.add("near-list");
  return list;
}

// What the shades mean, on both sides of zero where codes are negative too.
function ramp(largest, negative) {
  return h("p", { class: "ramp" }, negative ? [h("span", {}, number(-largest)), h("span", { class: "shades below" })] : null,
    h("span", {}, "0"), h("span", { class: "shades" }), h("span", {}, number(largest)));
}

function latentPage(data, latent, content) {
  const page = content.latents.find((one) => one.latent === latent), { latents, edges } = data;
  const share = latents.frequency[latent], largest = latents.largest[latent];
  const figures = [["fires on", percent(share)], ["rows", number(Math.round(share * data.measures.rows))],
    ["mean", number(latents.mean[latent])], ["largest", number(largest)]];
  for (const [name, share, scaling] of page.places ?? []) {
    figures.push([`share at ${name}`, share.toFixed(3)]);
    if (scaling !== null) figures.push([`scaling at ${name}`, scaling.toFixed(3)]);
  }
  if (page.feature) figures.push(["nearest feature", `${page.feature[0]}`], ["its cosine", page.feature[1].toFixed(3)]);
  const histogram = card("Activations", page.counts.length ? bars("histogram of activations", { log: true,
    label: "rows by size of the activation" }, edges.slice(page.low, page.low + page.counts.length + 1), page.counts, "rows",
  (low, high) => `${number(low)} to ${number(high)}`) : muted("It fires on none of these rows."));
  const outputs = page.promoted ? [...page.promoted, ...page.suppressed].map(([, value]) => Math.abs(value)) : [];
  const scale = Math.max(...outputs, 1e-12);
  const tokens = page.examples.some((one) => one.tokens);
  const negative = page.examples.some((one) => one.code < 0 || one.codes?.some((value) => value < 0));
  const examples = page.examples.map((one) => excerpt(one, content.strings, page.scale));
  return h("div", { class: "two" },
    h("div", { class: "side" }, h("dl", { class: "tiles" }, figures.map(([name, value]) => h("div", {}, h("dt", {}, name),
      h("dd", {}, value)))), histogram,
    page.promoted ? h("div", { class: "pair" }, tokenList("Promotes", page.promoted, scale, "up"),
      tokenList("Suppresses", page.suppressed, scale, "down")) : null),
    h("section", { class: "card strongest" }, h("div", { class: "bar-of-tools" },
      h("h2", {}, tokens ? "Strongest texts" : "Strongest rows"), tokens ? ramp(largest, negative) : null),
    examples.length ? h("ol", { class: "examples" }, examples) : muted("It fires on none of these rows.")),
    neighbourList(page.neighbours));
}
