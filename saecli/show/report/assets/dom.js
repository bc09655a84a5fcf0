// Elements, numbers and tokens. Whatever comes from data becomes text, never markup.

const SVG = new Set(["svg", "g", "path", "rect", "line", "text", "circle", "title"]);

function h(name, attributes, ...children) {
  const element = SVG.has(name) ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  for (const child of children.flat()) if (child != null) element.append(child);
  return element;
}

const whole = new Intl.NumberFormat("en");

function number(value) {
  if (value == null) return "–";
  if (Number.isInteger(value)) return whole.format(value);
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

function percent(share) {
  if (share === 0) return "0%";
  if (share < 1e-5) return `${(100 * share).toExponential(0)}%`;
  return `${(100 * share).toLocaleString("en", { maximumSignificantDigits: 3 })}%`;
}

// What a letter that cannot be seen looks like; marks keep their effect inside texts, but for those that turn
// the rest of a line round.
const PICTURES = { "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "␣", "\u00ad": "·", "\ufeff": "·" };
const CONTROLS = /[\u0000-\u001f\u007f-\u00a0\u00ad\u202a-\u202e\u2066-\u2069\ufeff]/g;
const MARKS = /[\u061c\u200b-\u200f\u2028\u2029\u2060-\u2065\u206a-\u206f]/g;

const code = (letter) => `U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

function readable(text) {
  return text.replace(CONTROLS, (letter) => PICTURES[letter] ?? `‹${code(letter)}›`);
}

// A token that stands alone: spaces at its ends can be seen, and so can marks without a width.
function alone(text) {
  if (text === "") return "‹empty›";
  return readable(text).replace(MARKS, (letter) => `‹${code(letter)}›`)
    .replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}

const chip = (text) => h("bdi", { class: "chip" }, alone(text));

const card = (title, ...content) => h("section", { class: "card" }, h("h2", {}, title), ...content);

const muted = (text) => h("p", { class: "muted" }, text);

// What the shades mean, on both sides of zero where codes are negative too.
function ramp(least, most, negative) {
  return h("p", { class: "ramp" }, negative ? [h("span", {}, number(-most)), h("span", { class: "shades below" })] : null,
    h("span", {}, number(least)), h("span", { class: "shades" }), h("span", {}, number(most)));
}
