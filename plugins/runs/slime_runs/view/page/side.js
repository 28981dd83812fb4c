// The left column: runs, and the pages of the run that is shown.

import { isReport, link } from "./api.js";
import { h, number, rolloutNumber, runName } from "./dom.js";
import { charts } from "./chart.js";

const LISTED = 30;

export function side(found, { page, run, data_set }) {
  const newest = found.runs.toReversed();
  const here = newest.findIndex((one) => one.run === run);
  const listed = newest.slice(0, Math.max(LISTED, here + 1));
  return [
    h("a.brand", { href: isReport ? link("run", { run: "." }) : link("runs") }, "slime view"),
    isReport ? null : item(link("runs"), ["All runs", h("span.count", number(found.runs.length))], page === "runs"),
    h("ul", listed.map((one) => h("li", runItem(one, run), one.run === run ? h("ul", pages(one, page, data_set)) : null))),
    listed.length < newest.length ? h("p.dim", `and ${newest.length - listed.length} older runs`) : null,
    charts === "sketches" ? h("p.dim", "Charts have no zoom: this page was installed without its built scripts.") : null,
  ];
}

function item(href, children, isCurrent) {
  return h("a.item", { href, "aria-current": isCurrent ? "page" : null }, children);
}

function runItem(one, run) {
  const name = runName(one.run, one.path);
  const made = h(
    "a.item",
    { href: link("run", { run: one.run }), title: name },
    h(`span.dot.${one.state}`, h("span.unseen", `${one.state}, `)), h("span.name", name), h("span.count", one.reward === null ? "" : number(one.reward, 3)),
  );
  made.classList.toggle("current", one.run === run);
  return made;
}

function pages(one, page, dataSet) {
  const { run, last_rollout: rollout } = one;
  const items = [["Overview", "run", {}]];
  if (!isReport && one.last_rollout !== null) items.push(["Best and worst", "samples", { what: "best" }]);
  if (rollout !== null) items.push([`Newest rollout, ${rolloutNumber(rollout)}`, "rollout", { rollout }]);
  if (!isReport && rollout !== null) items.push(["Timeline", "timeline", { rollout }]);
  if (!isReport) items.push(...Object.keys(one.evaluations).map((name) => [`Evaluation ${name}`, "evaluation", { data_set: name }]));
  if (one.shadowed) items.push(["Shadows", "shadows", {}]);
  return items.map(([name, of, more]) => h("li", item(link(of, { run, ...more }), name, of === page && (more.data_set ?? "") === (dataSet ?? ""))));
}
