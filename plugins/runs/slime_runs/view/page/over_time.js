// A rollout as a timeline, an evaluation item by item, one prompt through all its visits.

import { ask, isReport, link } from "./api.js";
import { empty, h, heading, number, percent, rolloutName, seconds, svg, table } from "./dom.js";
import { runCrumb } from "./run.js";
import { event, pager } from "./samples.js";

const LANE = 7;
const ROW = 20;
const BINS = 240;
const PAGE = 100;
const MOST_SAMPLES = 64; // more are drawn by group
const WORDS = { train: "trainer", push: "sync", scored: "group rewards" };

// The stages of a sample in order: [kind, from, to]. The trace has the sum of a sample's tools: it is drawn behind the engine.
function partsOf(one) {
  const [began, generated, scored] = one.times;
  const tools = Math.max(began, generated - one.outside);
  return [["wait", began - one.waited, began], ["engine", began, tools], ["tools", tools, generated], ["reward", generated, scored]].filter(([, from, to]) => to > from);
}

// A lane for each sample: samples after one another share one. With `byGroup` those of a group share one, and samples of
// evaluations, whose groups are many and small, have none.
function lanes(samples, byGroup) {
  const free = [];
  const groups = new Map();
  return samples.map((one) => {
    if (byGroup && one.evaluation) return null;
    if (byGroup) return groups.get(one.group) ?? groups.set(one.group, groups.size).get(one.group);
    const from = one.times[0] - one.waited;
    let lane = free.findIndex((until) => until <= from);
    if (lane < 0) lane = free.push(0) - 1;
    free[lane] = one.times[one.times.length - 1];
    return lane;
  });
}

// The number of intervals in each of BINS bins of [low, high].
function busy(intervals, low, high) {
  const size = (high - low) / BINS || 1;
  const found = new Array(BINS).fill(0);
  for (const [from, to] of intervals) {
    for (let bin = Math.max(0, Math.floor((from - low) / size)); bin < BINS && low + bin * size < to; bin += 1) {
      found[bin] += (Math.min(to, low + (bin + 1) * size) - Math.max(from, low + bin * size)) / size;
    }
  }
  return found;
}

// The gaps between the intervals in [low, high].
function gaps(intervals, low, high) {
  let at = low;
  const found = [];
  for (const [from, to] of intervals.toSorted((a, b) => a[0] - b[0])) {
    if (from > at) found.push([at, from]);
    at = Math.max(at, to);
  }
  return at < high ? [...found, [at, high]] : found;
}

export async function timelinePage(asked) {
  const [run, rollout] = [asked.run ?? ".", Number(asked.rollout)];
  const found = await ask("timeline", { run, rollout });
  const crumbs = [runCrumb(run), [rolloutName(rollout), link("rollout", { run, rollout })]];
  const title = `timeline of ${rolloutName(rollout)}`;
  const address = (to) => link("timeline", { run, rollout: to });
  const turn = (by) => (location.hash = address(Math.max(0, rollout + by)));
  const links = h("div.controls.pager", pager({ before: rollout ? rollout - 1 : null, after: rollout + 1 }, address, ""), h("a", { href: link("rollout", { run, rollout }) }, "samples"));
  if (found.start === null) return { title, crumbs, turn, view: h("div", links, empty("The trace has nothing of this rollout: it has not begun, the run has --no-trace, or more samples than a trace keeps.")) };
  const samples = found.samples.toSorted((a, b) => a.times[0] - b.times[0]);
  const parts = samples.map(partsOf);
  const of = (kind) => parts.flatMap((some) => some.filter(([name]) => name === kind).map(([, from, to]) => [from, to]));
  const stages = Map.groupBy(found.stages, (stage) => stage.what);
  const low = Math.min(0, ...samples.map((one) => one.times[0] - one.waited));
  const until = Math.max(...found.stages.map((stage) => stage.to), ...samples.map((one) => one.times.at(-1)));
  const worked = ["train", "push", "save"].flatMap((what) => (stages.get(what) ?? []).map((stage) => [stage.from, stage.to]));
  const rows = [
    ...["rollout", "eval"].filter((what) => stages.has(what)).map((what) => ({ name: what, kind: `stage of-${what}`, spans: stages.get(what).map((stage) => [stage.from, stage.to]) })),
    ...["wait", "engine", "tools", "reward"].map((kind) => ({ name: { wait: "queued", reward: "rewards" }[kind] ?? kind, kind, spans: of(kind), counted: true })),
    ...[...stages].filter(([what]) => what !== "rollout" && what !== "eval").map(([what, some]) => ({ name: WORDS[what] ?? what, kind: `stage of-${what}`, spans: some.map((stage) => [stage.from, stage.to]), ranks: new Set(some.map((stage) => stage.rank)).size })),
    { name: "trainer waits", kind: "wait", spans: worked.length ? gaps(worked, low, until) : [] },
  ].filter((row) => row.spans.length);
  const times = (row) => (row.counted ? `${row.spans.length} samples` : row.ranks > 1 ? `${row.ranks} ranks` : "");
  const total = (row) => row.spans.reduce((sum, [from, to]) => sum + to - from, 0);
  const facts = rows.map((row) => [
    h("td.short", h(`span.swatch.g-${row.kind.replace("stage of-", "of-")}`, { "aria-hidden": "true" }), ` ${row.name}`), h("td.opt", times(row)),
    ...[total(row), times(row) ? total(row) / row.spans.length : null, Math.max(...row.spans.map(([from, to]) => to - from))].map((value) => h("td.num", value === null ? "" : seconds(value))),
  ]);
  const holder = h("div.scroll");
  const each = h("input", { type: "checkbox", checked: samples.length <= MOST_SAMPLES, onchange: () => draw() });
  const draw = () => holder.replaceChildren(picture(rows, samples, parts, low, until, !each.checked));
  draw();
  const view = h(
    "div",
    links,
    h("p", `${number(samples.length)} samples${found.cut ? " (the first of more)" : ""} in ${seconds(until - low)}.`),
    h("div.controls", h("label", each, " each sample in a lane of its own, instead of each group")),
    samples.some((one) => one.outside) ? h("p.dim", "The trace has how long a sample's tools took, not when: they are drawn behind its engine.") : null,
    holder,
    h("h2", "Time"),
    table(["stage", h("td.opt"), ...["in all", "each", "longest"].map((name) => h("th.num", { scope: "col" }, name))], facts.map((row) => h("tr", row.map((one) => (one instanceof HTMLTableCellElement ? one : h("td", one)))))),
  );
  return { title, crumbs, view, turn };
}

