// One sample as a conversation of tokens: each with its source, mask, log-probs of engine and trainer, ratio, advantage,
// weights. The same tokens are shown as messages, or raw with the chat template.

import { again } from "./again.js";
import { ask, isReport, link, query } from "./api.js";
import { h, isSpecial, number, rolloutName, table } from "./dom.js";
import { runCrumb, sampleName, weights } from "./run.js";
import { bubble, paidBy, reward } from "./samples.js";
import { verdicts } from "./shadows.js";

const kept = { by: "source", raw: false };
const LONG = { tool: 200, template: 0 }; // pieces with more tokens are folded
const CONTROL = 8; // a piece of the chat template of so many tokens has no words
const LEAST_LOG_RATIO = 0.01; // smaller differences are rounding
const WORDS = {
  system: "system message", user: "user", template: "chat template", tool: "tool", sampled: "model", demonstration: "demonstration",
  text: "text of a function",
};
const ROLES = { sampled: "assistant", demonstration: "assistant, demonstration", template: "chat template", text: "text of a function" };

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

// Name -> {shade(numbers): strength in [-1, 1], ends: [text, strength] from low to high, words}. Orange is below zero.
function scales(all) {
  const most = (name, least = 1e-9) => all.reduce((found, one) => Math.max(found, Math.abs(one[name] ?? 0)), least);
  const [gap, advantage, entropy] = [most("gap", LEAST_LOG_RATIO), most("advantage"), most("entropy")];
  const versions = all.map((one) => one.version).filter((version) => version !== null && version >= 0);
  const newest = versions.reduce((a, b) => Math.max(a, b), -Infinity);
  const oldest = versions.reduce((a, b) => Math.min(a, b), Infinity);
  const share = (name, of) => (one) => (one[name] === null ? 0 : one[name] / of);
  return {
    source: null,
    advantage: { shade: share("advantage", advantage), ends: [[number(-advantage, 3), -1], ["0", 0], [`+${number(advantage, 3)}`, 1]], words: "advantage: pushed down, pushed up" },
    ratio: { shade: share("gap", gap), ends: [[number(Math.exp(-gap), 3), -1], ["1", 0], [number(Math.exp(gap), 3), 1]], words: "probability of the trainer over that of the engine" },
    "log-prob": { shade: (one) => (one.engine === null ? 0 : -Math.min(1, -one.engine / 5)), ends: [["-5 or less", -1], ["0", 0]], words: "log-prob of the engine: surprising, certain" },
    entropy: { shade: share("entropy", entropy), ends: [["0", 0], [number(entropy, 3), 1]], words: "entropy, nats" },
    mask: { shade: (one) => (one.mask ? 0.8 : 0), ends: [["not trained", 0], ["trained", 0.8]], words: "" },
    weights: {
      shade: (one) => (one.version === null || one.version < 0 ? 0 : newest === oldest ? 0.4 : 0.2 + (0.8 * (one.version - oldest)) / (newest - oldest)),
      ends: !versions.length ? [] : oldest === newest ? [[`v${newest}`, 0.4]] : [[`v${oldest}`, 0.2], [`v${newest}`, 1]], words: "version of the weights that sampled it",
    },
  };
}

const tint = (strength) => (strength ? `rgb(${strength < 0 ? "235 120 20" : "50 120 235"} / ${Math.round(Math.min(1, Math.abs(strength)) * 60)}%)` : "transparent");

// The scale as a bar with its numbers.
function drawnScale({ ends, words }) {
  const stops = ends.length > 1 ? ends.map(([, strength]) => tint(strength)).join(", ") : ends.map(([, strength]) => `${tint(strength)} 0 100%`).join();
  return h("span.scale", h("span.dim", words), h("span.numbers", ends.map(([text]) => h("span", text))), ends.length ? h("span.bar-of", { style: `background: linear-gradient(to right, ${stops})` }) : null);
}

// The turn of a response token: [name, value] lines; none outside turns.
function turnOf(tokens, place) {
  const at = tokens.turns.findIndex(([first, last]) => first <= place && place < last);
  if (at < 0) return [];
  const [, , turnReward, role, id, state] = tokens.turns[at];
  const facts = [["reward of the turn", turnReward === null ? null : number(turnReward)], ["role", role], ["id of the turn", id], ["state", state]];
  return [["turn", `${at + 1} of ${tokens.turns.length}`], ...facts.filter(([, value]) => value !== null && value !== "")];
}

// Spans of one source after another are a piece.
function piecesOf(tokens) {
  const pieces = [];
  for (const [source, length] of tokens.spans) {
    if (pieces.at(-1)?.source === source) pieces.at(-1).length += length;
    else pieces.push({ source, length });
  }
  return pieces;
}

