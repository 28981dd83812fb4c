// The curves of one or several runs: over rollouts or wall time, smoothed beside raw, in groups of what they tell.

import { ask, isReport } from "./api.js";
import { chart } from "./chart.js";
import { h, runName } from "./dom.js";

const LEARNING = "Learning";
const [ANSWERS, HEALTH, MORE] = ["Answers", "Health and speed", "More metrics"];
// Metric -> its title, group, and meaning.
const KNOWN = {
  "rollout/raw_reward": ["Reward", LEARNING, "mean of the trained samples; bars: 95% interval"],
  "train/loss": ["Loss", LEARNING, "what the optimizer lowers"],
  "train/kl_loss": ["KL to the reference", HEALTH, "nats a token, unweighted"],
  "rollout/response_len/mean": ["Answer length", ANSWERS, "trained tokens a sample, mean"],
  "rollout/truncated_ratio": ["Truncated", ANSWERS, "share of answers cut at the token limit"],
  "train/entropy_loss": ["Entropy", ANSWERS, "of the policy, nats a token"],
  "train/grad_norm": ["Gradient norm", HEALTH, "before clipping"],
  "train/train_rollout_logprob_abs_diff": ["Log-prob gap", HEALTH, "trainer against engine, mean, nats"],
  "perf/tokens_per_sec": ["Tokens per second", HEALTH, "answer tokens over the time of the rollout"],
};
const NO_LOSS = 1e-6;
const kept = { smoothing: 0, by: "rollout", more: [], beside: new Map() }; // `beside`: run -> runs laid over it

// Rewards come first, then evaluations, parts of rewards, and the rest as it is given.
const rank = (metric) => ["rollout/raw_reward", "eval/", "rollout/reward/", ""].findIndex((start) => metric.startsWith(start));

function about(metric, title) {
  if (metric in KNOWN) return KNOWN[metric];
  if (title.startsWith("evaluation of ")) return [`Held-out: ${title.slice(14)}`, LEARNING, "mean reward; bars: 95% interval"];
  if (title.startsWith("reward: ")) return [`Reward part: ${title.slice(8)}`, LEARNING, "mean of the samples"];
  return [metric, MORE, ""];
}

