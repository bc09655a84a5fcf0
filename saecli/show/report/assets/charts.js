// Charts as SVG, drawn at about the width that they are shown at, so that letters keep their size.

const WIDTH = 300, HEIGHT = 190, MARGIN = { top: 10, right: 14, bottom: 36, left: 44 };

function axis(low, high, logarithmic) {
  if (logarithmic) {
    const from = Math.floor(Math.log10(low) + 1e-9), to = Math.max(Math.ceil(Math.log10(high) - 1e-9), from + 1);
    const step = Math.ceil((to - from) / 5);
    const ticks = [];
    for (let power = from; power <= to; power += step) ticks.push(10 ** power);
    if (ticks.length < 4) ticks.push(...ticks.flatMap((tick) => [2 * tick, 5 * tick]).filter((tick) => tick < 10 ** to));
    return { low: 10 ** from, high: 10 ** to, ticks, at: (value) => (Math.log10(value) - from) / (to - from) };
  }
  const rough = (high - low || 1) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) ticks.push(tick);
  return { low, high, ticks, at: (value) => (value - low) / (high - low || 1) };
}

// x and y: {low, high, log, label, show}; the marks are drawn by `draw`, given the two scales.
function chart(label, x, y, draw) {
  const across = axis(x.low, x.high, x.log), up = axis(y.low, y.high, y.log);
  const px = (value) => MARGIN.left + across.at(value) * (WIDTH - MARGIN.left - MARGIN.right);
  const py = (value) => HEIGHT - MARGIN.bottom - up.at(value) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const bottom = HEIGHT - MARGIN.bottom;
  return h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label },
    up.ticks.map((tick) => h("g", { class: "tick" },
      h("line", { x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: py(tick), y2: py(tick) }),
      h("text", { x: MARGIN.left - 6, y: py(tick) + 4, "text-anchor": "end" }, (y.show ?? brief)(tick)))),
    across.ticks.map((tick) => h("g", { class: "tick" },
      h("line", { x1: px(tick), x2: px(tick), y1: bottom, y2: bottom + 4 }),
      h("text", { x: px(tick), y: bottom + 16, "text-anchor": "middle" }, (x.show ?? brief)(tick)))),
    draw(px, py, bottom),
    h("line", { class: "base", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: bottom, y2: bottom }),
    h("text", { class: "label", x: (MARGIN.left + WIDTH - MARGIN.right) / 2, y: HEIGHT - 4, "text-anchor": "middle" },
      x.label));
}

function brief(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size > 0 && size < 1e-3) return value.toExponential(0);
  return `${+value.toPrecision(4)}`;
}

// Bars between edges; `unit` says what is counted, `word` how an edge reads.
function bars(label, x, edges, counts, unit, word) {
  const most = Math.max(...counts, 1);
  return chart(label, { low: edges[0], high: edges[edges.length - 1], ...x }, { low: 0, high: most },
    (px, py, bottom) => counts.map((count, place) => {
      const left = px(edges[place]), right = px(edges[place + 1]);
      const gap = Math.min(1, (right - left) / 6);
      return h("g", { class: "bar" },
        h("rect", { x: left, width: right - left, y: MARGIN.top, height: bottom - MARGIN.top, class: "hit" }),
        h("rect", { x: left + gap, width: Math.max(right - left - 2 * gap, 0.5), y: py(count),
          height: Math.max(bottom - py(count), count ? 1 : 0) }),
        h("title", {}, `${word(edges[place], edges[place + 1])}: ${number(count)} ${unit}`));
    }));
}

// A curve as a line, another as dots, both of [x, y]; y is logarithmic.
function curves(label, x, line, dots) {
  const points = [...line, ...dots], values = points.map((point) => point[1]);
  const last = Math.max(...points.map((point) => point[0]));
  return chart(label, { low: 0, high: last, label: x }, { low: Math.min(...values), high: Math.max(...values), log: true },
    (px, py) => [h("path", { class: "curve", d: line.map(([at, value], place) => `${place ? "L" : "M"}${px(at)} ${py(value)}`).join("") }),
      dots.map(([at, value]) => h("circle", { class: "dot", cx: px(at), cy: py(value), r: 3 }))].flat());
}
