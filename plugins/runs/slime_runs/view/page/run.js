// One run: curves, what it waits for, what was noticed, evaluations, rollouts, settings, plugins.

import { ask, isReport, link, query } from "./api.js";
import { chart } from "./chart.js";
import { bytes, h, json, number, renew, rolloutNumber, rowsOf, table } from "./dom.js";
import { state } from "./runs.js";
import { chooser } from "./samples.js";

// What one looks for in a whole run -> what is asked for.
export const WHOLE = {
  best: { order: "best" }, worst: { order: "worst" }, failed: { status: "failed" }, truncated: { status: "truncated" },
  dropped: { fate: "dropped" },
};
const kept = { smoothing: 0, more: [] };
const LISTED = 30;

export async function runPage(asked) {
  const run = asked.run ?? ".";
  const [found, columns] = await Promise.all([ask("run", { run }), ask("metrics", { run, since: -1 })]);
  const curves = { ...found.curves };
  for (const name of kept.more) if (found.metrics.includes(name)) curves[name] = name;
  for (const name of Object.values(curves)) if (!(name in columns.columns)) await add(name);
  const charts = h("div.charts");
  const draw = () => charts.replaceChildren(...made(found, run, curves, columns));
  draw();

  async function add(name) {
    columns.columns[name] = (await ask("metrics", { run, name: [name], since: -1 })).columns[name].slice(0, columns.step.length);
  }

  async function update() {
    const since = columns.step.length ? columns.step[columns.step.length - 1] - 1 : -1;
    const added = await ask("metrics", { run, name: Object.values(curves), since });
    const from = columns.step.findIndex((step) => step > since);
    const keep = from < 0 ? columns.step.length : from; // the newest step may have got more numbers
    columns.step = [...columns.step.slice(0, keep), ...added.step];
    for (const name of Object.values(curves)) columns.columns[name] = [...columns.columns[name].slice(0, keep), ...added.columns[name]];
    Object.assign(found, await ask("run", { run }));
    draw();
    renew(head, facts(found, run));
    renew(below, parts(found, run));
  }

  const smoothing = h("input", {
    type: "range", min: 0, max: 0.98, step: 0.02, value: kept.smoothing, "aria-label": "smoothing",
    oninput: (event) => ((kept.smoothing = Number(event.target.value)), draw()),
  });
  const more = h(
    "select",
    {
      "aria-label": "another metric",
      onchange: async (event) => {
        const name = event.target.value;
        kept.more.push(name);
        curves[name] = name;
        await add(name);
        draw();
      },
    },
    h("option", "another metric"),
    found.metrics.map((name) => h("option", { value: name }, name)),
  );
  const head = h("div", facts(found, run));
  const below = h("div", parts(found, run));
  const view = h("div", head, h("div.controls", h("label", "smoothing ", smoothing), isReport ? null : more), charts, below);
  const rows = () => [...view.querySelectorAll("tr.row[data-address^='#/rollout']")];
  let at = -1;
  return {
    title: run === "." ? found.path : run,
    crumbs: isReport ? [] : [["runs", link("runs")]],
    view,
    stamp: found.stamp,
    update,
    move(step) {
      rows()[at]?.classList.remove("chosen");
      at = Math.max(0, Math.min(rows().length - 1, at + step));
      rows()[at]?.classList.add("chosen");
      rows()[at]?.scrollIntoView({ block: "nearest" });
    },
    open: () => at >= 0 && (location.hash = rows()[at].dataset.address),
  };
}

