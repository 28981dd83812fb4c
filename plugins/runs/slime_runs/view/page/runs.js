// All runs of a directory, and some of them side by side.

import { ask, link } from "./api.js";
import { chart } from "./chart.js";
import { h, json, number, rolloutName, svg, table } from "./dom.js";

const chosen = new Set(); // to be compared; the list is made again whenever a run goes on

export const state = (word) => h(`span.state.${word}`, word);

function spark(curve) {
  if (curve.length < 2) return "";
  const values = curve.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const points = values.map((value, i) => `${((i / (values.length - 1)) * 96 + 2).toFixed(1)},${(20 - ((value - low) / (high - low || 1)) * 16).toFixed(1)}`);
  return svg("svg", { width: 100, height: 22, viewBox: "0 0 100 22" }, svg("polyline", { points: points.join(" "), class: "line c0" }));
}

function mean(values) {
  const known = values.filter((value) => typeof value === "number");
  return known.length ? known.reduce((a, b) => a + b) / known.length : null;
}

export async function runsPage(asked) {
  const found = await ask("runs");
  for (const name of chosen) if (!found.runs.some((run) => run.run === name)) chosen.delete(name);
  const by = asked.by ?? "";
  const needle = (asked.text ?? "").toLowerCase();
  const runs = found.runs.filter((run) => run.run.toLowerCase().includes(needle));
  const compare = h("button", { disabled: chosen.size < 2, onclick: () => (location.hash = link("compare", { run: [...chosen] })) }, "compare");
  const names = Object.keys(found.settings);
  const valueOf = Object.fromEntries(found.runs.map((run, i) => [run.run, by ? json(found.settings[by]?.[i] ?? null) : ""]));
  const groups = [...new Set(runs.map((run) => valueOf[run.run]))].sort();
  let at = -1;

  function row(run) {
    const box = h("input", { type: "checkbox", "aria-label": `compare ${run.run}`, checked: chosen.has(run.run), onclick: (event) => event.stopPropagation(), onchange: toggle });
    function toggle() {
      if (box.checked) chosen.add(run.run);
      else chosen.delete(run.run);
      compare.disabled = chosen.size < 2;
    }
    const scores = Object.entries(run.evaluations).map(([name, [first, last]]) => `${name} ${run.done ? `${number(first)} → ` : ""}${number(last)}`);
    const sample = run.last_rollout === null ? "" : h("a", { href: link("rollout", { run: run.run, rollout: run.last_rollout }) }, rolloutName(run.last_rollout));
    return h(
      "tr.row",
      { "data-address": link("run", { run: run.run }) },
      h("td", box),
      h("td", h("a", { href: link("run", { run: run.run }) }, run.run === "." ? run.path : run.run)),
      h("td", state(run.state)),
      h("td.num", run.of === null ? "" : `${run.done} / ${run.of}`),
      h("td", spark(run.curve)),
      h("td.num", number(run.reward)),
      h("td", scores.join(", ")),
      h("td", run.incidents ? h("span.bad", `${run.incidents} ${run.incidents === 1 ? "incident" : "incidents"}`) : ""),
      h("td", sample),
    );
  }

  const head = ["", "run", "state", "rollouts", "reward", "last", "evaluations", "", "newest samples"];
  const parts = groups.map((value) => {
    const members = runs.filter((run) => valueOf[run.run] === value);
    const of = `${members.length} run${members.length === 1 ? "" : "s"}, last reward ${number(mean(members.map((run) => run.reward)))} on average`;
    return [by ? h("h2", `${by}: ${value} `, h("span.dim", of)) : null, table(head, members.map(row))];
  });
  const choose = h(
    "select",
    { onchange: (event) => (location.hash = link("runs", { by: event.target.value, text: asked.text })) },
    h("option", { value: "" }, "by nothing"),
    names.map((name) => h("option", { value: name, selected: name === by }, name)),
  );
  const search = h("input", {
    "data-search": "", placeholder: "/ name", value: asked.text ?? "",
    onchange: (event) => (location.hash = link("runs", { by, text: event.target.value })),
  });
  const differ = names.map((name) => [name, ...found.settings[name].map(json)]);
  const view = h(
    "div",
    h("div.controls", search, h("label", "group ", choose), compare),
    parts,
    names.length ? h("details.box", h("summary", `${names.length} settings differ`), table(["setting", ...found.runs.map((run) => run.run)], differ)) : null,
  );
  const rows = () => [...view.querySelectorAll("tr.row")];
  return {
    title: "runs",
    view,
    move(step) {
      rows()[at]?.classList.remove("chosen");
      at = Math.max(0, Math.min(rows().length - 1, at + step));
      rows()[at]?.classList.add("chosen");
    },
    open: () => at >= 0 && (location.hash = rows()[at].dataset.address),
  };
}

export async function comparePage(asked) {
  const names = asked.all.getAll("run");
  const found = await ask("compare", { run: names });
  const colours = names.toSorted(); // a run has its colour in every chart, also where others have no line
  const charts = Object.entries(found.curves).map(([title, of]) => {
    const x = [...new Set(Object.values(of).flatMap((points) => points.map(([step]) => step)))].sort((a, b) => a - b);
    const lines = Object.entries(of).map(([name, points]) => {
      const at = new Map(points);
      return { name, values: x.map((step) => at.get(step) ?? null), colour: colours.indexOf(name) };
    });
    return chart({ title, x, lines, smoothing: 0 });
  });
  const groups = found.groups.map((group) => group.join(" + "));
  const metrics = Object.entries(found.metrics).map(([name, { values, differ }]) => [
    name,
    ...values.map(([value, error]) => `${number(value)}${error === null ? "" : ` ± ${number(error, 2)}`}`),
    differ === null ? h("span.dim", "one run each: the noise is not known") : differ ? "more than noise" : "within noise",
  ]);
  const legend = h("p", Object.keys(found.curves).length ? colours.map((name, i) => h(`b.k${i % 6}`, `— ${name}  `)) : "");
  const view = h(
    "div",
    legend,
    h("div.charts", charts),
    h("h2", `means of rollouts ${found.from} to ${found.until}, the last that all have`),
    table(["metric", ...groups, ""], metrics),
    h("h2", "settings that differ"),
    table(["setting", ...groups], Object.entries(found.settings).map(([name, values]) => [name, ...values.map(json)])),
    h("h2", "plugins that differ"),
    table(["plugin", ...groups], Object.entries(found.plugins).map(([name, values]) => [name, ...values])),
  );
  return { title: "compare", crumbs: [["runs", link("runs")]], view };
}
