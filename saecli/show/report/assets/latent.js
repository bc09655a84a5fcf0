// One latent's page.

function tokenList(title, entries, largest, kind) {
  return card(title, h("ol", { class: "ranked" }, entries.map(([text, value]) => {
    const row = h("li", { class: kind }, chip(text), h("span", { class: "value" }, number(+value.toPrecision(3))));
    row.style.setProperty("--share", Math.min(1, Math.abs(value) / largest).toFixed(3));
    return row;
  })));
}

// Other latents; an entry is the latent and a correlation.
function otherLatents(title, entries, note, labels) {
  return card(title, entries.length ? h("ol", { class: "ranked" }, entries.map(([other, value]) => {
    const row = h("li", { class: "near" }, h("span", {}, h("a", { href: link({ view: "latent", latent: other }) }, `${other}`),
      labels?.[other] ? ` ${readable(labels[other])}` : ""), h("span", { class: "value" }, value.toFixed(3)));
    row.style.setProperty("--share", Math.max(0, value).toFixed(3));
    return row;
  })) : muted("none"), muted(note));
}

function logitHistogram(page) {
  const low = page.suppressed[0][1], high = page.promoted[0][1], step = (high - low) / page.logits.length;
  const edges = Array.from({ length: page.logits.length + 1 }, (_, place) => low + place * step);
  return card("Output logits", bars("histogram of logits", { label: "tokens by the change of their logit" }, edges,
    page.logits, "tokens", (from, to) => `${number(+from.toPrecision(3))} to ${number(+to.toPrecision(3))}`));
}

function latentPage(data, latent, content) {
  const page = content.latents.find((one) => one.latent === latent), { latents, edges } = data;
  const share = latents.frequency[latent], largest = latents.largest[latent];
  const figures = [["fires on", percent(share)], ["rows", number(Math.round(share * data.firing.rows))],
    ["mean", number(latents.mean[latent])], ["largest", number(largest)]];
  if (latents.classes) figures.push(["class", latents.classes[latents.class[latent]]]);
  if (latents.verdict?.[latent]) figures.push(["in the model", latents.verdict[latent]]);
  for (const [name, share, scaling] of page.places ?? []) {
    figures.push([`share at ${name}`, share.toFixed(3)]);
    if (scaling !== null) figures.push([`scaling at ${name}`, scaling.toFixed(3)]);
  }
  for (const [role, share] of page.roles ?? []) if (share) figures.push([`on ${role}`, percent(share)]);
  if (page.feature) figures.push(["nearest feature", `${page.feature[0]}`], ["its cosine", page.feature[1].toFixed(3)]);
  const histogram = card("Activations", page.counts.length ? bars("histogram of activations", { log: true,
    label: "rows by size of the activation" }, edges.slice(page.low, page.low + page.counts.length + 1), page.counts, "rows",
  (low, high) => `${number(low)} to ${number(high)}`) : muted("It fires on none of these rows."));
  const outputs = page.promoted ? [...page.promoted, ...page.suppressed].map(([, value]) => Math.abs(value)) : [];
  const scale = Math.max(...outputs, 1e-12);
  return h("div", { class: "two" },
    h("div", { class: "side" }, h("dl", { class: "tiles" }, figures.map(([name, value]) => h("div", {
      class: ["class", "in the model"].includes(name) ? "class" : null }, h("dt", {}, name), h("dd", {}, value)))), histogram,
    page.promoted ? [logitHistogram(page), h("div", { class: "pair" }, tokenList("Promotes", page.promoted, scale, "up"),
      tokenList("Suppresses", page.suppressed, scale, "down"))] : null),
    textsOf(page, content.strings, largest),
    h("div", { class: "pair near-list" }, otherLatents("Nearest decoder vectors", page.neighbours, "by cosine in the metric of training, if known", latents.label),
      otherLatents("Fire together", page.together, "by phi, the correlation of firing", latents.label)));
}
