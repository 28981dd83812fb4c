// Addresses, keys, and new data: "#/rollout?run=demo&rollout=3" shows the page `rollout` with these parameters.
//
// A page is a function of its parameters that returns {title, crumbs, view, move(by), open(), token(by), raw(), turn(by),
// shown(), stamp, update()}: `crumbs` are the addresses above it; keys call `move` to `turn`. A page with the `stamp` of
// its data is live: `update` adds new data; a page without `update` is made again.

import { ask, isReport, link } from "./api.js";
import { h, plain } from "./dom.js";
import { comparePage, runsPage } from "./runs.js";
import { runPage } from "./run.js";
import { groupPage, rolloutPage, samplesPage } from "./samples.js";
import { shadowsPage } from "./shadows.js";
import { side } from "./side.js";
import { samplePage } from "./sample.js";
import { evaluationPage, promptPage, timelinePage } from "./over_time.js";

const PAGES = {
  runs: runsPage, compare: comparePage, run: runPage, rollout: rolloutPage, samples: samplesPage, group: groupPage,
  sample: samplePage, timeline: timelinePage, evaluation: evaluationPage, prompt: promptPage,
  shadows: shadowsPage,
};
const PERIOD = 2000;
const KEYS = [
  ["j  k", "next and previous sample, answer, row"],
  ["Enter", "open the chosen one"],
  ["t", "raw tokens of a sample, and back to the conversation"],
  ["h  l", "previous and next token"],
  ["[  ]", "previous and next rollout"],
  ["u", "up: from a sample to its group, rollout, run, list"],
  ["/", "search"],
  ["?", "this help"],
  ["Esc", "leave the search field, close this"],
];

const column = h("nav", { id: "side", "aria-label": "runs and pages" });
const top = h("header", { id: "top" });
const main = h("main", { id: "page", tabindex: -1 });
const help = h(
  "dialog",
  { "aria-label": "keys" },
  h("h2", "Keys"),
  h("dl.facts", KEYS.map(([key, text]) => [h("dt", key.split("  ").map((one) => [h("kbd", one), " "])), h("dd", text)])),
  h("form", { method: "dialog" }, h("button", "Close")),
);
const skip = h("a.skip", { href: "#page", onclick: (event) => (event.preventDefault(), main.focus()) }, "Skip to the content");
document.body.append(skip, column, h("div.content", top, main), help);
let shown = null;
let turn = 0;
let stamp = null;

// A box that scrolls is reached by Tab.
new ResizeObserver(() => {
  for (const box of main.querySelectorAll(".scroll")) box.tabIndex = box.scrollWidth > box.clientWidth ? 0 : -1;
}).observe(main);

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
    made = { title: "Not found", view: h("p.bad", { role: "alert" }, error.message), crumbs: isReport ? [] : [["runs", link("runs")]] };
  }
  if (mine !== turn) return; // another address was opened meanwhile
  shown = { ...made, page: asked.page, run: ["runs", "compare"].includes(asked.page) ? null : (asked.run ?? "."), data_set: asked.data_set };
  stamp = made.stamp ?? null;
  document.title = plain(`${[...(made.crumbs ?? []).map(([text]) => text), made.title].join(" / ")} - slime`);
  top.replaceChildren(
    h("button.menu", { "aria-expanded": "false", "aria-controls": "side", onclick: menu }, "Menu"),
    h("nav.crumbs", { "aria-label": "breadcrumbs" }, (made.crumbs ?? []).flatMap(([text, address]) => [h("a", { href: address }, text), h("span.dim", { "aria-hidden": "true" }, " / ")]), h("h1", { title: made.path ?? null }, made.title)),
    h("span.dim.said", { role: "status" }, isReport ? "report" : ""),
    h("button", { onclick: () => help.showModal(), "aria-label": "keys" }, "?"),
  );
  document.body.classList.remove("menu");
  main.replaceChildren(made.view);
  main.dataset.ready = asked.page;
  window.scrollTo(0, keep ? scrolled : 0);
  made.shown?.();
  await list();
}

function menu({ currentTarget }) {
  currentTarget.setAttribute("aria-expanded", document.body.classList.toggle("menu"));
}

async function list() {
  const found = await ask("runs").catch(() => null); // the page itself says what is wrong
  if (found) column.replaceChildren(...h("div", side(found, shown)).childNodes);
}

const news = ({ page, run }) => (page === "runs" ? ask("pulses") : ask("pulse", { run }));
const say = (text) => top.querySelector(".said")?.replaceChildren(text);

async function look() {
  if (isReport || document.hidden || stamp === null || main.querySelector("[data-search]:focus")) return;
  const mine = turn;
  try {
    const found = await news(shown);
    say("");
    if (mine !== turn || stamp === found.stamp) return;
    stamp = found.stamp;
    await (shown.update ? Promise.all([shown.update(), list()]) : show({ keep: true }));
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
    t: () => shown?.raw?.(),
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
