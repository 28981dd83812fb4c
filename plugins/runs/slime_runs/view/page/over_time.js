// A rollout as a timeline, an evaluation item by item, one prompt through all its visits.

import { ask, isReport, link } from "./api.js";
import { h, number, rolloutName, svg, table } from "./dom.js";
import { runCrumb } from "./run.js";
import { event } from "./samples.js";

const LANE = 5;
const ROW = 18;
const BINS = 240;
const SHOWN = 300;
const WORDS = { train: "trainer", push: "sync", scored: "group rewards" };

// What a sample was in, in order: [kind, from, to]. Tools stand behind the engine; what the trace knows is their sum.
function partsOf(one) {
  const [began, generated, scored] = one.times;
  const tools = Math.max(began, generated - one.outside);
  return [["wait", began - one.waited, began], ["engine", began, tools], ["tools", tools, generated], ["reward", generated, scored]].filter(([, from, to]) => to > from);
}

// Intervals -> a lane for each, as few lanes as there are at a time.
function lanes(samples) {
  const free = [];
  return samples.map((one) => {
    const from = one.times[0] - one.waited;
    let lane = free.findIndex((until) => until <= from);
    if (lane < 0) lane = free.push(0) - 1;
    free[lane] = one.times[one.times.length - 1];
    return lane;
  });
}

// How many of the intervals there are in each of BINS bins of [low, high].
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

// What is left of [low, high] without the intervals.
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
  const turn = (by) => (location.hash = link("timeline", { run, rollout: Math.max(0, rollout + by) }));
  if (found.start === null) return { title, crumbs, turn, view: h("p.dim", "the trace has nothing of this rollout (--no-trace, or more samples than it keeps)") };
  const samples = found.samples.toSorted((a, b) => a.times[0] - b.times[0]);
  const parts = samples.map(partsOf);
  const of = (kind) => parts.flatMap((some) => some.filter(([name]) => name === kind).map(([, from, to]) => [from, to]));
  const stages = Map.groupBy(found.stages, (stage) => stage.what);
  const low = Math.min(0, ...samples.map((one) => one.times[0] - one.waited));
  const until = Math.max(...found.stages.map((stage) => stage.to), ...samples.map((one) => one.times.at(-1)));
  const worked = ["train", "push", "save"].flatMap((what) => (stages.get(what) ?? []).map((stage) => [stage.from, stage.to]));
  const rows = [
    ...["rollout", "eval"].filter((what) => stages.has(what)).map((what) => ({ name: what, kind: `stage of-${what}`, spans: stages.get(what).map((stage) => [stage.from, stage.to]) })),
    ...["wait", "engine", "tools", "reward"].map((kind) => ({ name: { wait: "wait for a place", reward: "rewards" }[kind] ?? kind, kind, spans: of(kind), counted: true })),
    ...[...stages].filter(([what]) => what !== "rollout" && what !== "eval").map(([what, some]) => ({ name: WORDS[what] ?? what, kind: `stage of-${what}`, spans: some.map((stage) => [stage.from, stage.to]), ranks: new Set(some.map((stage) => stage.rank)).size })),
    { name: "trainer waits", kind: "wait", spans: worked.length ? gaps(worked, low, until) : [] },
  ].filter((row) => row.spans.length);
  const [width, left] = [1100, 110];
  const x = (seconds) => left + ((seconds - low) / (until - low || 1)) * (width - left - 10);
  const lane = lanes(samples);
  const tall = rows.length * ROW + 14;
  const height = tall + (lane.reduce((a, b) => Math.max(a, b), 0) + 1) * LANE + 24;
  const bar = (from, to, y, high, kind, text) => {
    const made = svg("rect", { x: x(from).toFixed(2), y: y.toFixed(2), width: Math.max(0.7, x(to) - x(from)).toFixed(2), height: high.toFixed(2), class: kind });
    made.append(svg("title", {}, text));
    return made;
  };
  const seconds = (value) => `${number(value, 3)} s`;
  const total = (row) => row.spans.reduce((sum, [from, to]) => sum + to - from, 0);
  const size = (until - low) / BINS;
  const drawn = (row, i) => {
    const [y, full] = [i * ROW + 2, ROW - 4];
    if (!row.counted) return row.spans.map(([from, to]) => bar(from, to, y, full, row.kind, `${row.name}: ${seconds(to - from)}, from ${seconds(from)}`));
    const counts = busy(row.spans, low, until);
    const most = Math.max(...counts);
    return counts.flatMap((count, bin) => (count ? [bar(low + bin * size, low + (bin + 1) * size, y + full * (1 - count / most), full * (count / most), row.kind, `${row.name}: ${number(count, 3)} at a time, at most ${number(most, 3)}`)] : []));
  };
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, class: "gantt", width: "100%" },
    ...rows.flatMap((row, i) => [svg("text", { x: 2, y: i * ROW + 13 }, row.name), ...drawn(row, i)]),
    svg("text", { x: 2, y: tall + 8 }, "each sample"),
    ...samples.flatMap((one, i) => {
      const what = `group ${one.group}, sample ${one.sample}: ${one.prompt} + ${one.new} tokens, ${one.turns} turns, ${one.status}`;
      return parts[i].map(([kind, from, to]) => bar(from, to, tall + lane[i] * LANE, LANE - 1, kind, `${what}; ${kind} ${seconds(to - from)}`));
    }),
    ...[0, 0.25, 0.5, 0.75, 1].map((part) => svg("text", { x: x(low + part * (until - low)) - (part === 1 ? 40 : 0), y: height - 4 }, seconds(low + part * (until - low)))),
  );
  const times = (row) => (row.counted ? `${row.spans.length} samples` : row.ranks > 1 ? `${row.ranks} ranks` : "");
  const facts = rows.map((row) => [row.name, times(row), total(row), times(row) ? total(row) / row.spans.length : null, Math.max(...row.spans.map(([from, to]) => to - from))]);
  const view = h(
    "div",
    h("p", `${samples.length} samples${found.cut ? " (the first of more)" : ""} in ${seconds(until - low)}. `, h("span.legend", rows.filter((row) => row.counted).map((row) => h(`span.g-${row.kind}`, row.name)))),
    h("details.box", { open: true }, h("summary", "seconds"), table(["", "", "in all", "each", "longest"], facts)),
    samples.some((one) => one.outside) ? h("p.dim", "Of a sample's tools the trace has the seconds, not when: they are drawn behind its engine.") : null,
    picture,
  );
  return { title, crumbs, view, turn };
}