const said = (text, raw) => (raw ? text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t") : text);

function tokenView(tokens, choose) {
  const holder = h("div.tokens.chat");
  const spans = [];
  const texts = [];
  const all = tokens.ids.map((_, i) => numbersOf(tokens, i));
  let i = 0;
  for (const { source, length } of piecesOf(tokens)) {
    const body = h("div.text");
    const turns = tokens.turns.length > 1 ? turnOf(tokens, tokens.start + i - tokens.prompt) : [];
    for (const end = i + length; i < end; i += 1) {
      const text = tokens.texts ? tokens.texts[i] : `${tokens.ids[i]} `;
      const span = document.createElement("span");
      span.className = `s-${source}${all[i].mask === 0 ? " untrained" : ""}${text ? "" : " part"}${isSpecial(text) ? " special" : ""}`;
      span.dataset.i = i;
      span.textContent = text || "·";
      texts.push(text || "·");
      body.append(span);
      spans.push(span);
    }
    holder.append(piece(source, length, body, source === "sampled" ? turns : []));
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
      const scale = scales(all)[by];
      holder.classList.toggle("coloured", Boolean(scale));
      spans.forEach((span, at) => (span.style.background = scale ? tint(scale.shade(all[at])) : ""));
    },
    raw(isRaw) {
      holder.classList.toggle("raw", isRaw);
      holder.classList.toggle("chat", !isRaw);
      spans.forEach((span, at) => /[\n\t]/.test(texts[at]) && (span.textContent = said(texts[at], isRaw)));
    },
  };
}

function piece(source, length, body, turns) {
  const words = [...turns.map(([name, value]) => `${name} ${value}`), source in LONG ? `${number(length)} tokens` : ""].filter(Boolean).join(", ");
  const made = h(`div.bubble.piece.r-${source}`, h("div.role", h("b", ROLES[source] ?? source), h("span.dim", ` ${words}`)), body);
  if (source === "template" && length <= CONTROL) made.classList.add("control");
  else if (length > (LONG[source] ?? Infinity)) {
    const fold = h("button.plain", { "aria-expanded": "false", onclick: toggle }, "show");
    function toggle() {
      const isFolded = made.classList.toggle("folded");
      fold.setAttribute("aria-expanded", !isFolded);
      fold.replaceChildren(isFolded ? "show" : "hide");
    }
    made.classList.add("folded");
    made.querySelector(".role").append(" ", fold);
  }
  return made;
}

