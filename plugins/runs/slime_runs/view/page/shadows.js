// Shadow rewards and filters beside the run's own: how often they agree, their cost, and the samples that they differ on.

import { ask, link } from "./api.js";
import { empty, h, number, percent, rowsOf, seconds, table } from "./dom.js";
import { runCrumb } from "./run.js";
import { chooser } from "./samples.js";

const isSame = (a, b) => a === null || b === null || Math.abs(a - b) <= 1e-6;

// The results of shadows for a sample with the reward `score`, as pairs of a name and a cell.
export function verdicts(shadow, score) {
  const paid = Object.entries(shadow.rewards).map(([spec, value]) => [spec, h(isSame(score, value) ? "span" : "b.bad", `gives ${number(value)}`)]);
  const decided = Object.entries(shadow.filters).map(([spec, keeps]) => [spec, keeps === null ? "failed" : h(keeps === shadow.kept ? "span" : "b.bad", keeps ? "keeps the group" : "drops the group")]);
  return [...paid, ...decided];
}

export async function shadowsPage(asked) {
  const run = asked.run ?? ".";
  const found = await ask("shadows", { run });
  const specs = Object.entries(found.specs);
  const rows = rowsOf(found.columns);
  const last = (spec) => spec.split("/").at(-1);
  const list = chooser(run, true, specs.map(([spec]) => [last(spec), (row) => h("td", verdicts(row, row.score).filter(([name]) => name === spec).map(([, cell]) => cell))]));
  list.show(rows, `${rows.length} newest samples that a shadow differs on`);
  const view = h(
    "div",
    specs.length ? null : empty("No shadow reward or filter has seen a sample yet. --shadow-rm-path and --shadow-filter-path name them."),
    specs.length
      ? table(
          ["shadow", "agrees", "of", "rank correlation", "time a sample"],
          specs.map(([spec, of]) => [
            h("span", { title: spec }, last(spec)), percent(of.agree), of.samples === undefined ? `${number(of.groups)} groups` : `${number(of.samples)} samples`,
            of.samples === undefined ? "" : of.rank_correlation, of.seconds === undefined ? "" : seconds(of.seconds),
          ]),
        )
      : null,
    rows.length ? h("h2", "Samples that they differ on") : specs.length ? empty("They agree on every sample that is kept here.") : null,
    rows.length ? list.view : null,
  );
  return { title: "shadows", crumbs: [runCrumb(run)], view, move: list.move, open: list.open };
}