// {runs, curves: title -> metric, metrics, others, marks(run) -> [{step, colour}], pick(step)} -> {view, of(run), update()}
export async function curves({ runs, curves: own, metrics, others = [], marks = [], pick = null }) {
  const data = new Map(); // run -> {step, columns, errors, seconds}
  const zoom = { range: null };
  const beside = kept.beside.get(runs[0]) ?? [];
  const shown = () => [...runs, ...(runs.length === 1 ? beside.filter((one) => others.includes(one)) : [])];
  const wanted = () => ({ ...own, ...Object.fromEntries(kept.more.filter((name) => metrics.includes(name)).map((name) => [name, name])) });
  const times = () => (kept.by === "time" ? true : null);
  const holder = h("div");
  const legend = h("div.legend");

  async function load(run) {
    const asked = isReport ? { run, since: -1 } : { run, name: Object.values(wanted()), since: -1, times: times() };
    data.set(run, await ask("metrics", asked));
  }

  async function reload() {
    await Promise.all(shown().map(load));
    draw();
  }

  // The newest step may have got more numbers, so it is asked for again.
  async function grow(run) {
    const known = data.get(run);
    const since = known.step.length ? known.step[known.step.length - 1] - 1 : -1;
    const added = await ask("metrics", { run, name: Object.values(wanted()), since, times: times() });
    const from = known.step.findIndex((step) => step > since);
    const join = (old = [], more = []) => [...old.slice(0, from < 0 ? old.length : from), ...more];
    const columns = (old, more) => Object.fromEntries(Object.keys({ ...old, ...more }).map((name) => [name, join(old[name] ?? known.step.map(() => null), more[name])]));
    data.set(run, {
      step: join(known.step, added.step), seconds: known.seconds && join(known.seconds, added.seconds),
      columns: columns(known.columns, added.columns), errors: columns(known.errors, added.errors),
    });
  }

  function draw() {
    const isTime = kept.by === "time";
    const longest = Math.max(0, ...shown().flatMap((run) => data.get(run).seconds ?? []));
    const [unit, size] = !isTime ? ["rollout", 1] : longest > 7200 ? ["hours", 3600] : longest > 120 ? ["minutes", 60] : ["seconds", 1];
    const x = (run, i) => (isTime ? (data.get(run).seconds?.[i] ?? null) : data.get(run).step[i]);
    const groups = new Map([LEARNING, ANSWERS, HEALTH, MORE].map((name) => [name, []]));
    const notes = [];
    for (const [key, metric] of Object.entries(wanted()).sort(([, a], [, b]) => rank(a) - rank(b))) {
      const [title, group, meaning] = about(metric, key);
      const lines = shown().map((run, colour) => {
        const { step, columns, errors } = data.get(run);
        const points = step.map((_, i) => [x(run, i), columns[metric]?.[i] ?? null, errors[metric]?.[i] ?? null]);
        return { name: runName(run), colour, points: points.filter(([at, value]) => at !== null && value !== null).map(([at, ...rest]) => [at / size, ...rest]) };
      }).filter((line) => line.points.length);
      if (!lines.length) continue;
      if (metric === "train/loss" && lines.every((line) => line.points.every(([, value]) => Math.abs(value) < NO_LOSS))) {
        notes.push("The loss is 0 throughout: with one optimizer step a rollout that is its value, and not a sign of no learning.");
        continue;
      }
      const at = ({ step, colour }) => ({ x: x(runs[0], data.get(runs[0]).step.indexOf(step)) / size, colour });
      const remove = kept.more.includes(key) ? () => ((kept.more = kept.more.filter((one) => one !== key)), draw()) : null;
      const known = data.get(runs[0]).step;
      groups.get(group).push(chart({
        title, about: meaning, unit, lines, smoothing: kept.smoothing, zoom, remove, marks: marks.filter((mark) => known.includes(mark.step)).map(at), pick: isTime ? null : pick,
      }));
    }
    const colours = shown().map((run, i) => h(`span.key.k${i % 6}`, h("span.line", { "aria-hidden": "true" }), runName(run), beside.includes(run) ? h("button.plain", { "aria-label": `remove ${run}`, onclick: () => lay(run, false) }, "×") : null));
    legend.replaceChildren(...(shown().length > 1 ? colours : []));
    holder.replaceChildren(
      ...[...groups].filter(([, some]) => some.length).map(([name, some]) => h("section", h("h2", name), h("div.charts", some))),
      ...notes.map((text) => h("p.dim", text)),
      ...(isTime && !longest ? [h("p.empty", "The run has no timeline (--no-trace), so the curves have no wall time.")] : []),
    );
  }

  function lay(run, isThere) {
    kept.beside.set(runs[0], isThere ? beside.push(run) && beside : beside.splice(beside.indexOf(run), 1) && beside);
    return reload();
  }

  const value = h("output", `${kept.smoothing}`);
  const smoothing = h("input", {
    type: "range", min: 0, max: 0.98, step: 0.02, value: kept.smoothing, "aria-label": "smoothing",
    oninput: (event) => ((kept.smoothing = Number(event.target.value)), value.replaceChildren(event.target.value), draw()),
  });
  const option = (value, text) => h("option", { value, selected: kept.by === value }, text);
  const choose = (label, words, choices, then) =>
    h("select", { "aria-label": label, onchange: (event) => then(event.target.value).then(() => (event.target.value = "")) }, h("option", { value: "" }, words), choices.map((name) => h("option", { value: name }, name)));
  const controls = h(
    "div.controls",
    h("label", "smoothing ", smoothing, " ", value),
    isReport ? null : h("label", "over ", h("select", { "aria-label": "horizontal axis", onchange: (event) => ((kept.by = event.target.value), (zoom.range = null), reload()) }, option("rollout", "rollouts"), option("time", "wall time"))),
    isReport ? null : choose("add a metric", "add a metric", metrics, async (name) => name && !kept.more.includes(name) && (kept.more.push(name), await reload())),
    others.length ? choose("lay a run over", "lay a run over", others, async (name) => name && !shown().includes(name) && lay(name, true)) : null,
    legend,
  );
  await reload();
  return {
    view: h("div", controls, holder),
    of: (run) => data.get(run),
    update: async () => (await Promise.all(shown().map(grow)), draw()),
  };
}