export async function samplePage(asked) {
  const { run = ".", rollout, data_set = "", group, sample, part, start } = asked;
  const where = { run, rollout, data_set, group, sample, part };
  const found = await ask("sample", { ...where, start });
  const { tokens } = found;
  const ofToken = h("div");
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
    span.closest(".folded")?.querySelector("button").click();
    const [source, withheld] = sources[at] ?? ["", ""];
    const one = view.all[at];
    const lines = [
      ["token", number(tokens.start + at)],
      ["id", `${tokens.ids[at]}`],
      ["text", h("code", JSON.stringify(tokens.texts?.[at] ?? ""))],
      ["written by", WORDS[source] ?? source],
      ["trained", one.mask === null ? "prompt" : one.mask ? "yes" : `no${withheld ? `: ${withheld}` : ""}`],
      ["log-prob, engine", number(one.engine, 6)],
      ["log-prob, trainer", number(one.trainer, 6)],
      ["ratio", number(one.ratio, 6)],
      ["advantage", number(one.advantage)],
      ["weights", one.version === null ? "-" : `v${one.version}`],
      ...turnOf(tokens, tokens.start + at - tokens.prompt),
      ["entropy", tokens.columns.entropy || found.fate !== "trained" ? number(one.entropy, 6) : h("span.dim", "kept with --use-rollout-entropy")],
      ...["reference", "teacher", "value", "return"].filter((name) => one[name] !== null).map((name) => [name, number(one[name], 6)]),
    ];
    if (from) from.value = Math.max(0, Math.min(found.response_tokens - 1, tokens.start + at - tokens.prompt));
    ofToken.replaceChildren(facts(lines));
  }

  const by = h(
    "select",
    { "aria-label": "colour by", onchange: (event) => ((kept.by = event.target.value), paint()) },
    Object.keys(scales([])).filter((name) => name !== "entropy" || tokens.columns.entropy).map((name) => h("option", { selected: name === kept.by }, name)),
  );
  const legend = h("span.legend");
  function paint() {
    view.colour(kept.by);
    const scale = scales(view.all)[kept.by];
    const sources = [...new Set(tokens.spans.map(([source]) => source))].map((source) => h(`span.swatch.s-${source}`, WORDS[source] ?? source));
    legend.replaceChildren(...(scale ? [drawnScale(scale)] : sources));
  }
  const button = h("button", { onclick: () => raw() });
  function raw(isRaw = !kept.raw) {
    kept.raw = isRaw;
    view.raw(isRaw);
    button.setAttribute("aria-pressed", isRaw);
    button.replaceChildren("raw tokens ", h("kbd", "t"));
  }
  raw(kept.raw);
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
  const ofSample = [
    ["reward", reward(found.reward)], ...(found.components ? [["parts of the reward", reward(found.components)]] : []), ["advantage", number(found.advantage)],
    ["label", found.label ?? "-"], ["reward function", paidBy(found.paid_by)],
    ["outcome", [...new Set([found.status, found.fate])].map((word) => [h(`span.badge.${word}`, word), " "])],
    ["tokens", `${number(found.prompt_tokens)} in, ${number(found.response_tokens)} out, ${number(found.trained_tokens)} trained`], ["weights", weights(found)], ["turns", `${found.turns}`],
    ...(found.data_row === null || isReport ? [] : [["data", h("a", { href: link("prompt", { run, row: found.data_row }) }, `row ${found.data_row} and all its visits`)]]),
    ...(found.shadow ? verdicts(found.shadow, found.score).map(([spec, cell]) => [`shadow ${spec.split("/").at(-1)}`, cell]) : []),
  ];
  const page = h(
    "div",
    found.siblings.length > 1
      ? h("nav.siblings", { "aria-label": "answers of the group" }, h("span.dim", "answers of the group "), found.siblings.map(([sample, part, score]) => h("a.button", { href: sibling([sample, part]), "aria-current": isThis([sample, part]) ? "page" : null }, sampleName(sample, part), score === null ? "" : [" ", h("b", { title: "reward" }, number(score, 2))])))
      : null,
    found.failure ? h("p.bad", found.failure) : null,
    h("div.controls", button, h("label", "colour by ", by), legend),
    tokens.ids.length < tokens.total
      ? h("p", `tokens ${tokens.start} to ${tokens.start + tokens.ids.length} of ${tokens.total} `, tokens.start > 0 ? h("a", { href: slice(tokens.start - 10000) }, "before") : null, " ", tokens.start + tokens.ids.length < tokens.total ? h("a", { href: slice(tokens.start + 10000) }, "after") : null)
      : null,
    tokens.texts === null && tokens.ids.length ? h("p.dim", "The tokenizer of the run is not here, so tokens are shown as their ids.") : null,
    h(
      "div.sample",
      h("div.talk", tokens.ids.length ? view.holder : conversation(found), tokens.text === null || !tokens.ids.length ? null : bubble("assistant", tokens.text)),
      h("aside.panel", { "aria-label": "numbers" }, h("h2", "This sample"), facts(ofSample), h("h2", "This token"), ofToken),
      h(
        "div.more",
        found.images.map(({ name, source }) => (source === null ? h("p.dim", `an image that is not here: ${name}`) : h("img", { src: source, alt: name, title: name }))),
        isReport ? null : found.renderers.map((name) => h("details.box", { open: true }, h("summary", `rendered by ${name}`), h("iframe", { sandbox: "", title: name, src: `rendered?${query({ ...where, by: name })}` }))),
        buttons,
        h("details.box", h("summary", "metadata"), h("pre", found.metadata)),
        h("details.box", h("summary", "raw ids"), h("pre", tokens.ids.join(" "))),
        h("details.box", h("summary", "all tokens in a table"), h("p", { onclick: (event) => event.target.replaceWith(everything(tokens, view.all)) }, h("button", "Show"))),
      ),
    ),
  );
  return {
    title: `sample ${sampleName(found.sample_index, found.part)}`,
    crumbs: [
      runCrumb(run),
      [rolloutName(rollout, data_set), link("rollout", { run, rollout, data_set })],
      ...(found.group_index === null ? [] : [[`group ${found.group_index}`, groupAddress]]),
    ],
    view: page,
    raw: () => raw(),
    move: neighbour,
    token: (step) => (choose(at + step), view.spans[at]?.scrollIntoView({ block: "nearest" })),
    shown: () => tokens.prompt > tokens.start && view.spans[at]?.scrollIntoView({ block: "nearest" }),
  };
}

const facts = (lines) => h("dl.facts", lines.map(([name, value]) => [h("dt", name), h("dd", value)]));

function conversation(found) {
  return h("div.chat", [...found.prompt, { role: "assistant", text: found.text }].map((message) => bubble(message.role, message.text)));
}

function everything(tokens, all) {
  const names = ["mask", "engine", "trainer", "ratio", "advantage", "version"];
  return table(["token", "id", "text", ...names], tokens.ids.map((id, i) => [tokens.start + i, id, JSON.stringify(tokens.texts?.[i] ?? ""), ...names.map((name) => number(all[i][name], 6))]));
}
