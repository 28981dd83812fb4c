// Curves: by uPlot where the page was built with it (zoom by dragging, back by a double click), else as a plain SVG.

import { h, number, svg } from "./dom.js";

const plot = await import("uplot").then((module) => module.default, () => null);
const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];
const HEIGHT = 170;
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

// {title, x, lines: [{name, values, colour}], marks: [{x, colour}], smoothing, pick(x)} -> element
export function chart(it) {
  const box = h("figure.chart", h("figcaption", it.title, h("span.dim", ` ${last(it)}`)));
  if (plot) new ResizeOnce(box, (width) => box.append(drawn(it, width)));
  else box.append(sketched(it));
  return box;
}

function last(it) {
  return it.lines.map((line) => number(line.values.findLast((value) => value !== null) ?? null)).join(", ");
}

// uPlot wants a width, which an element has when it is shown.
class ResizeOnce {
  constructor(box, draw) {
    const observer = new ResizeObserver(([entry]) => {
      if (!entry.contentRect.width) return;
      observer.disconnect();
      draw(Math.floor(entry.contentRect.width));
    });
    observer.observe(box);
  }
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function drawn(it, width) {
  const holder = h("div");
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--dim"), grid, ticks: grid, font: "11px system-ui" };
  const raw = it.smoothing > 0;
  const series = it.lines.flatMap((line, i) => {
    const stroke = colour(COLOURS[(line.colour ?? i) % COLOURS.length]);
    const main = { label: line.name, stroke, width: 1.5, spanGaps: true, points: { show: it.x.length < 40, size: 4 } };
    return raw ? [{ label: `${line.name} as it is`, stroke: `${stroke}55`, width: 1, spanGaps: true, points: { show: false } }, main] : [main];
  });
  const data = it.lines.flatMap((line) => (raw ? [line.values, smoothed(line.values, it.smoothing)] : [line.values]));
  const made = new plot(
    {
      width,
      height: HEIGHT,
      legend: { show: false },
      scales: { x: { time: false } },
      cursor: { sync: { key: "step" }, drag: { x: true, y: false } },
      axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => number(tick, 3)) }],
      series: [{ label: "rollouts" }, ...series],
      hooks: { draw: [(self) => drawMarks(self, it.marks ?? [])] },
    },
    [it.x, ...data],
    holder,
  );
  let pressed = 0;
  made.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
  made.over.addEventListener("click", (event) => {
    if (it.pick && Math.abs(event.clientX - pressed) < 3 && made.cursor.idx !== null) it.pick(it.x[made.cursor.idx]);
  });
  made.over.title = it.pick ? "drag: zoom; double click: all; click: this rollout" : "drag: zoom; double click: all";
  return holder;
}

function drawMarks(self, marks) {
  const { ctx, bbox } = self;
  ctx.save();
  ctx.setLineDash([4, 3]);
  for (const mark of marks) {
    const x = Math.round(self.valToPos(mark.x, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = colour(mark.colour);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function sketched(it) {
  const [width, height, left] = [420, HEIGHT - 20, 50];
  const all = it.lines.flatMap((line) => line.values).filter((value) => value !== null);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const [first, end] = [it.x[0], it.x[it.x.length - 1]];
  const across = (x) => left + ((x - first) / (end - first || 1)) * (width - left - 5);
  const up = (y) => height - 15 - ((y - low) / (high - low || 1)) * (height - 25);
  const lines = it.lines.map((line, i) =>
    svg("polyline", {
      points: smoothed(line.values, it.smoothing)
        .map((value, at) => (value === null ? null : `${across(it.x[at]).toFixed(1)},${up(value).toFixed(1)}`))
        .filter(Boolean)
        .join(" "),
      class: `line c${(line.colour ?? i) % COLOURS.length}`,
    }),
  );
  const marks = (it.marks ?? []).map((mark) => svg("line", { x1: across(mark.x), x2: across(mark.x), y1: 5, y2: height - 15, class: "mark", stroke: `var(${mark.colour})` }));
  const words = [[high, 12], [low, height - 12]].map(([value, y]) => svg("text", { x: 2, y }, number(value, 3)));
  const ends = [[first, left], [end, width - 30]].map(([value, x]) => svg("text", { x, y: height }, number(value)));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "sketch" }, ...lines, ...marks, ...words, ...ends);
  if (it.pick) {
    picture.addEventListener("click", (event) => {
      const box = picture.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * width;
      it.pick(it.x.reduce((best, one) => (Math.abs(across(one) - x) < Math.abs(across(best) - x) ? one : best)));
    });
  }
  return picture;
}

// Bars over [low, high) bins; `pick(bin or null)` when one is clicked.
export function histogram(title, values, pick, bins = 24) {
  const known = values.filter((value) => value !== null);
  if (!known.length) return h("figure.histogram", h("figcaption", title), h("p.dim", "none has one"));
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
    bar.append(svg("title", {}, `${number(range.low)} to ${number(range.high)}: ${count}`));
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
  return h(
    "figure.histogram",
    h("figcaption", title),
    svg("svg", { viewBox: `0 0 ${width} ${height}` }, ...bars.flat()),
    h("div.ends", h("span", number(low)), h("span", number(high))),
  );
}