function made(found, run, curves, columns) {
  const marks = [
    ...found.noticed.map((incident) => ({ x: rolloutNumber(incident.rollout_id), colour: "--bad" })),
    ...found.parts.slice(1).map(([, start]) => ({ x: start, colour: "--dim" })),
  ];
  const rollouts = new Set(found.rollouts.rollout);
  return Object.entries(curves).flatMap(([title, name]) => {
    const column = columns.columns[name] ?? [];
    const there = columns.step.map((_, i) => i).filter((i) => column[i] !== null && column[i] !== undefined);
    if (!there.length) return [];
    return chart({
      title,
      x: there.map((i) => columns.step[i]),
      lines: [{ name, values: there.map((i) => column[i]) }],
      marks,
      smoothing: kept.smoothing,
      pick: (step) => rollouts.has(step - rolloutNumber(0)) && (location.hash = link("rollout", { run, rollout: step - rolloutNumber(0) })),
    });
  });
}

function facts(found, run) {
  return [
    h("p", state(found.state), found.evaluation ? " evaluation of the model " : ` ${found.done} of ${found.of ?? "?"} rollouts, model `, h("span", { title: found.model ?? "" }, (found.model ?? "?").split("/").slice(-2).join("/")), h("span.dim", ` ${found.path}`)),
    found.parts.length > 1 ? h("p.dim", `started ${found.parts.length} times: `, found.parts.map(([at, start]) => `${start ? `after rollout ${start}, ` : ""}${new Date(1000 * at).toLocaleString()}`).join("; ")) : null,
    evaluation(found.evaluation),
    samples(found, run),
    waiting(found.waits, found.state),
  ];
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
  const percent = `${100 * report.confidence}% interval`;
  return h(
    "div",
    table(["data set", "prompts", "answers each", "score", "value", percent, ""], rows),
    h("details.box", h("summary", `all metrics; ${number(report.seconds, 3)} s`), table(["metric", "value"], Object.entries(report.metrics).map(([name, value]) => [name, number(value)]))),
  );
}

