// All runs of a directory, and some of them side by side.

import { ask, link } from "./api.js";
import { spark } from "./chart.js";
import { curves } from "./curves.js";
import { cell, empty, h, json, number, runName, seconds, table, walker } from "./dom.js";

const chosen = new Set(); // to be compared; the list is made again when a run has new data

export const state = (word) => h(`span.state.${word}`, word);

function mean(values) {
  const known = values.filter((value) => typeof value === "number");
  return known.length ? known.reduce((a, b) => a + b) / known.length : null;
}

const took = (run) => (run.began === null || run.changed === null ? null : Math.max(0, run.changed - run.began));
const model = (run) => (run.model ?? "").split("/").slice(-2).join("/");

// Column -> what it is sorted by. A column of numbers begins with the largest.
const SORTED = {
  run: (run) => runName(run.run, run.path), state: (run) => run.state, started: (run) => run.began, took, rollouts: (run) => run.done,
  reward: (run) => run.reward, model,
};

function sortedBy(runs, name) {
  const of = SORTED[name] ?? SORTED.started;
  const isText = runs.some((run) => typeof of(run) === "string");
  return runs.toSorted((a, b) => (isText ? (of(a) ?? "").localeCompare(of(b) ?? "") : (of(b) ?? -Infinity) - (of(a) ?? -Infinity)));
}

export async function runsPage(asked) {
  const found = await ask("runs");
  for (const name of chosen) if (!found.runs.some((run) => run.run === name)) chosen.delete(name);
  const by = asked.by ?? "";
  const needle = (asked.text ?? "").toLowerCase();
  const sort = asked.sort ?? "started";
  const runs = sortedBy(found.runs.filter((run) => run.run.toLowerCase().includes(needle)), sort);
  const address = (more) => link("runs", { by, text: asked.text, sort: asked.sort, ...more });
  const compare = h("button", { disabled: chosen.size < 2, onclick: () => (location.hash = link("compare", { run: [...chosen] })) }, "Compare the ticked runs");
  const names = Object.keys(found.settings);
  const valueOf = Object.fromEntries(found.runs.map((run, i) => [run.run, by ? json(found.settings[by]?.[i] ?? null) : ""]));
  const groups = [...new Set(runs.map((run) => valueOf[run.run]))].sort();

  function row(run) {
    const box = h("input", { type: "checkbox", "aria-label": `compare ${run.run}`, checked: chosen.has(run.run), onchange: toggle });
    function toggle() {
      if (box.checked) chosen.add(run.run);
      else chosen.delete(run.run);
      compare.disabled = chosen.size < 2;
    }
    const scores = Object.entries(run.evaluations).map(([name, [first, last]]) => h("div", `${name} `, run.done ? `${number(first, 3)} → ` : "", h("b", number(last, 3))));
    const open = link("run", { run: run.run });
    return h(
      "tr.row",
      { "data-address": open, onclick: (event) => event.target.closest("a, input") || (location.hash = open) },
      h("td", box),
      h("td.title", h("a", { href: open }, runName(run.run, run.path)), run.note ? h("div.note", run.note) : null),
      h("td.short", state(run.state), run.incidents ? h("div.bad", `${run.incidents} ${run.incidents === 1 ? "incident" : "incidents"}`) : ""),
      h("td.opt.short", run.began === null ? "" : new Date(1000 * run.began).toLocaleString(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" })),
      h("td.num.opt", seconds(took(run))),
      h("td.num.opt", run.of === null ? "" : `${run.done} / ${run.of}`),
      h("td.opt", spark(run.curve.map(([, value]) => value))),
      h("td.num", h("b", number(run.reward, 3))),
      h("td.held", scores),
      h("td.opt", { title: run.model ?? "" }, model(run)),
    );
  }

  const sorter = (name, kind) => h(kind, { scope: "col", "aria-sort": sort === name ? (typeof SORTED[name](found.runs[0]) === "string" ? "ascending" : "descending") : null }, h("a.sort", { href: address({ sort: name }) }, name, sort === name ? " ↓" : ""));
  const head = () => [
    "", sorter("run", "th"), sorter("state", "th"), sorter("started", "th.opt"), sorter("took", "th.num.opt"), sorter("rollouts", "th.num.opt"),
    h("td.opt"), sorter("reward", "th.num"), "held-out", sorter("model", "th.opt"),
  ];
  const parts = groups.map((value) => {
    const members = runs.filter((run) => valueOf[run.run] === value);
    const of = `${members.length} run${members.length === 1 ? "" : "s"}, last reward ${number(mean(members.map((run) => run.reward)))} on average`;
    return [by ? h("h2", `${by}: ${value} `, h("span.dim", of)) : null, table(head(), members.map(row), { class: "wide rows" })];
  });
  const choose = h(
    "select",
    { "aria-label": "group by a setting", onchange: (event) => (location.hash = address({ by: event.target.value })) },
    h("option", { value: "" }, "no grouping"),
    names.map((name) => h("option", { value: name, selected: name === by }, name)),
  );
  const search = h("input", {
    "data-search": "", "aria-label": "name of a run", placeholder: "/ name", value: asked.text ?? "",
    onchange: (event) => (location.hash = address({ text: event.target.value })),
  });
  const differ = names.map((name) => [h("code", name), ...found.settings[name].map(json)]);
  const view = h(
    "div",
    h("div.controls", search, h("label", "group by ", choose), compare),
    runs.length ? parts : empty("No run has this name."),
    names.length ? h("details.box", h("summary", `${names.length} settings differ`), table(["setting", ...found.runs.map((run) => run.run)], differ)) : null,
  );
  return { title: "runs", view, ...walker(() => [...view.querySelectorAll("tr.row")]) };
}

export async function comparePage(asked) {
  const names = [...new Set(asked.all.getAll("run"))].sort(); // a run has its colour in every chart, also where others have no line
  const found = await ask("compare", { run: names });
  const panel = await curves({ runs: names, curves: found.curves, metrics: found.metric_names });
  const groups = found.groups.map((group) => group.join(" + "));
  const metrics = Object.entries(found.metrics).map(([name, { values, differ }]) => [
    h("code", name),
    ...values.map(([value, error]) => h("td.num", `${number(value)}${error === null ? "" : ` ± ${number(error, 2)}`}`)),
    differ === null ? h("span.dim", "one run each: the noise is not known") : differ ? "more than noise" : "within noise",
  ]);
  const row = (cells) => h("tr", cells.map((one) => (one instanceof HTMLTableCellElement ? one : cell(one))));
  const same = (rows, what) => (rows.length ? table([what, ...groups], rows) : empty(`No ${what} differs.`));
  const view = h(
    "div",
    panel.view,
    h("h2", `Means of rollouts ${found.from} to ${found.until}, the last that all have`),
    table(["metric", ...groups, ""], metrics.map(row)),
    h("h2", "Settings that differ"),
    same(Object.entries(found.settings).map(([name, values]) => [h("code", name), ...values.map(json)]), "setting"),
    h("h2", "Plugins that differ"),
    same(Object.entries(found.plugins).map(([name, values]) => [name, ...values]), "plugin"),
  );
  return { title: "compare", crumbs: [["runs", link("runs")]], view };
}