// Round times in [low, high], at most eight.
function round(low, high) {
  const least = (high - low) / 8 || 1;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= least);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => (first + i) * step);
}

function picture(rows, samples, parts, low, until, byGroup) {
  const [width, left] = [1100, 110];
  const x = (at) => left + ((at - low) / (until - low || 1)) * (width - left - 10);
  const lane = lanes(samples, byGroup);
  const tall = rows.length * ROW + 14;
  const height = tall + (lane.reduce((a, b) => Math.max(a, b), 0) + 1) * LANE + 24;
  const bar = (from, to, y, high, kind, text) => {
    const made = svg("rect", { x: x(from).toFixed(2), y: y.toFixed(2), width: Math.max(0.7, x(to) - x(from)).toFixed(2), height: high.toFixed(2), class: kind });
    made.append(svg("title", {}, text));
    return made;
  };
  const size = (until - low) / BINS;
  const drawn = (row, i) => {
    const [y, full] = [i * ROW + 2, ROW - 4];
    if (!row.counted) return row.spans.map(([from, to]) => bar(from, to, y, full, row.kind, `${row.name}: ${seconds(to - from)}, from ${seconds(from)}`));
    const counts = busy(row.spans, low, until);
    const most = Math.max(...counts);
    return counts.flatMap((count, bin) => (count ? [bar(low + bin * size, low + (bin + 1) * size, y + full * (1 - count / most), full * (count / most), row.kind, `${row.name}: ${number(count, 3)} at a time, at most ${number(most, 3)}`)] : []));
  };
  const ticks = round(low, until);
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, class: "gantt", role: "img", "aria-label": `${rows.map((row) => row.name).join(", ")} over ${seconds(until - low)}; the table has the numbers` },
    ...ticks.map((at) => svg("line", { x1: x(at), x2: x(at), y1: 0, y2: height - 16, class: "tick" })),
    ...rows.flatMap((row, i) => [svg("text", { x: 2, y: i * ROW + 14 }, row.name), ...drawn(row, i)]),
    svg("text", { x: 2, y: tall + 8 }, byGroup ? "each group" : "each sample"),
    svg("g", { class: byGroup ? "groups" : "" }, ...samples.flatMap((one, i) => {
      if (lane[i] === null) return [];
      const what = `group ${one.group}, sample ${one.sample}: ${one.prompt} + ${one.new} tokens, ${one.turns} turns, ${one.status}`;
      return parts[i].map(([kind, from, to]) => bar(from, to, tall + lane[i] * LANE, LANE - 1, kind, `${what}; ${kind} ${seconds(to - from)}`));
    })),
    ...ticks.map((at) => svg("text", { x: x(at), y: height - 3, "text-anchor": x(at) > width - 40 ? "end" : "middle" }, seconds(at))),
  );
}

// Orange is low, blue is high; the number says it, too.
function shade(score, low, high) {
  if (score === null || high === low) return "transparent";
  const share = (score - low) / (high - low);
  return share < 0.5 ? `rgb(235 120 20 / ${Math.round(60 * (0.5 - share))}%)` : `rgb(50 120 235 / ${Math.round(60 * (share - 0.5))}%)`;
}

