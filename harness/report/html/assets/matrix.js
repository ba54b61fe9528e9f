// The heat map: the selected cases over two axes. A cell has the worst verdict in words, a mark and a number.

function heatCells() {
  const cells = new Map();
  for (const row of index.cases) {
    if (!selected(row, [state.rows, state.columns])) continue;
    const key = JSON.stringify([valueOf(row, state.rows), valueOf(row, state.columns)]);
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(row);
  }
  return cells;
}

function valuesOf(axis, cells, at) {
  const seen = new Set([...cells.keys()].map((key) => JSON.parse(key)[at]));
  return [...(index.axes[axisNumber.get(axis)]?.values || []), "unknown"].filter((value) => seen.has(value));
}

function heatCell(rows, wanted) {
  const counts = new Map();
  for (const row of rows) counts.set(row.verdict, (counts.get(row.verdict) || 0) + 1);
  const worst = rows.reduce((least, row) => (rankOf.get(row.verdict) < rankOf.get(least) ? row.verdict : least), "passed");
  const present = index.verdicts.filter((verdict) => counts.has(verdict.name));
  const words = present.map((verdict) => `${counts.get(verdict.name)} ${verdict.name.replace("_", " ")}`).join(", ");
  const place = Object.entries(wanted).map(([axis, value]) => `${axis} ${value}`).join(", ");
  const pressed = Object.entries(wanted).every(([axis, value]) => state.where.get(axis) === value);
  const number = counts.get(worst) === rows.length ? `${rows.length}` : `${counts.get(worst)}/${rows.length}`;
  return el(
    "button",
    {
      type: "button",
      class: `cell v-${worst}`,
      tabindex: "-1",
      title: `${place}: ${words}`,
      "aria-label": `${place}: ${words}`,
      "aria-pressed": String(pressed),
      onclick: () => selectCell(wanted, pressed),
    },
    el("span", { class: "mark" }, MARKS[worst]),
    el("span", { class: "number" }, number),
  );
}

function selectCell(wanted, pressed) {
  const where = new Map(state.where);
  for (const [axis, value] of Object.entries(wanted)) {
    if (pressed) where.delete(axis);
    else if (value !== "unknown") where.set(axis, value);
  }
  const place = document.activeElement?.closest("td");
  const at = place ? [place.parentNode.rowIndex, place.cellIndex] : null;
  change({ where });
  if (at) byId("heat").rows[at[0]]?.cells[at[1]]?.querySelector("button")?.focus();
}

function showHeat() {
  const table = byId("heat");
  if (!index.axes.length) return fill(byId("matrix"), el("summary", {}, "Matrix"), "The cases differ on no axis.");
  const cells = heatCells();
  const [rows, columns] = [valuesOf(state.rows, cells, 0), valuesOf(state.columns, cells, 1)];
  const head = el(
    "thead", {},
    el("tr", {}, el("th", { class: "corner" }, `${state.rows} × ${state.columns}`),
      ...columns.map((value) => el("th", { scope: "col" }, value))),
  );
  const body = el("tbody", {}, ...rows.map((row) => el(
    "tr", {}, el("th", { scope: "row" }, row),
    ...columns.map((column) => {
      const cell = cells.get(JSON.stringify([row, column]));
      return el("td", {}, cell ? heatCell(cell, { [state.rows]: row, [state.columns]: column })
        : el("span", { class: "none" }, "·"));
    }),
  )));
  fill(table, head, body);
  const first = table.querySelector('button[aria-pressed="true"]') || table.querySelector("button");
  if (first) first.tabIndex = 0;
  const names = index.axes.map((axis) => [axis.name, axis.name]);
  options(byId("rows"), names, state.rows);
  options(byId("columns"), names, state.columns);
  return table;
}

function nextCell(from, key) {
  const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  if (!(key in steps)) return null;
  const table = byId("heat");
  let [row, column] = [from.closest("tr").rowIndex, from.closest("td").cellIndex];
  for (;;) {
    row += steps[key][0];
    column += steps[key][1];
    const cell = table.rows[row]?.cells[column];
    if (!cell) return null;
    if (cell.querySelector("button")) return cell.querySelector("button");
  }
}

roving(byId("heat"), "button", nextCell);
byId("rows").addEventListener("change", (event) => change({ rows: event.target.value }));
byId("columns").addEventListener("change", (event) => change({ columns: event.target.value }));
byId("swap").addEventListener("click", () => change({ rows: state.columns, columns: state.rows }));
