// Samples of a rollout in a table that two histograms filter; best and worst of a run; a group in columns.

import { ask, isReport, link } from "./api.js";
import { histogram } from "./chart.js";
import { card, empty, h, heading, json, number, percent, rolloutName, rolloutNumber, rowsOf, signed, spoken, table, walker } from "./dom.js";
import { WHOLE, runCrumb, sampleLink, sampleName, weights } from "./run.js";

const PAGE = 100;
const CONTROL = 60; // characters
const WORDS = { fate: "outcome" };

// Rows that j and k choose and Enter opens; `show(rows, words, text)` fills it. Their texts are asked for when they are
// drawn, around `text` if it was searched for; `extra` are more columns: [title, (row) -> cell].
export function chooser(run, withRollout, extra = []) {
  const body = h("tbody");
  const more = h("button", { onclick: () => fill(PAGE) }, "more");
  const count = h("p.dim");
  let [rows, drawn, at, sought] = [[], 0, -1, ""];
  const head = [
    ...(withRollout ? [h("th.num.opt", "rollout")] : []), h("th.num.opt", "group"), h("th.num.opt", "sample"), h("th.num", "reward"),
    ...extra.map(([title]) => heading(title)), "prompt", "answer", h("th.num.opt", "tokens"), h("th.opt-more", "weights"), h("th.opt", "outcome"), h("td.opt"),
  ];
  const grid = h("div.scroll", h("table.wide.rows", h("thead", h("tr", head.map(heading))), body));
  const view = h("div", count, grid, more);

  // Answers to one prompt follow one another: the first row of a group has a line above it.
  function line(row, i, added) {
    const before = i ? added[i - 1] : (rows[rows.indexOf(row) - 1] ?? null);
    const again = !withRollout && before !== null && row.group_index !== null && before.group_index === row.group_index;
    row.says = [h(again ? "td.start.dim" : "td.start"), h("td.start")];
    if (row.stored === false) return h("tr.dim", cells(row, (text) => text));
    const address = sampleLink(run, row);
    const group = link("group", { run, rollout: row.rollout, data_set: row.data_set, group: row.group_index });
    const links = { group_index: group, sample_index: address };
    return h(
      again ? "tr.row.again" : "tr.row",
      { onclick: (event) => event.target.closest("a") || (location.hash = address), "data-address": address },
      cells(row, (text, name) => (row[name] === null ? text : h("a", { href: links[name] }, text))),
    );
  }

  function cells(row, linked) {
    const trained = row.trained_tokens === row.response_tokens || row.fate !== "trained" ? "" : `, ${row.trained_tokens} trained`;
    return [
      withRollout ? h("td.num.opt", rolloutNumber(row.rollout, row.data_set)) : null,
      h("td.num.opt", linked(row.group_index ?? "-", "group_index")),
      h("td.num.opt", linked(sampleName(row.sample_index, row.part), "sample_index")),
      h("td.num", h("b", number(row.score))),
      extra.map(([, made]) => made(row)),
      row.says,
      h("td.num.opt", `${row.prompt_tokens} in, ${row.response_tokens} out${trained}`),
      h("td.opt-more", weights(row)),
      h("td.opt.short", h(`span.badge.${row.fate}`, row.fate), row.status === "completed" ? "" : [" ", h(`span.badge.${row.status}`, row.status)]),
      h("td.opt", row.failure ?? row.reason ?? ""),
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
      const places = left.slice(0, PAGE).map((row) => [row.rollout, row.data_set ? 1 : 0, row.offset, row.size, row.place].join("."));
      const found = await ask("texts", { run, at: places, text });
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
      grid.hidden = !rows.length;
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

// A text with the sought part marked.
function marked(text, sought) {
  const at = sought ? text.toLowerCase().indexOf(sought.toLowerCase()) : -1;
  return at < 0 ? spoken(text) : [text.slice(0, at), h("mark", text.slice(at, at + sought.length)), text.slice(at + sought.length)];
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
      `${WORDS[name] ?? name} `,
      h("select", { onchange: (event) => ((wanted[name] = event.target.value), filter()) }, h("option", { value: "" }, "any"), values.map((value) => h("option", value))),
    );
  };
  const search = h("input", {
    "data-search": "", "aria-label": "text of prompt or answer", placeholder: "/ text of prompt or answer",
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
  const reasons = Object.entries(found.dropped_for).map(([group, reason]) => [h("a", { href: link("group", { run, rollout, group }) }, `group ${group}`), reason]);
  const view = h(
    "div",
    h("div.controls.pager", pager(found, (number) => link("rollout", { run, rollout: number, data_set }), data_set),
      data_set || isReport ? null : h("a", { href: link("timeline", { run, rollout }) }, "timeline")),
    found.incidents.map((one) => h("p.bad", `${one.cause}: ${one.numbers} [${one.check}]`)),
    rows.length ? [h("div.tiles", totals(found.total, rows.length)), h(
      "div.histograms",
      histogram("reward", rows.map((row) => row.score), (range) => ((wanted.reward = range), filter())),
      histogram("tokens of the answer", rows.map((row) => row.response_tokens), (range) => ((wanted.length = range), filter())),
    )] : empty("No sample of it is kept. The run may not have got there, or its oldest rollouts were thinned."),
    rows.length ? h("div.controls", isReport ? null : search, choose("status"), choose("fate")) : null,
    reasons.length || Object.keys(found.filters).length
      ? h("details.box", h("summary", "dropped groups, and why"), Object.entries(found.filters).map(([name, value]) => h("p", `${name}: ${number(value)}`)), reasons.length ? table(["group", "why"], reasons) : empty("No group of this rollout was dropped."))
      : null,
    rows.length ? list.view : null,
  );
  return {
    title: rolloutName(rollout, data_set),
    crumbs: [runCrumb(run)],
    view,
    move: list.move,
    open: list.open,
    turn: (by) => {
      const next = by < 0 ? found.before : found.after;
      if (next !== null) location.hash = link("rollout", { run, rollout: next, data_set });
    },
  };
}

// Links to the one before and after; where there is none, its number is plain.
export function pager({ before, after }, address, dataSet) {
  const step = (to, text, label) => (to === null || to === undefined ? null : h("a.button", { href: address(to), "aria-label": label }, text));
  const name = (to) => rolloutNumber(to, dataSet);
  return [step(before, `← ${name(before)}`, `before: ${name(before)}`), step(after, `${name(after)} →`, `after: ${name(after)}`)];
}

function totals(total, count) {
  if (!total) return [card("Samples", number(count))];
  const share = (value) => [number(value), h("small", ` ${percent(value / total.samples)}`)];
  return [
    card("Reward", number(total.score, 3), "mean of the trained samples"), card("Samples", number(total.samples)), card("Tokens", number(total.tokens), `${number(Math.round(total.tokens / (total.samples || 1)))} an answer`),
    card("Dropped", share(total.dropped)), card("Failed", share(total.failed)), card("Truncated", share(total.truncated)),
  ];
}

const OF = { best: "Best samples", worst: "Worst samples", failed: "Failed samples", truncated: "Truncated samples", dropped: "Dropped samples" };

export async function samplesPage(asked) {
  const [run, what] = [asked.run ?? ".", asked.what ?? "best"];
  const found = await ask("samples", { run, limit: 500, ...WHOLE[what] });
  const list = chooser(run, true);
  list.show(rowsOf(found.columns), `${found.count} samples${found.cut ? ", and there may be more: open a rollout to see all of it" : ""}`);
  const links = Object.keys(WHOLE).map((name) => h("a.button", { href: link("samples", { run, what: name }), "aria-current": name === what ? "page" : null }, name));
  return {
    title: OF[what] ?? what, crumbs: [runCrumb(run)],
    view: h("div", h("div.controls", links), found.count ? list.view : empty(`No ${what} sample is kept in this run.`)), move: list.move, open: list.open,
  };
}

export function event(one) {
  const { event: what, group, committed, ...rest } = one;
  if ("rollout" in rest) rest.rollout = rolloutNumber(rest.rollout);
  return [what, Object.entries(rest).map(([name, value]) => `${name} ${json(value)}`).join(", "), committed === null ? committed : rolloutNumber(committed)];
}

export function paidBy(list) {
  return list.map((one) => h("div", h("span", { title: one.name }, one.name.split("/").at(-1)), one.version ? ` ${one.version}` : "", " ", h("code.dim", (one.sha256 ?? "").slice(0, 12))));
}

export function reward(value) {
  if (value === null || typeof value !== "object") return number(value);
  return Object.entries(value).map(([name, part]) => h("div", `${name} ${number(part)}`));
}

// A message of a conversation.
export function bubble(role, children, words = "") {
  return h(`div.bubble.r-${["system", "user", "tool", "assistant", "template"].includes(role) ? role : "other"}`, h("div.role", h("b", role === "template" ? "chat template" : role), words ? h("span.dim", ` ${words}`) : ""), h("div.text", children));
}

// A message of a prompt; control tokens of the chat template alone are left out.
function said({ role, text }) {
  if (role !== "template") return bubble(role, text);
  return text.length < CONTROL ? null : h("details.bubble.r-template", h("summary.role", h("b", "chat template")), h("div.text", text));
}

export async function groupPage(asked) {
  const [run, rollout, data_set, group] = [asked.run ?? ".", Number(asked.rollout), asked.data_set ?? "", asked.group];
  const found = await ask("group", { run, rollout, data_set, group });
  const samples = found.samples.toSorted((a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity));
  const scores = samples.map((one) => one.score).filter((score) => score !== null);
  const payers = Map.groupBy(samples, (one) => JSON.stringify(one.paid_by));
  const cards = samples.map((one) => answer(run, one, payers.size > 1));
  const view = h(
    "div",
    samples.length ? null : empty("No sample of this group is kept."),
    h("div.two", h("div.chat", found.prompt.map(said)),
      h("dl.facts.box",
        found.label === null ? null : [h("dt", "label"), h("dd", h("code", found.label))],
        scores.length ? [h("dt", "rewards"), h("dd", `${scores.length} answers, mean ${number(scores.reduce((a, b) => a + b) / scores.length, 3)}, from ${number(Math.min(...scores), 3)} to ${number(Math.max(...scores), 3)}`)] : null,
        payers.size === 1 ? [h("dt", "reward function"), h("dd", paidBy(samples[0].paid_by))] : null,
        found.row === null || isReport ? null : [h("dt", "data"), h("dd", h("a", { href: link("prompt", { run, row: found.row }) }, `row ${found.row} and all its visits`))],
      )),
    h("h2", "Answers", h("span.dim", " by reward; the edge shows the sign of the advantage")),
    h("div.answers", cards),
    data_set ? null : h("h2", "Ledger"),
    data_set ? null : found.events.length ? table(["event", "details", "in the commit of rollout"], found.events.map(event)) : empty("No commit has recorded it yet."),
  );
  return {
    title: `group ${group}`,
    crumbs: [runCrumb(run), [rolloutName(rollout, data_set), link("rollout", { run, rollout, data_set })]],
    view,
    ...walker(() => cards),
  };
}

function answer(run, one, withPayer) {
  const sign = one.advantage === null || !one.advantage ? "" : one.advantage > 0 ? ".good-edge" : ".bad-edge";
  const facts = [`${number(one.response_tokens)} tokens${one.trained_tokens === one.response_tokens ? "" : `, ${number(one.trained_tokens)} trained`}`, weights(one), one.turns > 1 ? `${one.turns} turns` : null].filter(Boolean);
  return h(
    `div.card${sign}`,
    { "data-address": sampleLink(run, one) },
    h("div.head",
      h("b.score", { title: "reward" }, typeof one.reward === "object" ? number(one.score, 3) : number(one.reward, 3)),
      one.advantage === null ? null : h("span", { title: "advantage, mean of the tokens" }, `advantage ${signed(one.advantage)}`),
      h("a.end", { href: sampleLink(run, one) }, `sample ${sampleName(one.sample_index, one.part)}`)),
    h("div.dim", facts.join(" · "), one.fate === "trained" && one.status === "completed" ? "" : [" ", [...new Set([one.status, one.fate])].map((word) => h(`span.badge.${word}`, word))]),
    one.reward !== null && typeof one.reward === "object" ? h("div.dim", reward(one.reward)) : null,
    one.components ? h("div.dim", reward(one.components)) : null,
    withPayer ? h("div.dim", paidBy(one.paid_by)) : null,
    one.failure ? h("p.bad", one.failure) : null,
    h("div.text", spoken(one.text)),
  );
}
