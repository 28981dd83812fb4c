// Addresses, keys, and what is new: "#/rollout?run=demo&rollout=3" shows the page `rollout` with these parameters.
//
// A page is a function of its parameters that gives {title, crumbs, view, move(by), open(), token(by), turn(by), shown(),
// stamp, update()}: `crumbs` are the addresses above it, `move` and those after it answer keys. A page with the `stamp` of
// what it shows is live: `update` brings it up to a run that has grown; without that it is made again.

import { ask, isReport, link } from "./api.js";
import { h, plain } from "./dom.js";
import { comparePage, runsPage } from "./runs.js";
import { runPage } from "./run.js";
import { groupPage, rolloutPage, samplesPage } from "./samples.js";
import { shadowsPage } from "./shadows.js";
import { samplePage } from "./sample.js";
import { evaluationPage, promptPage, timelinePage } from "./over_time.js";

const PAGES = {
  runs: runsPage, compare: comparePage, run: runPage, rollout: rolloutPage, samples: samplesPage, group: groupPage,
  sample: samplePage, timeline: timelinePage, evaluation: evaluationPage, prompt: promptPage,
  shadows: shadowsPage,
};
const PERIOD = 2000;
const KEYS = [
  ["j  k", "next and previous: sample, answer, row"],
  ["Enter", "open what is chosen"],
  ["h  l", "previous and next token"],
  ["[  ]", "previous and next rollout"],
  ["u", "up: from a token's sample to its group, rollout, run, list"],
  ["/", "search"],
  ["?", "this help"],
  ["Esc", "leave the search field, close this"],
];

const top = document.getElementById("top");
const main = document.getElementById("page");
const help = h("dialog", h("h2", "Keys"), h("table", KEYS.map(([key, text]) => h("tr", h("td", h("kbd", key)), h("td", text)))));
document.body.append(help);
let shown = null;
let turn = 0;
let stamp = null;

function parameters() {
  const [page, rest] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: page || "", ...Object.fromEntries(new URLSearchParams(rest ?? "")), all: new URLSearchParams(rest ?? "") };
}

async function first() {
  const { runs } = await ask("runs");
  location.replace(runs.length === 1 ? link("run", { run: runs[0].run }) : link("runs"));
}

async function show({ keep = false } = {}) {
  const mine = ++turn;
  const asked = parameters();
  const scrolled = window.scrollY;
  let made;
  try {
    if (!asked.page) return await first();
    if (!(asked.page in PAGES)) throw new Error(`there is no page ${asked.page}`);
    made = await PAGES[asked.page](asked);
  } catch (error) {
    made = { title: "", view: h("p.bad", { role: "alert" }, error.message) };
  }
  if (mine !== turn) return; // another address was opened meanwhile
  shown = { ...made, page: asked.page, run: asked.run ?? null };
  stamp = made.stamp ?? null;
  document.title = plain(`${made.title} - slime`);
  top.replaceChildren(
    h("nav.crumbs", (made.crumbs ?? []).flatMap(([text, address]) => [h("a", { href: address }, text), " / "]), h("b", made.title)),
    h("span.dim", isReport ? "report" : ""),
    h("button", { onclick: () => help.showModal(), title: "keys" }, "?"),
  );
  main.replaceChildren(made.view);
  main.dataset.ready = asked.page;
  window.scrollTo(0, keep ? scrolled : 0);
  made.shown?.();
}

const news = ({ page, run }) => (page === "runs" ? ask("pulses") : ask("pulse", { run }));
const say = (text) => top.querySelector(".dim")?.replaceChildren(text);

async function look() {
  if (isReport || document.hidden || stamp === null || main.querySelector("[data-search]:focus")) return;
  const mine = turn;
  try {
    const found = await news(shown);
    say("");
    if (mine !== turn || stamp === found.stamp) return;
    stamp = found.stamp;
    await (shown.update ? shown.update() : show({ keep: true }));
  } catch (error) {
    say(error instanceof TypeError ? "no answer from slime view" : error.message);
  }
}

function onKey(event) {
  const typing = event.target.matches?.("input, select, textarea");
  if (event.key === "Escape" && typing) return event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const actions = {
    j: () => shown?.move?.(1),
    k: () => shown?.move?.(-1),
    h: () => shown?.token?.(-1),
    l: () => shown?.token?.(1),
    "[": () => shown?.turn?.(-1),
    "]": () => shown?.turn?.(1),
    Enter: () => !event.target.matches?.("a, button, summary") && shown?.open?.(),
    u: () => shown?.crumbs?.length && (location.hash = shown.crumbs.at(-1)[1]),
    "/": () => main.querySelector("[data-search]")?.focus(),
    "?": () => help.showModal(),
  };
  if (event.key in actions) {
    if (event.key !== "Enter") event.preventDefault();
    actions[event.key]();
  }
}

window.addEventListener("hashchange", () => show());
window.addEventListener("keydown", onKey);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show({ keep: true }));
setInterval(look, PERIOD);
show();
