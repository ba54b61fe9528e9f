// The state of the page, which its address holds, and how elements are made: texts are texts, never markup.

const byId = (id) => document.getElementById(id);
const index = JSON.parse(byId("index").textContent);
const sections = [...document.querySelectorAll("nav a")].map((link) => link.dataset.view);
const axisNumber = new Map(index.axes.map((axis, number) => [axis.name, number]));
const rankOf = new Map(index.verdicts.map((verdict, number) => [verdict.name, number]));
const MARKS = {
  passed: "✓", known: "k", numeric: "≠", invariant: "✗", changed: "Δ", crash: "!", hang: "…",
  infra: "?", unexpected_pass: "+", not_run: "–",
};

function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") made.toggleAttribute(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function fill(parent, ...children) {
  parent.replaceChildren(...children);
  return parent;
}

// What is between backticks is code, where they come in pairs.
function prose(text) {
  const parts = `${text}`.split("`");
  return parts.length % 2 ? parts.map((part, at) => (at % 2 ? el("code", {}, part) : part)) : [text];
}

function badge(verdict) {
  return el("span", { class: `badge v-${verdict}` }, `${MARKS[verdict]} ${verdict.replace("_", " ")}`);
}

function options(select, pairs, chosen) {
  fill(select, ...pairs.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
}

const firstAxes = () => {
  const names = index.axes.map((axis) => axis.name);
  const wanted = ["recipe", "layout", ...names].filter((name) => axisNumber.has(name));
  const [rows = "", columns = rows] = [...new Set(wanted)];
  return { rows, columns };
};

// What an address shows that names no part: its case, or the part that comes first.
const homeOf = (name) => (name ? "cases" : sections[0]);

// `where`: the value that cases must have, by axis; `check`: "found:NAME" or "unjudged:NAME".
function stateOf(address) {
  const given = new URLSearchParams(address.replace(/^#/, ""));
  const known = (name, otherwise) => (axisNumber.has(given.get(name)) ? given.get(name) : otherwise);
  const first = firstAxes();
  const where = new Map();
  for (const text of given.getAll("where")) {
    const cut = text.indexOf("=");
    const number = axisNumber.get(text.slice(0, cut));
    if (number !== undefined && index.axes[number].values.includes(text.slice(cut + 1))) {
      where.set(text.slice(0, cut), text.slice(cut + 1));
    }
  }
  return {
    view: sections.includes(given.get("view")) ? given.get("view") : homeOf(given.get("case")),
    rows: known("rows", first.rows),
    columns: known("columns", first.columns),
    verdicts: new Set((given.get("verdicts") || "").split(",").filter((name) => rankOf.has(name))),
    where,
    check: given.get("check") || "",
    text: given.get("text") || "",
    sort: given.get("sort") || "",
    // A run of one case is that case, unless the address says something else.
    case: given.get("case") ?? (index.cases.length === 1 && !address.replace(/^#/, "") ? index.cases[0].id : null),
  };
}

function addressOf(state) {
  const params = new URLSearchParams();
  const first = firstAxes();
  if (state.view !== homeOf(state.case)) params.set("view", state.view);
  for (const name of ["rows", "columns"]) if (state[name] !== first[name]) params.set(name, state[name]);
  if (state.verdicts.size) params.set("verdicts", [...state.verdicts].join(","));
  for (const [axis, value] of state.where) params.append("where", `${axis}=${value}`);
  for (const name of ["check", "text", "sort", "case"]) if (state[name]) params.set(name, state[name]);
  return `#${params}`;
}

let state = stateOf(location.hash);

// Keep the change in the address. A change of what is open is a step of the history, a filter is not.
function change(changes, { step = false } = {}) {
  state = { ...state, ...changes };
  const address = addressOf(state);
  if (address !== location.hash) history[step ? "pushState" : "replaceState"](null, "", address);
  show();
}

const linkTo = (changes) => addressOf({ ...state, ...changes });

function valueOf(row, axis) {
  const at = (row.at || [])[axisNumber.get(axis)];
  return at === undefined ? "unknown" : index.axes[axisNumber.get(axis)].values[at];
}

function selected(row, without = []) {
  if (state.verdicts.size && !state.verdicts.has(row.verdict)) return false;
  for (const [axis, value] of state.where) if (!without.includes(axis) && valueOf(row, axis) !== value) return false;
  const cut = state.check.indexOf(":");
  if (state.check && !(row[state.check.slice(0, cut)] || []).includes(state.check.slice(cut + 1))) return false;
  const text = `${row.id} ${row.note || ""}`.toLowerCase();
  return state.text.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// Arrow keys move between elements; only the current one is a stop of the tab key.
function roving(parent, selector, next) {
  parent.addEventListener("keydown", (event) => {
    const from = event.target.closest(selector);
    const to = from && !event.altKey && !event.ctrlKey && !event.metaKey ? next(from, event.key) : null;
    if (!to) return;
    event.preventDefault();
    to.focus();
  });
  parent.addEventListener("focusin", (event) => {
    const current = event.target.closest(selector);
    if (!current) return;
    for (const focusable of parent.querySelectorAll(`${selector}[tabindex="0"]`)) focusable.tabIndex = -1;
    current.tabIndex = 0;
  });
}
