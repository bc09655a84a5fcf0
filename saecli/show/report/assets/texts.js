// The texts in which a latent fires: the strongest, some by strength, and some at random.

const BEFORE = 12, AFTER = 6; // tokens shown about the peak until a text is unfolded
const REACH = 4; // more, so that a text begins and ends with whole words
const FIFTHS = ["Strongest fifth", "Second fifth", "Middle fifth", "Fourth fifth", "Weakest fifth"];
const shown = { texts: "strongest", unfolded: false }; // the same from one latent to the next

function shaded(text, value, largest, peak) {
  if (!value) return h("span", {}, readable(text));
  const share = Math.min(1, Math.abs(value) / largest);
  const token = h("span", { class: `fires ${value < 0 ? "negative" : ""} ${peak ? "peak" : ""}`,
    title: `${alone(text)}  ${number(+value.toPrecision(3))}` }, readable(text));
  token.style.setProperty("--share", (0.12 + 0.88 * share).toFixed(3));
  return token;
}

// The first and the end of the tokens shown about the peak, where words begin if any do within reach.
function cutAtWords(texts, peak) {
  const begins = (place) => place <= 0 || place >= texts.length || /^\s/.test(texts[place]) || /\s$/.test(texts[place - 1]);
  const outwards = (from, step) => {
    for (let more = 0; more <= REACH; more += 1) if (begins(from + step * more)) return from + step * more;
    return from;
  };
  return [Math.max(0, outwards(peak - BEFORE, -1)), Math.min(texts.length, outwards(peak + 1 + AFTER, 1))];
}

function excerpt(example, strings, scale) {
  const size = h("b", { class: "value" }, number(+example.code.toPrecision(4)));
  if (!example.tokens) return h("li", { class: "example" }, size, h("span", {}, `row ${number(example.row)}`));
  const texts = example.tokens.map((string) => strings[string]);
  const codes = new Map();
  for (let at = 0; at < example.fires.length; at += 2) codes.set(example.fires[at], example.fires[at + 1]);
  const roles = new Map(example.roles);
  const pieces = texts.map((text, place) => [
    roles.has(place) ? h("span", { class: `role ${roles.get(place)}` }, roles.get(place)) : null,
    shaded(text, (codes.get(place) ?? 0) * scale, 1000 * scale, place === example.peak)]);
  const [first, end] = cutAtWords(texts, example.peak);
  const rest = (from, to) => (from < to ? h("span", { class: "rest" }, pieces.slice(from, to).flat()) : null);
  const dots = (there) => (there ? h("span", { class: "dots muted" }, "…") : null);
  const words = h("p", { class: "words", dir: "auto" }, rest(0, first), dots(first), pieces.slice(first, end).flat(),
    dots(end < texts.length), rest(end, texts.length));
  const row = h("li", { class: "example" });
  const more = first || end < texts.length ? h("button", { type: "button", class: "more", onclick: () => unfold(row) }) : null;
  row.append(h("p", { class: "source" }, size, " at ", chip(texts[example.peak]), h("span", { class: "muted",
    title: `row ${number(example.row)} of the store` }, ` document ${number(example.document)}, position ${
    number(example.position)}`), more ?? ""), words);
  if (more) {
    words.addEventListener("click", () => { if (!`${getSelection()}`) unfold(row); });
    unfold(row, shown.unfolded);
  }
  return row;
}

function unfold(row, open = !row.classList.contains("unfolded")) {
  const button = row.querySelector(".more");
  if (!button) return;
  row.classList.toggle("unfolded", open);
  button.setAttribute("aria-expanded", `${open}`);
  button.textContent = open ? "less" : "more";
}

// Lists of texts, each with its heading.
function byStrength(samples) {
  const sorted = [...samples].sort((a, b) => Math.abs(b.code) - Math.abs(a.code)), count = sorted.length;
  if (count < FIFTHS.length) return [["Too few to split", sorted]];
  const size = (one) => number(+Math.abs(one.code).toPrecision(3));
  return FIFTHS.map((name, which) => {
    const part = sorted.slice(Math.round(which * count / 5), Math.round((which + 1) * count / 5));
    return [`${name}: ${size(part[part.length - 1])} to ${size(part[0])}`, part];
  });
}

function textsOf(page, strings, largest) {
  const kinds = { strongest: () => [[null, page.examples]], "by strength": () => byStrength(page.samples),
    "at random": () => [[null, page.samples]] };
  const tokens = page.examples.some((one) => one.tokens);
  const negative = [...page.examples, ...page.samples].some((one) => one.code < 0
    || one.fires?.some((value, place) => place % 2 && value < 0));
  const body = h("div", {});
  const draw = () => body.replaceChildren(...kinds[shown.texts]().flatMap(([heading, texts]) => [
    ...(heading ? [h("h3", { class: "fifth" }, heading)] : []),
    h("ol", { class: "examples" }, texts.map((one) => excerpt(one, strings, page.scale)))]));
  const choice = h("select", { "aria-label": "which texts", id: "texts", onchange: () => {
    shown.texts = choice.value;
    draw();
  } }, Object.keys(kinds).map((name) => h("option", { value: name, selected: name === shown.texts }, name)));
  const whole = h("input", { type: "checkbox", id: "unfolded", checked: shown.unfolded, onchange: () => {
    shown.unfolded = whole.checked;
    body.querySelectorAll(".example").forEach((row) => unfold(row, shown.unfolded));
  } });
  draw();
  return h("section", { class: "card strongest" }, h("div", { class: "bar-of-tools" },
    h("h2", {}, tokens ? "Texts" : "Rows"), page.examples.length ? choice : null,
    tokens ? h("label", {}, whole, h("span", {}, "unfold")) : null, tokens ? ramp(0, largest, negative) : null),
  page.examples.length ? body : muted("It fires on none of these rows."));
}
