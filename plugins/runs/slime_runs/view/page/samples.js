// Samples of a rollout in a table that two histograms filter; best and worst of a run; a group side by side.

import { ask, isReport, link } from "./api.js";
import { histogram } from "./chart.js";
import { h, json, number, rolloutName, rolloutNumber, rowsOf, table } from "./dom.js";
import { WHOLE, runCrumb, sampleLink, sampleName, weights } from "./run.js";

const PAGE = 100;
const NUMBERS = new Set(["rollout", "group", "sample", "reward", "tokens"]);

// Rows that can be chosen by j and k and opened by Enter; `show(rows, words, text)` fills it. What they say comes when they
// are drawn, around `text` where it was searched for; `extra` are columns besides: [title, (row) -> cell].
export function chooser(run, withRollout, extra = []) {
  const body = h("tbody");
  const more = h("button", { onclick: () => fill(PAGE) }, "more");
  const count = h("p.dim");
  let [rows, drawn, at, sought] = [[], 0, -1, ""];
  const head = [...(withRollout ? ["rollout"] : []), "group", "sample", "reward", ...extra.map(([title]) => title), "prompt", "answer", "tokens", "weights", "became", ""];
  const view = h("div", count, h("table.wide", h("thead", h("tr", head.map((word) => h(NUMBERS.has(word) ? "th.num" : "th", word)))), body), more);

  function line(row) {
    row.says = [h("td.start"), h("td.start")];
    if (row.stored === false) return h("tr.dim", cells(row, (text) => text));
    const address = sampleLink(run, row);
    const group = link("group", { run, rollout: row.rollout, data_set: row.data_set, group: row.group_index });
    const links = { group_index: group, sample_index: address };
    return h(
      "tr.row",
      { onclick: (event) => event.target.closest("a") || (location.hash = address), "data-address": address },
      cells(row, (text, name) => (row[name] === null ? text : h("a", { href: links[name] }, text))),
    );
  }

  function cells(row, linked) {
    const trained = row.trained_tokens === row.response_tokens || row.fate !== "trained" ? "" : `, ${row.trained_tokens} trained`;
    return [
      withRollout ? h("td.num", rolloutNumber(row.rollout, row.data_set)) : null,
      h("td.num", linked(row.group_index ?? "-", "group_index")),
      h("td.num", linked(sampleName(row.sample_index, row.part), "sample_index")),
      h("td.num", number(row.score)),
      extra.map(([, made]) => made(row)),
      row.says,
      h("td.num", `${row.prompt_tokens} + ${row.response_tokens}${trained}`),
      h("td", weights(row)),
      h("td", `${row.fate}${row.status === "completed" ? "" : `, ${row.status}`}`),
      h("td", row.failure ?? row.reason ?? ""),
    ];
  }

  function fill(some) {
    const added = rows.slice(drawn, drawn + some);
    body.append(...added.map(line));
    drawn = Math.min(rows.length, drawn + some);
    more.hidden = drawn === rows.length;
    says(added, rows, sought);
  }

  async function says(added, of, text) {
    if (isReport) return added.forEach((row) => write(row, row.text ?? ["", ""]));
    for (let left = added; left.length && of === rows; ) {
      const at = left.slice(0, PAGE).map((row) => [row.rollout, row.data_set ? 1 : 0, row.offset, row.size, row.place].join("."));
      const found = await ask("texts", { run, at, text });
      left = left.filter((row, i) => !found[i] || (write(row, found[i]), false));
    }
  }

  function write(row, found) {
    found.forEach((text, i) => row.says[i].replaceChildren(...marked(text, sought)));
  }

  return {
    view,
    show(wanted, words, text = "") {
      [rows, drawn, at, sought] = [wanted, 0, -1, text];
      body.replaceChildren();
      count.replaceChildren(...[words].flat(Infinity));
      fill(PAGE);
    },
    move(step) {
      body.children[at]?.classList.remove("chosen");
      at = Math.max(0, Math.min(rows.length - 1, at + step));
      if (at >= drawn) fill(PAGE);
      body.children[at]?.classList.add("chosen");
      body.children[at]?.scrollIntoView({ block: "nearest" });
    },
    open: () => at >= 0 && body.children[at].dataset.address && (location.hash = body.children[at].dataset.address),
  };
}

