// Elements and numbers. Strings become text nodes, so what a model wrote is never markup.

// What would move, hide or reorder text, spelled out: names of runs, rewards and data sets are anybody's, too.
export function plain(text) {
  return text.replace(/(?![\n\t])[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu, (c) => {
    const code = c.codePointAt(0).toString(16);
    return code.length > 2 ? `\\u${code.padStart(4, "0")}` : `\\x${code.padStart(2, "0")}`;
  });
}

// People count rollouts from 1, addresses and answers from 0. An evaluation has the number of rollouts before it.
export function rolloutNumber(rollout, dataSet) {
  return dataSet ? Number(rollout) : Number(rollout) + 1;
}

export function rolloutName(rollout, dataSet) {
  return dataSet ? `${dataSet} after ${rollout} rollouts` : `rollout ${rolloutNumber(rollout)}`;
}

// h("td.num", {onclick, title}, ...children): an element; children are nodes, strings, numbers, lists, or null.
export function h(what, ...rest) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  const [first] = rest;
  if (first && Object.getPrototypeOf(first) === Object.prototype) {
    for (const [name, value] of Object.entries(rest.shift())) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (typeof value === "boolean") element.toggleAttribute(name, value);
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
  }
  const children = rest.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  element.append(...children.map((child) => (typeof child === "string" ? plain(child) : child)));
  return element;
}

// New children in the place of the old; boxes that were opened or closed stay so.
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
  return Number(value.toPrecision(digits)).toString();
}

export function bytes(count) {
  return count < 1e6 ? `${number(count / 1e3, 3)} kB` : `${number(count / 1e6, 3)} MB`;
}

export function json(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

// A table of rows of cells; `head` are strings, numbers are set to the right.
export function table(head, rows, attributes = {}) {
  return h(
    "table",
    attributes,
    h("thead", h("tr", head.map((cell) => h("th", cell)))),
    h("tbody", rows.map((row) => (row instanceof Node ? row : h("tr", row.map(cell))))),
  );
}

export function cell(value) {
  if (typeof value === "number" || value === null) return h("td.num", number(value));
  const shown = value instanceof Node || Array.isArray(value) || typeof value !== "object";
  return h("td", {}, shown ? value : json(value)); // an object in the first place would be attributes
}

// Columns -> a list of objects.
export function rowsOf(columns) {
  const names = Object.keys(columns);
  return names.length ? columns[names[0]].map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]]))) : [];
}
