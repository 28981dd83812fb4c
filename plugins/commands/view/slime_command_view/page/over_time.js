// A rollout as a timeline, an evaluation item by item, one prompt through all its visits.

import { ask, isReport, link } from "./api.js";
import { h, number, svg, table } from "./dom.js";
import { runCrumb } from "./run.js";
import { event } from "./samples.js";

const LANE = 5;
const ROW = 18;
const SHOWN = 300;

// Intervals -> a lane for each, as few lanes as there are at a time.
function lanes(samples) {
  const free = [];
  return samples.map((one) => {
    const from = one.times[0];
    let lane = free.findIndex((until) => until <= from);
    if (lane < 0) lane = free.push(0) - 1;
    free[lane] = one.times[one.times.length - 1];
    return lane;
  });
}

export async function timelinePage(asked) {
  const [run, rollout] = [asked.run ?? ".", Number(asked.rollout)];
  const found = await ask("timeline", { run, rollout });
  const crumbs = [runCrumb(run), [`rollout ${rollout}`, link("rollout", { run, rollout })]];
  const title = `timeline of rollout ${rollout}`;
  const turn = (by) => (location.hash = link("timeline", { run, rollout: Math.max(0, rollout + by) }));
  if (found.start === null) return { title, crumbs, turn, view: h("p.dim", "the trace has nothing of this rollout (--no-trace, or more samples than it keeps)") };
  const samples = found.samples.toSorted((a, b) => a.times[0] - b.times[0]);
  const lane = lanes(samples);
  const kinds = [...new Set(found.stages.map((stage) => stage.what))];
  const until = Math.max(...found.stages.map((stage) => stage.to), ...samples.map((one) => one.times.at(-1)));
  const [width, left] = [1100, 90];
  const x = (seconds) => left + (seconds / until) * (width - left - 10);
  const tall = kinds.length * ROW + 14;
  const height = tall + (lane.reduce((a, b) => Math.max(a, b), 0) + 1) * LANE + 24;
  const bar = (from, to, y, high, kind, text) => {
    const made = svg("rect", { x: x(from).toFixed(2), y, width: Math.max(0.7, x(to) - x(from)).toFixed(2), height: high, class: kind });
    made.append(svg("title", {}, text));
    return made;
  };
  const seconds = (value) => `${number(value, 3)} s`;
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, class: "gantt", width: "100%" },
    ...kinds.map((kind, i) => svg("text", { x: 2, y: i * ROW + 12 }, kind)),
    ...found.stages.map((stage) => bar(stage.from, stage.to, kinds.indexOf(stage.what) * ROW + 2, ROW - 5, `stage of-${stage.what}`, `${stage.what}: ${seconds(stage.to - stage.from)}, from ${seconds(stage.from)}`)),
    svg("text", { x: 2, y: tall + 8 }, "samples"),
    ...samples.flatMap((one, i) => {
      const [from, generated, scored] = one.times;
      const what = `group ${one.group}, sample ${one.sample}: ${one.prompt} + ${one.new} tokens, ${one.turns} turns, ${one.status}`;
      const y = tall + lane[i] * LANE;
      return [
        bar(from, generated, y, LANE - 1, "engine", `${what}; engine and tools ${seconds(generated - from)}`),
        bar(generated, scored, y, LANE - 1, "reward", `${what}; reward ${seconds(scored - generated)}`),
      ];
    }),
    ...[0, 0.25, 0.5, 0.75, 1].map((part) => svg("text", { x: x(part * until) - (part === 1 ? 40 : 0), y: height - 4 }, seconds(part * until))),
  );
  const total = (kind) => found.stages.filter((stage) => stage.what === kind).reduce((sum, stage) => sum + stage.to - stage.from, 0);
  const waits = samples.map((one) => one.times[0]);
  const view = h(
    "div",
    h("p", kinds.map((kind) => `${kind} ${seconds(total(kind))}; `), `${samples.length} samples${found.cut ? " (the first of more)" : ""}`),
    samples.length ? h("p.dim", `blue: engine and tools; orange: reward. The last sample began ${seconds(waits.at(-1))} and the slowest ended ${seconds(Math.max(...samples.map((one) => one.times.at(-1))))} after the beginning.`) : null,
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
  return { title: `evaluation ${data_set}`, crumbs: [runCrumb(run)], view };
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
      h("h2", visit.rollout === null ? `group ${visit.group}` : h("a", { href: link("group", { run, rollout: visit.rollout, group: visit.group }) }, `group ${visit.group}, rollout ${visit.rollout}`)),
      visit.scores.length ? h("p", `rewards ${visit.scores.map((score) => number(score)).join(", ")}; ${Object.entries(visit.fates).map(([fate, n]) => `${n} ${fate}`).join(", ")}`) : h("p.dim", "its samples are not kept"),
      visit.events.length ? table(["what", "", "in the commit of rollout"], visit.events.map(event)) : h("p.dim", "no commit tells of it yet"),
    ]),
  );
  return { title: `row ${row} of the data`, crumbs: [runCrumb(run)], view };
}