// A text with what was searched for marked in it.
function marked(text, sought) {
  const at = sought ? text.toLowerCase().indexOf(sought.toLowerCase()) : -1;
  return at < 0 ? [text] : [text.slice(0, at), h("mark", text.slice(at, at + sought.length)), text.slice(at + sought.length)];
}

const inside = (value, range) => !range || (value !== null && value >= range.low && (value < range.high || (range.last && value <= range.high)));

export async function rolloutPage(asked) {
  const [run, rollout, data_set] = [asked.run ?? ".", Number(asked.rollout), asked.data_set ?? ""];
  const found = await ask("rollout", { run, rollout, data_set });
  const rows = rowsOf(found.columns).map((row) => ({ ...row, reason: found.dropped_for[row.group_index] }));
  const wanted = { reward: null, length: null, status: "", fate: "", text: "", ids: null, part: false };
  const list = chooser(run, false);

  function filter() {
    const passed = rows.filter(
      (row) =>
        inside(row.score, wanted.reward) && inside(row.response_tokens, wanted.length) && (!wanted.status || row.status === wanted.status) &&
        (!wanted.fate || row.fate === wanted.fate) && (!wanted.ids || wanted.ids.has(`${row.group_index}/${row.sample_index}/${row.part}`)),
    );
    list.show(passed, `${passed.length} of ${rows.length} samples${found.cut ? " (the first of more)" : ""}${wanted.part ? "; the search took too long and saw a part of them" : ""}`, wanted.text);
  }

  const choose = (name) => {
    const values = [...new Set(rows.map((row) => row[name]))].sort();
    return h(
      "label",
      `${name} `,
      h("select", { onchange: (event) => ((wanted[name] = event.target.value), filter()) }, h("option", { value: "" }, "any"), values.map((value) => h("option", value))),
    );
  };
  const search = h("input", {
    "data-search": "", placeholder: "/ text of prompt or answer",
    onchange: async (event) => {
      const text = event.target.value;
      const answer = text ? await ask("search", { run, rollout, data_set, text }) : null;
      wanted.text = text;
      wanted.ids = answer && new Set(answer.found.map((place) => place.join("/")));
      wanted.part = answer?.cut ?? false;
      filter();
    },
  });
  filter();
  const address = (number) => link("rollout", { run, rollout: number, data_set });
  const title = rolloutName(rollout, data_set);
  const reasons = Object.entries(found.dropped_for).map(([group, reason]) => [h("a", { href: link("group", { run, rollout, group }) }, `group ${group}`), reason]);
  const view = h(
    "div",
    h("p", found.total ? `reward ${number(found.total.score)}, ${number(found.total.dropped)} dropped, ${number(found.total.failed)} failed, ${number(found.total.truncated)} cut ` : "nothing is kept of it ",
      found.before === null ? null : h("a", { href: address(found.before) }, `[ ${rolloutNumber(found.before, data_set)}`), " ",
      found.after === null ? null : h("a", { href: address(found.after) }, `${rolloutNumber(found.after, data_set)} ]`), " ",
      data_set || isReport ? null : h("a", { href: link("timeline", { run, rollout }) }, "timeline")),
    found.incidents.map((one) => h("p.bad", `${one.cause}: ${one.numbers} [${one.check}]`)),
    h(
      "div.row-of",
      histogram("reward", rows.map((row) => row.score), (range) => ((wanted.reward = range), filter())),
      histogram("tokens of the answer", rows.map((row) => row.response_tokens), (range) => ((wanted.length = range), filter())),
    ),
    h("div.controls", isReport ? null : search, choose("status"), choose("fate")),
    reasons.length || Object.keys(found.filters).length
      ? h("details.box", h("summary", "dropped, and why"), Object.entries(found.filters).map(([name, value]) => h("p", `${name}: ${number(value)}`)), table(["group", "why"], reasons))
      : null,
    list.view,
  );
  return {
    title,
    crumbs: [runCrumb(run)],
    view,
    move: list.move,
    open: list.open,
    turn: (by) => {
      const next = by < 0 ? found.before : found.after;
      if (next !== null) location.hash = address(next);
    },
  };
}

