// One run: its few important numbers, curves, incidents, evaluations, samples, rollouts, settings, plugins.

import { ask, isReport, link, query, tell } from "./api.js";
import { spark } from "./chart.js";
import { curves } from "./curves.js";
import { bytes, card, empty, h, json, number, percent, renew, rolloutNumber, rowsOf, runName, seconds, signed, table, walker } from "./dom.js";
import { state } from "./runs.js";
import { chooser } from "./samples.js";

// Kinds of samples of a whole run -> the parameters of their table.
export const WHOLE = {
  best: { order: "best" }, worst: { order: "worst" }, failed: { status: "failed" }, truncated: { status: "truncated" },
  dropped: { fate: "dropped" },
};
const LISTED = 12;
const HIGH_GAP = 0.1; // nats: above it docs/how-to/look-at-a-run.md names the gap as a cause of not learning

export async function runPage(asked) {
  const run = asked.run ?? ".";
  const [found, all] = await Promise.all([ask("run", { run }), ask("runs")]);
  const rollouts = new Set(found.rollouts.rollout);
  const marks = [
    ...found.noticed.map((one) => ({ step: rolloutNumber(one.rollout_id), colour: "--bad" })),
    ...found.parts.slice(1).map(([, start]) => ({ step: start, colour: "--dim" })),
  ];
  const panel = await curves({
    runs: [run], curves: found.curves, metrics: found.metrics, others: isReport ? [] : all.runs.map((one) => one.run).filter((one) => one !== run), marks,
    pick: (step) => rollouts.has(step - rolloutNumber(0)) && (location.hash = link("rollout", { run, rollout: step - rolloutNumber(0) })),
  });
  const head = h("div", facts(found, run, panel.of(run)));
  const below = h("div", parts(found, run));
  const view = h("div", head, note(found, run), Object.keys(found.curves).length ? panel.view : null, below);
  return {
    title: runName(run, found.path),
    path: found.path,
    crumbs: isReport ? [] : [["runs", link("runs")]],
    view,
    stamp: found.stamp,
    async update() {
      const [news] = await Promise.all([ask("run", { run }), panel.update()]);
      Object.assign(found, news);
      renew(head, facts(found, run, panel.of(run)));
      renew(below, parts(found, run));
    },
    ...walker(() => [...view.querySelectorAll("tr.row[data-address^='#/rollout']")]),
  };
}

function facts(found, run, data) {
  const model = (found.model ?? "?").split("/").slice(-2).join("/");
  const done = found.evaluation ? "evaluation of the model" : `${found.done} of ${found.of ?? "?"} rollouts`;
  const starts = found.parts.map(([at, start]) => `${start ? `after rollout ${start}, ` : ""}${new Date(1000 * at).toLocaleString()}`);
  return [
    h("p.facts-line", state(found.state), ` ${done}, model `, h("b", { title: found.model ?? "" }, model), h("span.dim", ` ${found.path}`)),
    starts.length > 1 ? h("p.dim", `started ${starts.length} times: ${starts.join("; ")}`) : null,
    h("div.tiles", cards(found, data)),
    incidents(found),
    evaluation(found.evaluation),
    waiting(found.waits, found.state),
  ];
}

// The user's note, which is not made again while it is written.
function note(found, run) {
  if (isReport) return found.note ? h("p.note", found.note) : null;
  const said = h("span.dim", { role: "status" });
  const text = h("textarea", { rows: 1, maxlength: 10000 });
  text.value = found.note;
  async function save(event) {
    event.preventDefault();
    try {
      text.value = (await tell("note", { run, text: text.value })).note;
      said.replaceChildren("saved");
    } catch (error) {
      said.replaceChildren(h("span.bad", { role: "alert" }, error.message));
    }
  }
  return h("form.controls", { onsubmit: save, oninput: () => said.replaceChildren() }, h("label.note", "Note", text), h("button", "Save"), said);
}

