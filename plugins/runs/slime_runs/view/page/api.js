// Questions to the server, or to what a report has stored; and addresses of pages, which stand behind the "#".

const stored = document.getElementById("stored");
const answers = stored ? JSON.parse(stored.textContent) : null;

export const isReport = answers !== null;

function pairs(parameters) {
  return Object.entries(parameters)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .flatMap(([name, value]) => (Array.isArray(value) ? value : [value]).map((one) => [name, String(one)]));
}

export function query(parameters) {
  return new URLSearchParams(pairs(parameters)).toString();
}

export function link(page, parameters = {}) {
  return `#/${page}?${query(parameters)}`;
}

export async function ask(what, parameters = {}) {
  if (isReport) {
    const name = JSON.stringify([what, pairs(parameters)]);
    if (name in answers) return answers[name];
    throw new Error("this report has no such page; slime view shows the whole run");
  }
  return read(await fetch(`api/${what}?${query(parameters)}`));
}

// What does something: the server starts a process for it.
export async function tell(what, wish) {
  return read(await fetch(`api/${what}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(wish) }));
}

async function read(response) {
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Error(body?.error?.message ?? `the server answered ${response.status}`);
  return body;
}