export async function evaluationPage(asked) {
  const { run = ".", data_set } = asked;
  const found = await ask("evaluation", { run, data_set });
  const scores = found.items.flatMap((item) => item.scores.filter((score) => score !== null));
  const [low, high] = scores.reduce(([a, b], score) => [Math.min(a, score), Math.max(b, score)], [Infinity, -Infinity]);
  const body = h("tbody");
  const count = h("p.dim");
  const more = h("button", { onclick: () => fill() }, "more");
  const newest = found.rollouts.length - 1;
  const kinds = {
    "most changes first": () => found.items.toSorted((a, b) => b.flips - a.flips),
    "lost since the evaluation before": () => found.items.filter((item) => item.scores[newest] < item.scores[newest - 1]),
    "won since the evaluation before": () => found.items.filter((item) => item.scores[newest] > item.scores[newest - 1]),
    "lost since the first": () => found.items.filter((item) => item.scores[newest] < item.scores[0]),
    "changed at least once": () => found.items.filter((item) => item.flips),
    "never above the lowest score": () => found.items.filter((item) => item.scores.every((score) => score === null || score === low)),
    "all, in order": () => found.items,
  };
  let [items, drawn] = [[], 0];

  function line(item) {
    item.says = h("td.start");
    return h(
      "tr",
      h("td.num", number(item.item)),
      item.says,
      h("td.num", item.flips),
      item.scores.map((score, i) => {
        const address = link("sample", { run, rollout: found.rollouts[i], data_set, sample: item.samples[i] });
        const changed = i > 0 && score !== null && item.scores[i - 1] !== null && score !== item.scores[i - 1];
        return h("td", h(changed ? "a.flip" : "a", { href: score === null || isReport ? null : address, style: `background: ${shade(score, low, high)}` }, number(score, 3)));
      }),
    );
  }

  async function fill() {
    const added = items.slice(drawn, drawn + PAGE);
    const of = items;
    body.append(...added.map(line));
    drawn += added.length;
    more.hidden = drawn >= items.length;
    for (let left = isReport ? [] : added.filter((item) => item.at); left.length && of === items; ) {
      const texts = await ask("texts", { run, at: left.map((item) => item.at) });
      left = left.filter((item, i) => !texts[i] || (item.says.replaceChildren(texts[i][0]), false));
    }
  }

  function show(kind) {
    [items, drawn] = [kinds[kind](), 0];
    count.replaceChildren(`${number(items.length)} of ${number(found.items.length)} items; a frame marks a score that changed`);
    body.replaceChildren();
    fill();
  }
  const share = (i) => {
    const known = found.items.map((item) => item.scores[i]).filter((score) => score !== null);
    return known.length ? known.reduce((a, b) => a + b) / known.length : null;
  };
  const isShare = low >= 0 && high <= 1;
  const means = found.rollouts.map((_, i) => (share(i) === null ? "-" : isShare ? percent(share(i)) : number(share(i), 3)));
  const choose = h("select", { "aria-label": "which items", onchange: (event) => show(event.target.value) }, Object.keys(kinds).map((kind) => h("option", kind)));
  const head = [h("th.num", "item"), "question", h("th.num", "changes"), ...found.rollouts.map((rollout) => h("th.num", `after ${rollout}`))];
  show(Object.keys(kinds)[0]);
  const grid = h("div.scroll", h("table.matrix", h("thead", h("tr", head.map(heading)), h("tr.means", h("td"), h("td", "mean of all items"), h("td"), means.map((text) => h("td.num", h("b", text))))), body));
  const view = found.items.length ? h("div", h("div.controls", h("label", "show ", choose)), count, grid, more) : empty("No sample of this evaluation is kept.");
  return { title: `evaluation ${data_set}`, crumbs: [runCrumb(run)], view, stamp: found.stamp };
}

export async function promptPage(asked) {
  const { run = ".", row } = asked;
  const found = await ask("prompt", { run, row });
  const view = h(
    "div",
    found.text === null ? null : h("div.text.box", found.text),
    found.left_off ? h("p.dim", `${found.left_off} older visits are left off`) : null,
    found.visits.length ? null : empty("No commit and no kept sample has this row."),
    found.visits.map((visit) => [
      h("h2", visit.rollout === null ? `Group ${visit.group}` : h("a", { href: link("group", { run, rollout: visit.rollout, group: visit.group }) }, `Group ${visit.group}, ${rolloutName(visit.rollout)}`)),
      visit.scores.length ? h("p", "rewards ", h("b", visit.scores.map((score) => number(score, 3)).join(", ")), `; ${Object.entries(visit.fates).map(([fate, n]) => `${n} ${fate}`).join(", ")}`) : h("p.dim", "its samples are not kept"),
      visit.events.length ? table(["event", "details", "in the commit of rollout"], visit.events.map(event)) : empty("No commit has recorded it yet."),
    ]),
  );
  return { title: `row ${row} of the data`, crumbs: [runCrumb(run)], view };
}