// The numbers that matter, as cards.
function cards(found, data) {
  const known = (name) => (data.columns[name] ?? []).filter((value) => value !== null);
  const last = (name) => known(name).at(-1) ?? null;
  const made = [];
  const each = secondsEach(found);
  if (found.of !== null) {
    const left = found.state === "running" && each !== null ? `, ${seconds((found.of - found.done) * each)} left` : "";
    made.push(card("Rollouts", [number(found.done), h("small", ` of ${number(found.of)}`)], each === null ? "" : `${seconds(each)} each${left}`));
  }
  const reward = known("rollout/raw_reward");
  if (reward.length) made.push(card("Reward", number(reward.at(-1), 3), `${signed(reward.at(-1) - reward[0])} since the first rollout`, spark(reward)));
  for (const [name, [first, value]] of Object.entries(found.evaluations)) made.push(heldOut(name, first, value, data, found));
  if (last("perf/tokens_per_sec") !== null) made.push(card("Tokens/s", number(Math.round(last("perf/tokens_per_sec"))), "answer tokens, newest rollout", spark(known("perf/tokens_per_sec"))));
  const gap = last("train/train_rollout_logprob_abs_diff");
  if (gap !== null) made.push(card("Log-prob gap", number(gap, 2), gap > HIGH_GAP ? h("span.bad", "high: trainer and engine differ") : "trainer against engine, nats", spark(known("train/train_rollout_logprob_abs_diff"))));
  const truncated = last("rollout/truncated_ratio");
  if (truncated !== null) made.push(card("Truncated", percent(truncated), "of the newest answers", spark(known("rollout/truncated_ratio"))));
  const count = found.noticed.length + found.stalls.length;
  made.push(card("Incidents", count ? h("span.bad", number(count)) : "0", count ? h("button.plain", { onclick: () => document.getElementById("incidents")?.scrollIntoView() }, "see them") : "none noticed"));
  return made;
}

function heldOut(name, first, value, data, found) {
  const errors = (data.errors[`eval/${name}`] ?? []).filter((error) => error !== null);
  const of = found.evaluation?.datasets[name]?.scores.reward;
  const half = errors.length ? 1.96 * errors.at(-1) : null;
  const interval = of && of.low !== null ? `95%: ${number(of.low, 3)} to ${number(of.high, 3)}` : half === null ? "" : `± ${number(half, 2)} (95%)`;
  const change = found.evaluation ? "" : `${signed(value - first)} since the first evaluation`;
  return card(`Held-out: ${name}`, number(value, 3), [interval, change].filter(Boolean).join(", "), spark((data.columns[`eval/${name}`] ?? []).filter((one) => one !== null)));
}

// Seconds of a rollout in the newest part of the run; null if it is not known.
function secondsEach(found) {
  const [began, start] = found.parts.at(-1) ?? [found.began, 0];
  return began === null || found.changed === null || found.done <= start ? null : (found.changed - began) / (found.done - start);
}

// The table of `slime eval`, with the other numbers of the report.
function evaluation(report) {
  if (!report) return null;
  const rows = Object.entries(report.datasets).flatMap(([name, of]) =>
    Object.entries(of.scores).map(([score, { value, low, high, method }], i) => [
      i ? "" : name, i ? "" : of.prompts, i ? "" : of.samples_per_prompt, score, number(value),
      low === null ? "-" : `${number(low)} to ${number(high)}`, h("span.dim", method),
    ]),
  );
  const interval = `${100 * report.confidence}% interval`;
  return h(
    "div",
    table(["data set", "prompts", "answers each", "score", "value", interval, "method"], rows),
    h("details.box", h("summary", `all metrics; ${seconds(report.seconds)}`), table(["metric", "value"], Object.entries(report.metrics).map(([name, value]) => [h("code", name), number(value)]))),
  );
}

function samples(found, run) {
  if (!found.stored.samples) return empty("No samples are kept: the run has none yet, or has --log-samples none.");
  const list = chooser(run, true, [["", (row) => h("td", h(`span.badge.${row.end}`, row.end))]]);
  const of = (end) => rowsOf(found[end]).map((row) => ({ ...row, end, stored: true }));
  const shadows = found.shadowed ? [h("a", { href: link("shadows", { run }) }, "shadow rewards and filters"), ". "] : "";
  const all = isReport ? "" : ["All of the run: ", Object.keys(WHOLE).map((what) => [h("a", { href: link("samples", { run, what }) }, what), " "])];
  list.show([...of("best"), ...of("worst")], [`${number(found.stored.samples)} samples are kept, ${bytes(found.stored.bytes)}. `, shadows, all]);
  return h("section", h("h2", "Samples"), list.view);
}

