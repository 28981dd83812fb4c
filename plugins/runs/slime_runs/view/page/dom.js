// Elements and numbers. Strings become text nodes, so text of a model is never markup.

// Spell out characters that move, hide or reorder text: names of runs, rewards and data sets may contain them, too.
export function plain(text) {
  return text.replace(/(?![\n\t])[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu, (c) => {
    const code = c.codePointAt(0).toString(16);
    return code.length > 2 ? `\\u${code.padStart(4, "0")}` : `\\x${code.padStart(2, "0")}`;
  });
}

const SPECIAL = /(<\|[^\s|]{1,40}\|>|<\/?s>)/;

// Text whose special tokens, as <|im_end|>, stand back.
export const spoken = (text) => text.split(SPECIAL).map((part, i) => (i % 2 ? h("span.special.dim", part) : part));
export const isSpecial = (text) => text.replace(SPECIAL, "") === "" && text !== "";

// People count rollouts from 1, addresses and answers from 0. An evaluation has the number of rollouts before it.
export function rolloutNumber(rollout, dataSet) {
  return dataSet ? Number(rollout) : Number(rollout) + 1;
}

export function rolloutName(rollout, dataSet) {
  return dataSet ? `${dataSet} after ${rollout} rollouts` : `rollout ${rolloutNumber(rollout)}`;
}

export const runName = (run, path) => (run === "." ? (path ?? "run").split("/").slice(-2).join("/") : run);

// h("td.num", {onclick, title}, ...children): an element; children are nodes, strings, numbers, lists, or null.
export function h(what, ...rest) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  const [first] = rest;
  if (first && Object.getPrototypeOf(first) === Object.prototype) {
    for (const [name, value] of Object.entries(rest.shift())) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "style") element.style.cssText = value; // the page's policy forbids the attribute
      else if (typeof value === "boolean") element.toggleAttribute(name, value);
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
  }
  const children = rest.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  element.append(...children.map((child) => (typeof child === "string" ? plain(child) : child)));
  return element;
}

// Replace the children; boxes that were opened or closed stay so.
export function renew(holder, children) {
  const title = (box) => box.querySelector("summary").textContent;
  const were = new Map([...holder.querySelectorAll("details")].map((box) => [title(box), box.open]));
  holder.replaceChildren(...h("div", children).childNodes);
  for (const box of holder.querySelectorAll("details")) box.open = were.get(title(box)) ?? box.open;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  if (Math.abs(value) < 1e-3) return value.toExponential(Math.min(digits, 3) - 1).replace(/\.?0+e/, "e");
  return Number(value.toPrecision(digits)).toString();
}

export const signed = (value, digits = 3) => (value > 0 ? `+${number(value, digits)}` : number(value, digits));

export const percent = (share) => `${number(100 * share, 3)}%`;

export function seconds(value) {
  if (typeof value !== "number") return "-";
  if (value && value < 1e-3) return `${number(1e6 * value, 3)} µs`;
  if (value && value < 1) return `${number(1e3 * value, 3)} ms`;
  if (value < 120) return `${number(value, 3)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

export function bytes(count) {
  return count < 1e6 ? `${number(count / 1e3, 3)} kB` : `${number(count / 1e6, 3)} MB`;
}

// With a space after each part, so that a long list has several lines. Line ends of strings are escaped in JSON.
export function json(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1)?.replace(/\n */g, " ");
}

// A table that scrolls sideways where it is too wide. Numbers are set to the right; a heading of "" has no column name.
export function table(head, rows, attributes = {}) {
  return h(
    "div.scroll",
    h(
      "table",
      attributes,
      h("thead", h("tr", head.map(heading))),
      h("tbody", rows.map((row) => (row instanceof Node ? row : h("tr", row.map(cell))))),
    ),
  );
}

export const heading = (name) => (name instanceof Node ? name : h(name ? "th" : "td", { scope: name ? "col" : null }, name));

export function cell(value) {
  if (typeof value === "number" || value === null) return h("td.num", number(value));
  const shown = value instanceof Node || Array.isArray(value) || typeof value !== "object";
  return h("td", {}, shown ? value : json(value)); // an object in the first place would be attributes
}

// A card: a name, its number, a line of words, and a small curve.
export function card(name, value, words = "", curve = "") {
  return h("div.tile", h("div.name", name), h("div.value", value), h("div.words", words), curve);
}

export const empty = (...words) => h("p.empty", ...words);

// Columns -> a list of objects.
export function rowsOf(columns) {
  const names = Object.keys(columns);
  return names.length ? columns[names[0]].map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]]))) : [];
}

// Rows that j and k choose and Enter opens; `rows()` are elements with a `data-address`.
export function walker(rows) {
  let at = -1;
  return {
    move(step) {
      rows()[at]?.classList.remove("chosen");
      at = Math.max(0, Math.min(rows().length - 1, at + step));
      rows()[at]?.classList.add("chosen");
      rows()[at]?.scrollIntoView({ block: "nearest" });
    },
    open: () => rows()[at]?.dataset.address && (location.hash = rows()[at].dataset.address),
  };
}
