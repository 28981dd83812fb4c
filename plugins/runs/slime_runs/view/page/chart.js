// Curves: by uPlot where the page was built with it (zoom by dragging, back by a double click), else as a plain SVG.

import { h, number, svg } from "./dom.js";

const plot = await import("uplot").then((module) => module.default, () => null);
export const charts = plot ? "uplot" : "sketches";
const COLOURS = 6;
const HEIGHT = 190;
const MOST_DOTS = 40;
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000];

// Exponential moving average that does not lean towards its first value.
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// {title, about, unit, lines: [{name, colour, points: [[x, value, error]]}], marks: [{x, colour}], smoothing, zoom: {range},
// pick(x), remove()} -> element. Charts with the same `zoom` object keep its range when they are drawn again.
export function chart(it) {
  const xs = [...new Set(it.lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const lines = it.lines.map((line) => {
    const at = new Map(line.points.map(([x, value, error]) => [x, [value, error]]));
    const raw = xs.map((x) => at.get(x)?.[0] ?? null);
    return { ...line, raw, values: smoothed(raw, it.smoothing), errors: xs.map((x) => at.get(x)?.[1] ?? null) };
  });
  const readout = h(it.lines.length > 2 ? "span.readout.many" : "span.readout");
  const made = { ...it, xs, lines, read: (at) => readout.replaceChildren(...words(it, xs, lines, at)) };
  made.read(null);
  const label = `${it.title}: ${lines.map((line) => summary(line, lines.length)).join("; ")}`;
  const holder = h("div.plot", { role: "img", "aria-label": label, tabindex: plot ? 0 : null });
  if (plot) {
    holder.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
    holder.addEventListener("blur", () => (readout.removeAttribute("aria-live"), made.read(null)));
    drawWhenShown(made, holder);
  } else holder.append(sketched(made));
  const remove = it.remove ? h("button.plain", { onclick: it.remove, "aria-label": `remove ${it.title}` }, "×") : null;
  return h("figure.chart", h("figcaption", h("span.title", it.title), readout, remove), h("div.about", it.about ?? ""), holder);
}

function summary(line, count) {
  const known = line.raw.filter((value) => value !== null);
  const range = `${known.length} values, first ${number(known[0] ?? null)}, last ${number(known.at(-1) ?? null)}`;
  return count > 1 ? `${line.name} ${range}` : range;
}

// Values under the cursor, or the last ones; beside a smoothed value is the raw one. Between two points of a line its
// value is that of the first.
function words(it, xs, lines, at) {
  const shown = lines.map((line) => {
    const last = line.raw.findLastIndex((value) => value !== null);
    const before = line.raw.findLastIndex((value, i) => value !== null && i <= (at ?? last));
    const i = at !== null && at > last ? -1 : before;
    const [value, raw, error] = [line.values[i], line.raw[i], line.errors[i]]; // none at -1
    const more = [!error ? "" : ` ± ${number(1.96 * error, 2)}`, it.smoothing && lines.length === 1 && i >= 0 ? ` (raw ${number(raw, 3)})` : ""];
    return h(lines.length > 1 ? `b.k${line.colour % COLOURS}` : "b", value === undefined || value === null ? "-" : `${number(value, lines.length > 1 ? 3 : 4)}${more.join("")}`);
  });
  return [at === null ? "" : h("span.dim", `${it.unit} ${number(xs[at], 4)} `), ...shown.flatMap((one) => [one, " "])];
}

// uPlot wants a width, which an element has when it is shown.
function drawWhenShown(it, holder) {
  let made = null;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (!width || !holder.isConnected) return;
    if (made) made.setSize({ width, height: HEIGHT });
    else made = drawn(it, width, holder);
  }).observe(holder);
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function drawn(it, width, holder) {
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--dim"), grid, ticks: grid, font: "11px system-ui", labelFont: "11px system-ui" };
  const points = { show: it.xs.length < MOST_DOTS, size: 5 };
  const series = it.lines.flatMap((line) => {
    const stroke = colour(`--c${line.colour % COLOURS}`);
    const main = { label: line.name, stroke, width: 1.75, spanGaps: true, points };
    return it.smoothing ? [{ stroke: `${stroke}59`, width: 1, spanGaps: true, points: { show: false } }, main] : [main];
  });
  const ends = it.lines.flatMap((line) => line.values.flatMap((value, i) => (value === null || line.errors[i] === null ? [] : [-1.96, 1.96].map((by) => [value, value + by * line.errors[i]]))));
  // With the bars of the values in view.
  function range(_, low, high) {
    const inView = ends.filter(([value]) => value >= low && value <= high).map(([, end]) => end);
    const [least, most] = [low, ...inView].reduce(([a, b], end) => [Math.min(a, end), Math.max(b, end)], [high, high]);
    return low === null || !(least || most) ? [0, 1] : plot.rangeNum(least, most, 0.1, true);
  }
  const made = new plot(
    {
      width,
      height: HEIGHT,
      legend: { show: false },
      scales: { x: { time: false }, y: { range } },
      cursor: { sync: { key: it.unit, scales: ["x", null] }, drag: { x: true, y: false } },
      axes: [
        { ...axis, label: it.unit, labelSize: 16, size: 28, ...(it.unit === "rollout" ? { incrs: WHOLE } : {}) },
        { ...axis, size: (_, ticks) => 14 + 7 * Math.max(2, ...(ticks ?? []).map((tick) => tick.length)), values: (_, ticks) => ticks.map((tick) => number(tick, 3)) },
      ],
      series: [{ label: it.unit }, ...series],
      hooks: {
        draw: [(self) => (drawMarks(self, it.marks ?? []), drawErrors(self, it))],
        setCursor: [(self) => it.read(self.cursor.idx ?? null)],
        setSelect: [(self) => self.select.width > 0 && (it.zoom.range = { min: self.posToVal(self.select.left, "x"), max: self.posToVal(self.select.left + self.select.width, "x") })],
      },
    },
    [it.xs, ...it.lines.flatMap((line) => (it.smoothing ? [line.raw, line.values] : [line.values]))],
    holder,
  );
  if (it.zoom.range) made.setScale("x", it.zoom.range);
  let pressed = 0;
  made.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
  made.over.addEventListener("dblclick", () => (it.zoom.range = null));
  made.over.addEventListener("click", (event) => {
    if (it.pick && Math.abs(event.clientX - pressed) < 3 && made.cursor.idx !== null) it.pick(it.xs[made.cursor.idx]);
  });
  made.over.title = `drag: zoom; double click: all${it.pick ? "; click: open this rollout" : ""}`;
  holder.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(it.xs.length - 1, (made.cursor.idx ?? (by < 0 ? it.xs.length : -1)) + by));
    made.setCursor({ left: made.valToPos(it.xs[at], "x"), top: HEIGHT / 3 });
  });
  return made;
}