function shade(score, low, high) {
  return score === null ? "transparent" : `hsl(${Math.round(((score - low) / (high - low || 1)) * 120)} 60% 50% / 45%)`;
}

export async function evaluationPage(asked) {
  const { run = ".", data_set } = asked;
  const found = await ask("evaluation", { run, data_set });
  const scores = found.items.flatMap((item) => item.scores.filter((score) => score !== null));
  const [low, high] = scores.reduce(([a, b], score) => [Math.min(a, score), Math.max(b, score)], [Infinity, -Infinity]);
  const body = h("tbody");
  const count = h("p.dim");
  const newest = found.rollouts.length - 1;
  const kinds = {
    "most flips first": () => found.items.toSorted((a, b) => b.flips - a.flips),
    "lost since the evaluation before": () => found.items.filter((item) => item.scores[newest] < item.scores[newest - 1]),
    "won since the evaluation before": () => found.items.filter((item) => item.scores[newest] > item.scores[newest - 1]),
    "lost since the first": () => found.items.filter((item) => item.scores[newest] < item.scores[0]),
    "all, in order": () => found.items,
  };
  function show(kind) {
    const items = kinds[kind]();
    count.replaceChildren(`${items.length} of ${found.items.length} items${items.length > SHOWN ? `, the first ${SHOWN}` : ""}`);
    body.replaceChildren(
      ...items.slice(0, SHOWN).map((item) =>
        h(
          "tr",
          h("td.num", item.item),
          h("td.num", item.flips),
          item.scores.map((score, i) => {
            const address = link("sample", { run, rollout: found.rollouts[i], data_set, sample: item.samples[i] });
            const changed = i > 0 && score !== null && item.scores[i - 1] !== null && score !== item.scores[i - 1];
            const made = h(changed ? "a.flip" : "a", score === null || isReport ? {} : { href: address }, number(score, 3));
            made.style.background = shade(score, low, high);
            return h("td", made);
          }),
        ),
      ),
    );
  }
  const choose = h("select", { "aria-label": "which items", onchange: (event) => show(event.target.value) }, Object.keys(kinds).map((kind) => h("option", kind)));
  show(Object.keys(kinds)[0]);
  const view = h("div", h("div.controls", choose), count, h("table.matrix", h("thead", h("tr", ["item", "flips", ...found.rollouts.map((rollout) => `after ${rollout}`)].map((word) => h("th", word)))), body));
  return { title: `evaluation ${data_set}`, crumbs: [runCrumb(run)], view, stamp: found.stamp };
}

export async function promptPage(asked) {
  const { run = ".", row } = asked;
  const found = await ask("prompt", { run, row });
  const view = h(
    "div",
    found.text === null ? null : h("div.text", found.text),
    found.left_off ? h("p.dim", `${found.left_off} older visits are left off`) : null,
    found.visits.length ? null : h("p.dim", "no commit and no kept sample tells of this row"),
    found.visits.map((visit) => [
      h("h2", visit.rollout === null ? `group ${visit.group}` : h("a", { href: link("group", { run, rollout: visit.rollout, group: visit.group }) }, `group ${visit.group}, ${rolloutName(visit.rollout)}`)),
      visit.scores.length ? h("p", `rewards ${visit.scores.map((score) => number(score)).join(", ")}; ${Object.entries(visit.fates).map(([fate, n]) => `${n} ${fate}`).join(", ")}`) : h("p.dim", "its samples are not kept"),
      visit.events.length ? table(["what", "", "in the commit of rollout"], visit.events.map(event)) : h("p.dim", "no commit tells of it yet"),
    ]),
  );
  return { title: `row ${row} of the data`, crumbs: [runCrumb(run)], view };
}