function samples(found, run) {
  if (!found.stored.samples) return h("p.dim", "no samples are kept (yet, or by --log-samples none)");
  const list = chooser(run, true, [["", (row) => h("td.dim", row.end)]]);
  const of = (end) => rowsOf(found[end]).map((row) => ({ ...row, end, stored: true }));
  const shadows = found.settings.some(([name, value]) => name.startsWith("shadow_") && value?.length);
  const beside = shadows ? [" | ", h("a", { href: link("shadows", { run }) }, "shadow rewards and filters")] : "";
  const all = isReport ? "" : ["all of the run: ", Object.keys(WHOLE).map((what) => [h("a", { href: link("samples", { run, what }) }, what), " "])];
  list.show([...of("best"), ...of("worst")], [`${number(found.stored.samples)} samples kept, ${bytes(found.stored.bytes)}; `, all, beside]);
  return list.view;
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
        ["seconds", "of", "waits for", "then"],
        process.waits.map((wait) => [
          wait.age, wait.deadline, h(wait.overdue ? "span.bad" : "span", `${wait.number > 1 ? `${wait.number} x ` : ""}${wait.what}`), wait.then,
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

export const weights = (row) => (row.oldest_version === row.newest_version ? number(row.newest_version) : `${row.oldest_version} to ${row.newest_version}`);

function parts(found, run) {
  const rollouts = rowsOf(found.rollouts).reverse();
  const sets = new Map();
  for (const row of rowsOf(found.evaluated)) sets.set(row.data_set, [...(sets.get(row.data_set) ?? []), row]);
  return [
    incidents(found),
    sets.size
      ? h("div", h("h2", "evaluations"), [...sets].map(([name, rows]) => h("p", isReport ? h("b", name) : h("a", { href: link("evaluation", { run, data_set: name }) }, `${name} item by item`), ": ", rows.slice(-12).map((row) => [h("a", { href: link("rollout", { run, rollout: row.rollout, data_set: name }) }, number(row.score)), ` after ${row.rollout}; `]))))
      : null,
    rollouts.length
      ? h(
          "div",
          h("h2", "rollouts"),
          table(
            ["rollout", "reward", "samples", "dropped", "failed", "cut", "tokens", ""],
            rollouts.slice(0, LISTED).map((row) =>
              h(
                "tr.row",
                { "data-address": link("rollout", { run, rollout: row.rollout }), onclick: () => (location.hash = link("rollout", { run, rollout: row.rollout })) },
                h("td.num", h("a", { href: link("rollout", { run, rollout: row.rollout }) }, rolloutNumber(row.rollout))),
                [row.score, row.samples, row.dropped, row.failed, row.truncated, row.tokens].map((value) => h("td.num", number(value))),
                h("td", isReport ? null : h("a", { href: link("timeline", { run, rollout: row.rollout }) }, "timeline")),
              ),
            ),
          ),
          rollouts.length > LISTED && !isReport ? goTo(run, rollouts[0].rollout) : null,
        )
      : null,
    spent(found, run),
    h("details.box", h("summary", "settings"), table(["setting", "value", "from"], found.settings.map(([name, value, origin]) => [name, json(value), h("span.dim", origin)]))),
    h("details.box", h("summary", "plugins"), table(["kind", "name", "distribution", "version", "source"], found.plugins.map((plugin) => [plugin.kind, plugin.name, plugin.distribution, plugin.version, h("code", (plugin.sha256 ?? "").slice(0, 12))]))),
    found.summary ? h("details.box", h("summary", "summary"), h("pre", JSON.stringify({ ...found.summary, plugins: undefined }, null, 1))) : null,
  ];
}

// Where the time went; asked for when it is opened, as it is of a run with --profile.
function spent(found, run) {
  const out = h("div");
  const show = async (event) => {
    if (!event.target.open || out.childNodes.length) return;
    const told = await ask("profile", { run });
    const each = told.seconds / Math.max(1, told.rollouts);
    const row = ([name, seconds]) => h("tr", h("td", { class: name.startsWith(" ") ? "part" : "" }, name.trim()), [seconds, (100 * seconds) / told.seconds, seconds / Math.max(1, told.rollouts)].map((value) => h("td.num", number(value, 3))));
    out.replaceChildren(
      told.seconds ? table(["", "seconds", "%", "per rollout"], [h("tr", h("td", "the run"), [told.seconds, 100, each].map((value) => h("td.num", number(value, 3)))), ...told.rows.map(row)]) : h("p.dim", "there is no timeline (--no-trace)"),
      ...told.advice.map((text) => h("p", text)),
      told.trace === null || isReport
        ? h("p.dim", isReport ? "" : "slime train --profile records the trainers' passes, too, and a trace for Perfetto")
        : h("p", h("a", { href: `trace?${query({ run })}`, download: "trace.json" }, `trace.json, ${bytes(told.trace)}`), ", to be opened in ui.perfetto.dev or chrome://tracing"),
    );
  };
  return h("details.box", { open: found.profiled, ontoggle: show }, h("summary", "where the time went"), out);
}

function goTo(run, newest) {
  const field = h("input", { type: "number", min: 1, max: rolloutNumber(newest), "data-search": "", "aria-label": "rollout" });
  return h("form", { onsubmit: (event) => (event.preventDefault(), (location.hash = link("rollout", { run, rollout: field.value - rolloutNumber(0) }))) }, "rollout ", field, h("button", "open"));
}

function incidents(found) {
  const { noticed, stalls, engine_events: events } = found;
  if (!noticed.length && !stalls.length && !events.length) return h("p.dim", "no incidents");
  return h(
    "div",
    h("h2", "incidents"),
    noticed.length ? table(["rollout", "what", "numbers", "check"], noticed.map((one) => [rolloutNumber(one.rollout_id), one.cause, one.numbers, one.check])) : null,
    stalls.map((name) => h("p.bad", `waited too long: stalls/${name}`)),
    events.length ? h("details.box", h("summary", `${events.length} events of engines`), table(["what", ""], events.map((event) => [event.event, json(event)]))) : null,
  );
}