function drawMarks(self, marks) {
  for (const mark of marks) stroke(self, colour(mark.colour), [4, 3], [[mark.x, null, null]]);
}

// The 95% interval of each value, as a bar.
function drawErrors(self, it) {
  for (const line of it.lines) {
    const bars = line.values.map((value, i) => [it.xs[i], value, line.errors[i]]).filter(([, value, error]) => value !== null && error !== null);
    stroke(self, `${colour(`--c${line.colour % COLOURS}`)}73`, [], bars);
  }
}

function stroke(self, style, dash, bars) {
  const { ctx, bbox } = self;
  ctx.save();
  ctx.setLineDash(dash);
  ctx.strokeStyle = style;
  for (const [x, value, error] of bars) {
    const at = Math.round(self.valToPos(x, "x", true));
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(at, error === null ? bbox.top : self.valToPos(value - 1.96 * error, "y", true));
    ctx.lineTo(at, error === null ? bbox.top + bbox.height : self.valToPos(value + 1.96 * error, "y", true));
    ctx.stroke();
  }
  ctx.restore();
}

function sketched({ xs, lines, marks = [], smoothing, unit, pick }) {
  const [width, height, left] = [420, HEIGHT - 20, 50];
  const all = lines.flatMap((line) => line.raw).filter((value) => value !== null);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const [first, end] = [xs[0], xs[xs.length - 1]];
  const across = (x) => left + ((x - first) / (end - first || 1)) * (width - left - 5);
  const up = (y) => height - 15 - ((y - low) / (high - low || 1)) * (height - 25);
  const drawnLine = (values, kind) =>
    svg("polyline", {
      points: values.map((value, at) => (value === null ? null : `${across(xs[at]).toFixed(1)},${up(value).toFixed(1)}`)).filter(Boolean).join(" "),
      class: kind,
    });
  const curves = lines.flatMap((line) => [
    smoothing ? drawnLine(line.raw, `line raw c${line.colour % COLOURS}`) : null,
    drawnLine(line.values, `line c${line.colour % COLOURS}`),
  ]).filter(Boolean);
  const dashed = marks.map((mark) => svg("line", { x1: across(mark.x), x2: across(mark.x), y1: 5, y2: height - 15, class: "mark", stroke: `var(${mark.colour})` }));
  const heights = [[high, 12], [low, height - 12]].map(([value, y]) => svg("text", { x: 2, y }, number(value, 3)));
  const ends = [[`${unit} ${number(first, 3)}`, left], [number(end, 3), width - 30]].map(([text, x]) => svg("text", { x, y: height }, text));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "sketch" }, ...curves, ...dashed, ...heights, ...ends);
  if (pick) {
    picture.addEventListener("click", (event) => {
      const box = picture.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * width;
      pick(xs.reduce((best, one) => (Math.abs(across(one) - x) < Math.abs(across(best) - x) ? one : best)));
    });
  }
  return picture;
}

