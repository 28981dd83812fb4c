// One sample: each token with who wrote it, mask, log-probs of engine and trainer, their ratio, advantage, weights.

import { again } from "./again.js";
import { ask, isReport, link, query } from "./api.js";
import { h, number, rolloutName, table } from "./dom.js";
import { runCrumb, sampleName, weights } from "./run.js";
import { paidBy, reward } from "./samples.js";
import { verdicts } from "./shadows.js";

const kept = { by: "source" };
const FOLDED = 1;
const WORDS = {
  system: "system message", user: "user", template: "chat template", tool: "tool", sampled: "model", demonstration: "demonstration",
  text: "text of a function",
};

// A token's numbers. `prompt` tokens have none.
function numbersOf(tokens, i) {
  const at = tokens.start + i - tokens.prompt - tokens.first;
  const of = (name) => (at < 0 ? null : (tokens.columns[name]?.[at] ?? null));
  const [engine, trainer] = [of("engine"), of("trainer")];
  const gap = engine === null || trainer === null ? null : trainer - engine;
  return {
    engine, trainer, gap, ratio: gap === null ? null : Math.exp(gap), advantage: of("advantage"), reference: of("reference"), teacher: of("teacher"),
    value: of("value"), return: of("return"), entropy: of("entropy"), version: of("version"), mask: at < 0 ? null : (tokens.mask[at] ?? 0),
  };
}

// What colours tokens: name -> number -> strength in [-1, 1], below zero is red.
function shades(all) {
  const most = (name) => Math.max(1e-9, ...all.map((one) => Math.abs(one[name] ?? 0)));
  const [gap, advantage, entropy] = [most("gap"), most("advantage"), most("entropy")];
  const versions = all.map((one) => one.version).filter((version) => version !== null && version >= 0);
  const newest = versions.reduce((a, b) => Math.max(a, b), -Infinity);
  const oldest = versions.reduce((a, b) => Math.min(a, b), Infinity);
  return {
    source: null,
    "log-prob": (one) => (one.engine === null ? 0 : -Math.min(1, -one.engine / 5)),
    "trainer - engine": (one) => (one.gap === null ? 0 : one.gap / gap),
    advantage: (one) => (one.advantage === null ? 0 : one.advantage / advantage),
    entropy: (one) => (one.entropy === null ? 0 : one.entropy / entropy),
    mask: (one) => (one.mask ? 0.8 : 0),
    weights: (one) => (one.version === null || one.version < 0 ? 0 : newest === oldest ? 0.4 : 0.2 + (0.8 * (one.version - oldest)) / (newest - oldest)),
  };
}

const tint = (strength) => `rgb(${strength < 0 ? "220 60 50" : "45 160 80"} / ${Math.round(Math.min(1, Math.abs(strength)) * 65)}%)`;

// What the colours mean: [text, strength] for some strengths of the scale.
function scale(all, by) {
  const known = (name) => all.map((one) => one[name]).filter((value) => value !== null);
  const most = (name) => Math.max(0, ...known(name).map(Math.abs));
  const around = (name) => [[number(-most(name), 3), -1], ["0", 0], [number(most(name), 3), 1]];
  const versions = known("version").filter((version) => version >= 0);
  const [oldest, newest] = [versions.reduce((a, b) => Math.min(a, b), Infinity), versions.reduce((a, b) => Math.max(a, b), -Infinity)];
  return {
    "log-prob": [["-5 or less", -1], ["-2.5", -0.5], ["0", 0]],
    "trainer - engine": around("gap"),
    advantage: around("advantage"),
    entropy: [["0", 0], [number(most("entropy"), 3), 1]],
    mask: [["trained", 0.8], ["not trained", 0]],
    weights: !versions.length ? [] : oldest === newest ? [[`weights ${newest}`, 0.4]] : [[`weights ${oldest}`, 0.2], [`weights ${newest}`, 1]],
  }[by];
}

// The turn of a response token: [name, value] lines; none outside turns.
function turnOf(tokens, place) {
  const at = tokens.turns.findIndex(([first, last]) => first <= place && place < last);
  if (at < 0) return [];
  const [, , turnReward, role, id, state] = tokens.turns[at];
  const facts = [["reward of the turn", turnReward === null ? null : number(turnReward)], ["role", role], ["id of the turn", id], ["state", state]];
  return [["turn", `${at + 1} of ${tokens.turns.length}`], ...facts.filter(([, value]) => value !== null && value !== "")];
}