function waiting(waits, word) {
  if (waits.unreadable.length) return h("p.bad", `half-written, or of another version: ${waits.unreadable.map((name) => `waits/${name}`).join(", ")}`);
  if (!waits.processes.length) return word === "running" ? h("p.dim", "no process says what it waits for") : null;
  return h(
    "details.box",
    { open: waits.overdue },
    h("summary", waits.overdue ? h("b.bad", "a wait is overdue") : waits.alive ? "what it waits for now" : "what it waited for when it was last heard of"),
    waits.processes.map((process) => [
      h("p", h("b", process.role), ` ${process.name}: ${process.state}`),
      table(
        ["for", "at most", "waits for", "then"],
        process.waits.map((wait) => [
          seconds(wait.age), typeof wait.deadline === "number" ? seconds(wait.deadline) : wait.deadline, h(wait.overdue ? "span.bad" : "span", `${wait.number > 1 ? `${wait.number} x ` : ""}${wait.what}`), wait.then,
        ]),
      ),
    ]),
  );
}

export const runCrumb = (run) => [run === "." ? "run" : run, link("run", { run })];

// Addresses of samples are theirs in the index.
export function sampleLink(run, row) {
  return link("sample", { run, rollout: row.rollout, data_set: row.data_set, group: row.group_index, sample: row.sample_index, part: row.part || null });
}

// Of several samples that one execution became, which have one number.
export const sampleName = (index, part) => (index === null ? "-" : part ? `${index} (${part + 1})` : `${index}`);

export const weights = (row) =>
  row.newest_version === null ? "-" : row.oldest_version === row.newest_version ? `v${row.newest_version}` : `v${row.oldest_version} to v${row.newest_version}`;

function parts(found, run) {
  return [
    h("div.two", rolloutTable(found, run), evaluations(found, run)),
    samples(found, run),
    h("section", h("h2", "More"),
      spent(found, run),
      settings(found.settings),
      h("details.box", h("summary", "plugins"), table(["kind", "name", "distribution", "version", "source"], found.plugins.map((plugin) => [plugin.kind, plugin.name, plugin.distribution, plugin.version, h("code", (plugin.sha256 ?? "").slice(0, 12))]))),
      found.summary ? h("details.box", h("summary", "summary"), h("pre", JSON.stringify({ ...found.summary, plugins: undefined }, null, 1))) : null,
    ),
  ];
}

function rolloutTable(found, run) {
  const rollouts = rowsOf(found.rollouts).reverse();
  if (!rollouts.length) return null;
  const head = ["rollout", "reward", "samples", "dropped", "failed", "truncated", "tokens", ""];
  return h(
    "section",
    h("h2", "Rollouts"),
    table(
      head.map((name, i) => (name ? h(`th.num${i === 2 || i > 4 ? ".opt" : ""}`, { scope: "col" }, name) : h("td"))),
      rollouts.slice(0, LISTED).map((row) => {
        const address = link("rollout", { run, rollout: row.rollout });
        const number_ = (value, more = "") => h(`td.num${more}${value === 0 ? ".dim" : ""}`, number(value));
        return h(
          "tr.row",
          { "data-address": address, onclick: (event) => event.target.closest("a") || (location.hash = address) },
          h("td.num", h("a", { href: address }, rolloutNumber(row.rollout))),
          h("td.num", h("b", number(row.score, 3))), number_(row.samples, ".opt"), number_(row.dropped), number_(row.failed), number_(row.truncated, ".opt"), number_(row.tokens, ".opt"),
          h("td", isReport ? null : h("a", { href: link("timeline", { run, rollout: row.rollout }) }, "timeline")),
        );
      }),
      { class: "rows" },
    ),
    rollouts.length > LISTED && !isReport ? goTo(run, rollouts) : null,
  );
}