// A small line without axes; "" for less than two values.
export function spark(all) {
  const values = all.filter((_, i) => i % Math.ceil(all.length / 100) === 0);
  if (values.length < 2) return "";
  const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const points = values.map((value, i) => `${((i / (values.length - 1)) * 96 + 2).toFixed(1)},${(20 - ((value - low) / (high - low || 1)) * 16).toFixed(1)}`);
  return svg("svg", { width: 100, height: 22, viewBox: "0 0 100 22", preserveAspectRatio: "none", "aria-hidden": "true", class: "spark" }, svg("polyline", { points: points.join(" "), class: "line c0" }));
}

// Bars over [low, high) bins; `pick(bin or null)` when one is clicked.
export function histogram(title, values, pick, bins = 24) {
  const known = values.filter((value) => value !== null);
  if (!known.length) return h("figure.histogram", h("figcaption", title), h("p.empty", "No sample has one."));
  const [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const size = high > low ? (high - low) / bins : 1;
  const counts = new Array(high > low ? bins : 1).fill(0);
  for (const value of known) counts[Math.min(counts.length - 1, Math.floor((value - low) / size))] += 1;
  const most = Math.max(...counts);
  const [width, height] = [300, 90];
  const step = width / counts.length;
  let chosen = null;
  const bars = counts.map((count, i) => {
    const range = { low: low + i * size, high: i === counts.length - 1 ? high : low + (i + 1) * size, last: i === counts.length - 1 };
    const tall = count ? Math.max(2, (count / most) * (height - 4)) : 0;
    const bar = svg("rect", { x: i * step, y: height - tall, width: Math.max(1, step - 1), height: tall, class: "bar" });
    // The whole height can be clicked: a bar of one sample is two pixels.
    const area = svg("rect", { x: i * step, y: 0, width: step, height, class: "area", onclick: () => choose(i, range) });
    area.append(svg("title", {}, `${number(range.low)} to ${number(range.high)}: ${count}`));
    return [bar, area];
  });
  function choose(i, range) {
    chosen = chosen === i ? null : i;
    bars.forEach(([bar], at) => bar.classList.toggle("chosen", at === chosen));
    pick(chosen === null ? null : range);
  }
  const label = `${title}: ${known.length} samples from ${number(low)} to ${number(high)}`;
  return h(
    "figure.histogram",
    h("figcaption", title, h("span.dim", " click a bar to filter")),
    svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, ...bars.flat()),
    h("div.ends", h("span", number(low)), h("span", number(high))),
  );
}