function tokenView(tokens, choose) {
  const holder = h("div.tokens");
  const spans = [];
  const all = tokens.ids.map((_, i) => numbersOf(tokens, i));
  let i = 0;
  for (const [source, length] of tokens.spans) {
    const piece = document.createDocumentFragment();
    for (const end = i + length; i < end; i += 1) {
      const text = tokens.texts ? tokens.texts[i] : `${tokens.ids[i]} `;
      const span = document.createElement("span");
      span.className = `s-${source}${all[i].mask === 0 ? " untrained" : ""}${text ? "" : " part"}`;
      span.dataset.i = i;
      span.textContent = text ? text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t") : "·";
      piece.append(span);
      spans.push(span);
    }
    if (source === "tool" && length > FOLDED) holder.append(h("details", h("summary.dim", `tool, ${length} tokens`), piece));
    else holder.append(piece);
  }
  holder.addEventListener("click", (event) => {
    const span = event.target.closest("span[data-i]");
    if (span) choose(Number(span.dataset.i));
  });
  return {
    holder,
    spans,
    all,
    colour(by) {
      const shade = shades(all)[by];
      spans.forEach((span, at) => {
        const strength = shade ? shade(all[at]) : 0;
        span.style.background = !shade ? "" : strength ? tint(strength) : "transparent";
      });
    },
  };
}