export async function samplesPage(asked) {
  const [run, what] = [asked.run ?? ".", asked.what ?? "best"];
  const found = await ask("samples", { run, limit: 500, ...WHOLE[what] });
  const list = chooser(run, true);
  list.show(rowsOf(found.columns), `${found.count} samples${found.cut ? ", and there may be more: open a rollout to see all of it" : ""}`);
  const links = Object.keys(WHOLE).map((name) => [name === what ? h("b", name) : h("a", { href: link("samples", { run, what: name }) }, name), " "]);
  return { title: `${what} of the run`, crumbs: [runCrumb(run)], view: h("div", h("p", links), list.view), move: list.move, open: list.open };
}

export function event(one) {
  const { event: what, group, committed, ...rest } = one;
  if ("rollout" in rest) rest.rollout = rolloutNumber(rest.rollout);
  return [what, Object.entries(rest).map(([name, value]) => `${name} ${json(value)}`).join(", "), committed === null ? committed : rolloutNumber(committed)];
}

export function paidBy(list) {
  return list.map((one) => h("div", one.name, one.version ? ` ${one.version}` : "", " ", h("code.dim", (one.sha256 ?? "").slice(0, 12))));
}

export function reward(value) {
  if (value === null || typeof value !== "object") return number(value);
  return Object.entries(value).map(([name, part]) => h("div", `${name} ${number(part)}`));
}

export async function groupPage(asked) {
  const [run, rollout, data_set, group] = [asked.run ?? ".", Number(asked.rollout), asked.data_set ?? "", asked.group];
  const found = await ask("group", { run, rollout, data_set, group });
  let at = -1;
  const cards = found.samples.map((one) =>
    h(
      "div.card",
      { "data-address": sampleLink(run, one) },
      h("a", { href: sampleLink(run, one) }, `sample ${sampleName(one.sample_index, one.part)}`),
      h(
        "dl",
        h("dt", "reward"), h("dd", reward(one.reward)),
        h("dt", "advantage"), h("dd", number(one.advantage)),
        h("dt", "paid by"), h("dd", paidBy(one.paid_by)),
        h("dt", "became"), h("dd", `${one.status}, ${one.fate}`),
        h("dt", "tokens"), h("dd", `${one.response_tokens}, ${one.trained_tokens} trained`),
        h("dt", "weights"), h("dd", weights(one)),
      ),
      one.failure ? h("p.bad", one.failure) : null,
      h("div.text", one.text),
    ),
  );
  const view = h(
    "div",
    found.samples.length ? null : h("p.dim", "nothing is kept of this group"),
    found.prompt.map((message) => [h("div.dim", message.role), h("div.text", message.text)]),
    found.label === null ? null : h("p", `label: ${found.label}`),
    found.row === null || isReport ? null : h("p", h("a", { href: link("prompt", { run, row: found.row }) }, `row ${found.row} of the data: all its visits`)),
    h("div.answers", cards),
    data_set ? null : h("h2", "ledger"),
    data_set ? null : found.events.length ? table(["what", "", "in the commit of rollout"], found.events.map(event)) : h("p.dim", "no commit tells of it yet"),
  );
  return {
    title: `group ${group}`,
    crumbs: [runCrumb(run), [rolloutName(rollout, data_set), link("rollout", { run, rollout, data_set })]],
    view,
    move(step) {
      cards[at]?.classList.remove("chosen");
      at = Math.max(0, Math.min(cards.length - 1, at + step));
      cards[at]?.classList.add("chosen");
      cards[at]?.scrollIntoView({ block: "nearest" });
    },
    open: () => at >= 0 && (location.hash = cards[at].dataset.address),
  };
}
