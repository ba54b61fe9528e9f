// The filters and the list of cases. Its rows are made once, and hidden where a filter leaves them out.

const COLUMNS = [
  ["verdict", "verdict", (row) => rankOf.get(row.verdict)],
  ["case", "case", (row) => row.id],
  ["ranks", "ranks", (row) => -row.ranks],
  ["seconds", "wall s", (row) => -row.seconds],
  ["note", "note", (row) => row.note || "\uffff"],
];

let order = null;  // of the rows that are in the list
const lines = index.cases.map((row) => {
  const link = el("a", { href: `#${new URLSearchParams({ case: row.id })}`, tabindex: "-1" }, row.id);
  for (const kind of ["pointerdown", "focus"]) {
    link.addEventListener(kind, () => { link.href = linkTo({ case: row.id }); });
  }
  link.addEventListener("click", (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    change({ case: row.id, view: "cases" }, { step: true });
  });
  return {
    row,
    link,
    line: el("tr", {}, el("td", {}, badge(row.verdict)), el("td", { class: "id" }, link),
      el("td", { class: "digits" }, `${row.ranks}`), el("td", { class: "digits" }, row.seconds.toFixed(1)),
      el("td", { class: "note" }, el("div", {}, ...prose(row.note || "")))),
  };
});

// The case that failed worst, above all others.
function showFirst() {
  const row = index.cases[0];
  const place = byId("first");
  place.hidden = !row || index.verdicts[rankOf.get(row.verdict)].good;
  if (place.hidden || place.childElementCount) return;
  const detail = JSON.parse(byId("detail-0").textContent);
  const open = (event) => {
    event.preventDefault();
    change({ case: row.id, view: "cases" }, { step: true });
  };
  const link = el("a", { href: `#${new URLSearchParams({ case: row.id })}`, onclick: open }, row.id);
  fill(place, el("h2", {}, badge(row.verdict), " ", el("span", { class: "id" }, link)), ...wrong(detail));
}

function showFilters() {
  const counts = new Map();
  for (const row of index.cases) counts.set(row.verdict, (counts.get(row.verdict) || 0) + 1);
  const focused = document.activeElement?.dataset.verdict;
  fill(byId("verdicts"), ...index.verdicts.filter((verdict) => counts.has(verdict.name)).map((verdict) => el(
    "button",
    {
      type: "button",
      class: `badge v-${verdict.name}`,
      title: `a case that ${verdict.phrase}`,
      "data-verdict": verdict.name,
      "aria-pressed": String(state.verdicts.has(verdict.name)),
      onclick: () => {
        const verdicts = new Set(state.verdicts);
        if (!verdicts.delete(verdict.name)) verdicts.add(verdict.name);
        change({ verdicts });
      },
    },
    `${MARKS[verdict.name]} ${verdict.name.replace("_", " ")} ${counts.get(verdict.name)}`,
  )));
  if (focused) byId("verdicts").querySelector(`[data-verdict="${focused}"]`)?.focus();
  if (byId("text").value !== state.text) byId("text").value = state.text;
  fill(byId("where"), ...[...state.where].map(([axis, value]) => el("li", {}, el(
    "button",
    {
      type: "button",
      "aria-label": `do not filter by ${axis} ${value}`,
      onclick: () => change({ where: new Map([...state.where].filter(([name]) => name !== axis)) }),
    },
    `${axis} ${value} ×`,
  ))));
  options(byId("axis"), index.axes.map((axis) => [axis.name, axis.name]), byId("axis").value);
  showValues();
  showChecks();
}

function showValues() {
  const axis = index.axes[axisNumber.get(byId("axis").value)];
  const values = (axis?.values || []).map((value) => [value, value]);
  options(byId("value"), [["", "any"], ...values], state.where.get(axis?.name) || "");
  byId("axis").title = index.meanings[axis?.name] || "";
}

function showChecks() {
  const names = (field) => [...new Set(index.cases.flatMap((row) => row[field] || []))].sort();
  const group = (label, field) => el("optgroup", { label }, ...names(field).map((name) => el(
    "option", { value: `${field}:${name}`, selected: state.check === `${field}:${name}` }, name,
  )));
  fill(byId("check"), el("option", { value: "" }, "any"), group("has findings", "found"), group("not checked", "unjudged"));
}

function sorted(entries) {
  const down = state.sort.startsWith("-");
  const key = COLUMNS.find(([name]) => name === state.sort.replace("-", ""))?.[2];
  if (!key) return entries;
  const compare = (one, other) => (key(one.row) < key(other.row) ? -1 : key(one.row) > key(other.row) ? 1 : 0);
  return [...entries].sort((one, other) => (down ? -1 : 1) * compare(one, other));
}

function showList() {
  const [head] = byId("list").tHead.children.length ? [null] : [el("tr", {}, ...COLUMNS.map(([name, text]) => el(
    "th", { scope: "col", "data-column": name },
    el("button", {
      type: "button", onclick: () => change({ sort: state.sort === name ? `-${name}` : state.sort === `-${name}` ? "" : name }),
    }, text),
  )))];
  if (head) fill(byId("list").tHead, head);
  for (const header of byId("list").tHead.rows[0].cells) {
    const name = header.dataset.column;
    header.setAttribute("aria-sort", state.sort === name ? "ascending" : state.sort === `-${name}` ? "descending" : "none");
  }
  let shown = 0;
  for (const entry of lines) {
    entry.line.hidden = !selected(entry.row);
    shown += !entry.line.hidden;
  }
  if (state.sort !== order) {
    fill(byId("list").tBodies[0], ...sorted(lines).map((entry) => entry.line));
    order = state.sort;
  }
  const links = visibleLinks();
  if (!links.some((link) => link.tabIndex === 0) && links.length) links[0].tabIndex = 0;
  const all = index.cases.length;
  byId("count").textContent = shown === all ? plural(all, "case") : `${shown} of ${plural(all, "case")}`;
}

const visibleLinks = () => [...byId("list").querySelectorAll("tbody tr:not([hidden]) a")];

roving(byId("list"), "tbody a", (from, key) => {
  const links = visibleLinks();
  const at = links.indexOf(from);
  return { ArrowDown: links[at + 1], ArrowUp: links[at - 1], Home: links[0], End: links.at(-1) }[key] || null;
});
byId("filters").addEventListener("submit", (event) => event.preventDefault());
byId("text").addEventListener("input", (event) => change({ text: event.target.value }));
byId("axis").addEventListener("change", showValues);
byId("value").addEventListener("change", (event) => {
  const where = new Map(state.where);
  if (event.target.value) where.set(byId("axis").value, event.target.value);
  else where.delete(byId("axis").value);
  change({ where });
});
byId("check").addEventListener("change", (event) => change({ check: event.target.value }));
byId("clear").addEventListener("click", () => change({ verdicts: new Set(), where: new Map(), check: "", text: "" }));