function evaluations(found, run) {
  const sets = Map.groupBy(rowsOf(found.evaluated), (row) => row.data_set);
  if (!sets.size) return null;
  return h(
    "section",
    h("h2", "Evaluations"),
    [...sets].map(([name, rows]) => [
      h("h3", name, isReport ? null : [" ", h("a", { href: link("evaluation", { run, data_set: name }) }, "item by item")]),
      table(["after rollouts", "score", "samples", "truncated"], rows.slice(-LISTED).reverse().map((row) => h("tr", h("td.num", h("a", { href: link("rollout", { run, rollout: row.rollout, data_set: name }) }, number(row.rollout))), h("td.num", h("b", number(row.score, 3))), h("td.num", number(row.samples)), h("td.num", number(row.truncated))))),
    ]),
  );
}

// Settings that were given, and with the box ticked their defaults.
function settings(all) {
  const body = h("div");
  const count = h("span.dim");
  const every = h("input", { type: "checkbox", onchange: () => show() });
  const filter = h("input", { placeholder: "name or value", "aria-label": "filter settings", oninput: () => show() });
  function show() {
    const text = filter.value.toLowerCase();
    const rows = all.filter(([name, value, origin]) => (every.checked || text || origin !== "default") && `${name} ${json(value)}`.toLowerCase().includes(text));
    count.replaceChildren(`${rows.length} of ${all.length}`);
    body.replaceChildren(table(["setting", "value", "from"], rows.map(([name, value, origin]) => [h("code", name), json(value), h("span.dim", origin)])));
  }
  show();
  return h("details.box", h("summary", "settings"), h("div.controls", filter, h("label", every, " with defaults"), count), body);
}

// Where the time went; asked for when it is opened, and at once for a run with --profile.
function spent(found, run) {
  const out = h("div");
  const show = async (event) => {
    if (!event.target.open || out.childNodes.length) return;
    const told = await ask("profile", { run });
    const each = told.seconds / Math.max(1, told.rollouts);
    const cells = (name, of, kind) => h("tr", h("td", { class: kind }, name), h("td.num", seconds(of)), h("td.num", percent(of / told.seconds)), h("td.num", seconds(of / Math.max(1, told.rollouts))));
    out.replaceChildren(
      told.seconds
        ? table(["stage", "time", "share", "per rollout"], [cells("the run", each * Math.max(1, told.rollouts), ""), ...told.rows.map(([name, of]) => cells(name.trim(), of, name.startsWith(" ") ? "part" : ""))])
        : empty("The run has no timeline (--no-trace)."),
      ...told.advice.map((text) => h("p", text)),
      told.trace === null || isReport
        ? h("p.dim", isReport ? "" : "slime train --profile records the trainers' passes, too, and a trace for Perfetto")
        : h("p", h("a", { href: `trace?${query({ run })}`, download: "trace.json" }, `trace.json, ${bytes(told.trace)}`), ", to be opened in ui.perfetto.dev or chrome://tracing"),
    );
  };
  return h("details.box", { open: found.profiled, ontoggle: show }, h("summary", "where the time went"), out);
}

function goTo(run, rollouts) {
  const field = h("input", { type: "number", min: 1, max: rolloutNumber(rollouts[0].rollout), "data-search": "", "aria-label": "number of a rollout", required: true });
  return h("form.controls", { onsubmit: (event) => (event.preventDefault(), (location.hash = link("rollout", { run, rollout: field.value - rolloutNumber(0) }))) }, `the newest ${LISTED} of ${number(rollouts.length)}; open rollout `, field, h("button", "Open"));
}

function incidents(found) {
  const { noticed, stalls, engine_events: events } = found;
  if (!noticed.length && !stalls.length && !events.length) return null;
  return h(
    "section",
    { id: "incidents" },
    h("h2", "Incidents"),
    noticed.length ? table(["rollout", "cause", "numbers", "check"], noticed.map((one) => [rolloutNumber(one.rollout_id), one.cause, one.numbers, one.check])) : null,
    stalls.map((name) => h("p.bad", `waited too long: stalls/${name}`)),
    events.length ? h("details.box", h("summary", `${events.length} events of engines`), table(["event", "details"], events.map((event) => [event.event, json(event)]))) : null,
  );
}