export async function samplePage(asked) {
  const { run = ".", rollout, data_set = "", group, sample, part, start } = asked;
  const where = { run, rollout, data_set, group, sample, part };
  const found = await ask("sample", { ...where, start });
  const { tokens } = found;
  const panel = h("div.panel");
  const view = tokenView(tokens, choose);
  const sources = tokens.spans.flatMap(([source, length, withheld]) => Array(length).fill([source, withheld]));
  const buttons = isReport ? null : again(where, found, tokenView);
  const from = buttons?.querySelector("input[name=from]");
  let at = 0;

  function choose(i) {
    view.spans[at]?.classList.remove("chosen");
    at = Math.max(0, Math.min(view.spans.length - 1, i));
    const span = view.spans[at];
    if (!span) return;
    span.classList.add("chosen");
    span.closest("details")?.setAttribute("open", "");
    const [source, withheld] = sources[at] ?? ["", ""];
    const one = view.all[at];
    const lines = [
      ["token", tokens.start + at],
      ["id", tokens.ids[at]],
      ["text", h("code", JSON.stringify(tokens.texts?.[at] ?? ""))],
      ["written by", WORDS[source] ?? source],
      ["trained", one.mask === null ? "prompt" : one.mask ? "yes" : `no${withheld ? `: ${withheld}` : ""}`],
      ["log-prob, engine", number(one.engine, 6)],
      ["log-prob, trainer", number(one.trainer, 6)],
      ["ratio", number(one.ratio, 6)],
      ["advantage", number(one.advantage)],
      ["weights", number(one.version)],
      ...turnOf(tokens, tokens.start + at - tokens.prompt),
      ["entropy", tokens.columns.entropy || found.fate !== "trained" ? number(one.entropy, 6) : h("span.dim", "kept with --use-rollout-entropy")],
      ...["reference", "teacher", "value", "return"].filter((name) => one[name] !== null).map((name) => [name, number(one[name], 6)]),
    ];
    if (from) from.value = Math.max(0, Math.min(found.response_tokens - 1, tokens.start + at - tokens.prompt));
    panel.replaceChildren(
      h("b", "this token"), h("dl.facts", lines.map(([name, value]) => [h("dt", name), h("dd", value)])),
      h("b", "this sample"),
      h("dl.facts", [["reward", reward(found.reward)], ...(found.components ? [["parts of the reward", reward(found.components)]] : []), ["advantage", number(found.advantage)], ["label", found.label ?? "-"], ["paid by", paidBy(found.paid_by)], ...(found.shadow ? verdicts(found.shadow, found.score).map(([spec, cell]) => [`shadow ${spec.split("/").at(-1)}`, cell]) : [])].map(([name, value]) => [h("dt", name), h("dd", value)])),
    );
  }

  const by = h(
    "select",
    { "aria-label": "colour by", onchange: (event) => ((kept.by = event.target.value), paint()) },
    Object.keys(shades([])).filter((name) => name !== "entropy" || tokens.columns.entropy).map((name) => h("option", { selected: name === kept.by }, name)),
  );
  const legend = h("span.legend");
  function paint() {
    view.colour(kept.by);
    const sources = [...new Set(tokens.spans.map(([source]) => source))].map((source) => h(`span.s-${source}`, WORDS[source] ?? source));
    legend.replaceChildren(...(scale(view.all, kept.by)?.map(([text, strength]) => h("span", { style: `background: ${strength ? tint(strength) : "transparent"}` }, text)) ?? sources));
  }
  paint();
  choose(Math.max(0, Math.min(tokens.ids.length - 1, tokens.prompt - tokens.start)));
  const groupAddress = link("group", { run, rollout, data_set, group: found.group_index });
  const isThis = ([index, part]) => index === found.sample_index && part === found.part;
  const sibling = ([sample, part]) => link("sample", { ...where, sample, part: part || null, start: null });
  const neighbour = (step) => {
    const next = found.siblings[found.siblings.findIndex(isThis) + step];
    if (next !== undefined) location.hash = sibling(next);
  };
  const slice = (from) => link("sample", { ...where, start: Math.max(0, from) });
  const page = h(
    "div",
    h("p",
      found.siblings.map((one) => [isThis(one) ? h("b", sampleName(...one)) : h("a", { href: sibling(one) }, sampleName(...one)), " "]),
      h("span.dim", ` ${found.status}, ${found.fate}; ${found.prompt_tokens} + ${found.response_tokens} tokens, ${found.trained_tokens} trained; weights ${weights(found)}; ${found.turns} ${found.turns === 1 ? "turn" : "turns"}`),
      found.data_row === null || isReport ? null : [" ", h("a", { href: link("prompt", { run, row: found.data_row }) }, `row ${found.data_row} of the data`)],
    ),
    found.failure ? h("p.bad", found.failure) : null,
    h("div.controls", h("label", "colour by ", by), legend),
    tokens.ids.length < tokens.total
      ? h("p", `tokens ${tokens.start} to ${tokens.start + tokens.ids.length} of ${tokens.total} `, tokens.start > 0 ? h("a", { href: slice(tokens.start - 10000) }, "before") : null, " ", tokens.start + tokens.ids.length < tokens.total ? h("a", { href: slice(tokens.start + 10000) }, "after") : null)
      : null,
    tokens.texts === null && tokens.ids.length ? h("p.dim", "the tokenizer of the run is not here, so tokens are shown as their ids") : null,
    h("div.sample", h("div", tokens.ids.length ? view.holder : conversation(found), tokens.text === null || !tokens.ids.length ? null : h("div.text", tokens.text), buttons), panel),
    found.images.map(({ name, source }) => (source === null ? h("p.dim", `an image that is not here: ${name}`) : h("img", { src: source, alt: name, title: name }))),
    isReport ? null : found.renderers.map((name) => h("details.box", { open: true }, h("summary", `rendered by ${name}`), h("iframe", { sandbox: "", title: name, src: `rendered?${query({ ...where, by: name })}` }))),
    h("details.box", h("summary", "messages"), conversation(found)),
    h("details.box", h("summary", "raw ids"), h("pre", tokens.ids.join(" "))),
    h("details.box", h("summary", "metadata"), h("pre", found.metadata)),
    h("details.box", h("summary", "all tokens in a table"), h("p", { onclick: (event) => event.target.replaceWith(everything(tokens, view.all)) }, h("button", "show"))),
  );
  return {
    title: `sample ${sampleName(found.sample_index, found.part)}`,
    crumbs: [
      runCrumb(run),
      [rolloutName(rollout, data_set), link("rollout", { run, rollout, data_set })],
      ...(found.group_index === null ? [] : [[`group ${found.group_index}`, groupAddress]]),
    ],
    view: page,
    move: neighbour,
    token: (step) => (choose(at + step), view.spans[at]?.scrollIntoView({ block: "nearest" })),
    shown: () => tokens.prompt > tokens.start && view.spans[at]?.scrollIntoView({ block: "nearest" }),
  };
}

function conversation(found) {
  return h("div", [...found.prompt, { role: "assistant", text: found.text }].map((message) => [h("div.dim", message.role), h("div.text", message.text)]));
}

function everything(tokens, all) {
  const names = ["mask", "engine", "trainer", "ratio", "advantage", "version"];
  return table(["token", "id", "text", ...names], tokens.ids.map((id, i) => [tokens.start + i, id, JSON.stringify(tokens.texts?.[i] ?? ""), ...names.map((name) => number(all[i][name], 6))]));
}
