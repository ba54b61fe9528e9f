// Modules over steps as tables whose cells have colors, and the collectives of a step in time.

const MOST_ROWS = 12;
const MOST_STEPS = 12;  // with numbers in the cells; more steps have colors, and numbers where they are pointed at
const digits = (value, precision = 2) => {
  const read = number(value);
  return value === null || value === undefined ? "–" : Number.isFinite(read) ? `${Number(read.toPrecision(precision))}` : "NaN";
};

// `rows`: { heads, cells: [{ text, name }] }; `steps`: the columns, in words.
function heatTable(caption, heads, steps, rows) {
  const compact = steps.length > MOST_STEPS;
  const cell = ({ text, name }, at) => el("td", { class: `digits ${name}`, title: compact ? `${steps[at]}: ${text}` : "" }, text);
  return el("div", { class: "scroll" }, el(
    "table", { class: `plain casts${compact ? " compact" : ""}` }, el("caption", {}, ...prose(caption)),
    el("thead", {}, el("tr", {}, ...[...heads, ...steps].map((name, at) => el("th", { scope: "col", title: name, class: at < heads.length ? "left" : "" },
      compact && at >= heads.length ? `${at - heads.length + 1}` : name)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {},
      el("th", { scope: "row" }, row.heads[0]), ...row.heads.slice(1).map((head) => el("td", {}, head)), ...row.cells.map(cell)))),
  ));
}

// A table of which a choice says what it shows: `draw(kind)` returns { caption, heads, steps, rows }.
function chosenHeat(kinds, kind, draw) {
  const place = el("div", {});
  let [shown, all] = [kind, false];
  const more = el("button", { type: "button", onclick: () => { all = true; show(); } });
  const show = () => {
    const { caption, heads, steps, rows } = draw(shown);
    fill(place, heatTable(caption, heads, steps, rows.slice(0, all ? rows.length : MOST_ROWS)));
    more.textContent = `show all ${rows.length}`;
    more.hidden = all || rows.length <= MOST_ROWS;
  };
  const choose = el("select", { onchange: (event) => { shown = event.target.value; show(); } },
    ...Object.entries(kinds).map(([value, text]) => el("option", { value, selected: value === shown }, text)));
  show();
  return el("div", {}, el("p", { class: "fields" }, el("label", {}, "show ", choose)), place, more);
}

const ERRORS = { gradients: "gradients, from the single-rank reference", replay: "modules, from their per-module replay" };

function errorCell(value, tolerance) {
  const read = number(value);
  if (value === null) return { text: "–", name: "" };
  const over = tolerance !== undefined && !(read <= number(tolerance));
  const level = read === 0 ? 0 : Math.min(Math.max(Math.ceil((Math.log10(read) + 15) / 3), 1), 5);
  return { text: digits(value), name: over || !Number.isFinite(read) ? "over" : `tint-${level}` };
}

// As data flows: embeddings, numbered layers, what is behind them.
const place = (name) => (/embed|wte/.test(name) ? 0 : /\.\d+\./.test(name) ? 1 : 2);
const byPlace = ([one], [other]) => place(one) - place(other) || one.localeCompare(other, "en", { numeric: true });

function errors(detail) {
  const there = Object.fromEntries(Object.entries(ERRORS).filter(([name]) => detail.errors?.[name]));
  const [first] = Object.keys(there);
  if (!first) return null;
  const tables = (name) => {
    const { steps, rows, tolerance = [] } = detail.errors[name];
    const made = Object.entries(rows).sort(byPlace).map(([module, values]) => ({
      heads: [module], cells: values.map((value, step) => errorCell(value, tolerance[step])),
    }));
    if (tolerance.length) made.unshift({ heads: ["tolerance"], cells: tolerance.slice(0, steps.length).map((value) => ({ text: digits(value), name: "" })) });
    const over = made.flatMap((row) => row.cells).filter((cell) => cell.name.startsWith("over")).length;
    const equal = Object.values(rows).flat().every((value) => value === 0);
    const caption = `relative error${equal ? ": all are bitwise equal" : over ? `: ${plural(over, "value")} above the tolerance` : ""}`;
    return { caption, heads: ["module"], steps: steps.map((step) => `step ${step}`), rows: made };
  };
  return chosenHeat(there, first, tables);
}

const SCALES = { scale: "scale", amax: "largest magnitude" };
const LOST = { flushed: "flushed to zero", saturated: "saturated" };

function castCell(row, kind, step, [low, high] = []) {
  if (kind === "amax" || kind === "scale") {
    const [least, most] = kind === "amax" ? [row.amax[step], row.amax[step]] : [row.low[step], (row.high || row.low)[step]];
    const share = high > low ? (Math.log2(number(most)) - low) / (high - low) : 0;
    const text = least === most ? short(least) : `${short(least)} to ${short(most)}`;
    return { text, name: Number.isFinite(share) ? `tint-${Math.round(5 * share)}` : "" };
  }
  const value = (row[kind] || [])[step] ?? (row.amax[step] === null ? null : 0);
  const share = number(value);
  const level = value === null ? "none" : !Number.isFinite(share) || share > 0.1 ? 4 : share > 0.01 ? 3 : share > 1e-3 ? 2 : share > 0 ? 1 : 0;
  return { text: value === null ? "–" : !Number.isFinite(share) ? "NaN" : share === 0 ? "0" : `${short(share * 100)} %`, name: `heat-${level}` };
}

const stepsOf = (rows) => rows[0].amax.map((_, step) => `step ${step + 1}`);
const castRows = (rows, kind, range) => rows.map((row) => (
  { heads: [row.fqn, row.role], cells: row.amax.map((_, step) => castCell(row, kind, step, range)) }));

function scales(rows) {
  if (!rows.length) return null;
  const inOrder = [...rows].sort((one, other) => one.fqn.localeCompare(other.fqn, "en", { numeric: true }));
  return chosenHeat(SCALES, "scale", (kind) => {
    const logs = rows.flatMap((row) => row[kind === "amax" ? "amax" : "low"])
      .map((value) => Math.log2(number(value))).filter(Number.isFinite);
    const range = [Math.min(...logs), Math.max(...logs)];
    const caption = `${SCALES[kind]}: darker is larger, in powers of two`;
    return { caption, heads: ["linear", "operand"], steps: stepsOf(rows), rows: castRows(inOrder, kind, range) };
  });
}

function underflow(rows) {
  const worst = (row, kind) => Math.max(...(row[kind] || [0]).map((value) => (
    value === null ? 0 : Number.isFinite(number(value)) ? number(value) : Infinity)));
  const most = (kind) => Math.max(0, ...rows.map((row) => worst(row, kind)));
  const lost = Object.fromEntries(Object.entries(LOST).filter(([kind]) => most(kind)));
  const [first] = Object.keys(lost).sort((one, other) => most(other) - most(one));
  if (!first) return null;
  return chosenHeat(lost, first, (kind) => ({
    caption: `${LOST[kind]}, the worst first`, heads: ["linear", "operand"], steps: stepsOf(rows),
    rows: castRows(rows.filter((row) => worst(row, kind)).sort((one, other) => worst(other, kind) - worst(one, kind)), kind),
  }));
}

// Every collective of a rank is a mark where it starts; color and height tell their kinds apart.
const SHAPES = { all_gather: [0, 20], reduce_scatter: [0, 10], all_reduce: [10, 10] };

function drawing(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function timeline(record) {
  if (!record) return null;
  const parts = record.kinds.map((kind) => kind.split(" along "));
  const names = parts.map(([kind]) => (Object.keys(SHAPES).find((name) => kind.startsWith(name)) || "other"));
  const end = Math.max(...record.calls.map(([, at]) => at), 0.001);
  const mark = ([kind, at, size]) => {
    const [y, height] = SHAPES[names[kind]] || [5, 10];
    const box = drawing("rect", { x: (996 * at) / end, y, width: 3, height, class: `kind-${names[kind]}` });
    box.append(drawing("title", {}, `${at} ms: ${record.kinds[kind]}, ${bytes(size)}`));
    return box;
  };
  const lane = (axis) => {
    const calls = record.calls.filter(([kind]) => parts[kind][1] === axis);
    const words = `${plural(calls.length, "collective")} along ${axis}`;
    return el("div", { class: "lane" }, el("span", {}, axis),
      drawing("svg", { viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": words }, ...calls.map(mark)));
  };
  const present = [...new Set(names)];
  return el("div", { class: "timeline" },
    el("p", {}, `Rank ${record.rank}, step ${record.step}, ${plural(record.calls.length, "collective")}, each where it starts: `,
      ...present.flatMap((name) => [el("span", { class: `key kind-${name}` }), ` ${name} `])),
    ...[...new Set(parts.map(([, axis]) => axis))].sort().map(lane),
    el("div", { class: "lane" }, el("span", {}, "ms"), el("div", { class: "ends" }, el("span", {}, "0"), el("span", {}, digits(end, 3)))),
    el("details", {}, el("summary", {}, "every collective in order"), plain(["ms", "collective", "bytes"], record.calls.map(
      ([kind, at, size]) => ({ cells: [`${at}`, record.kinds[kind], bytes(size)] }),
    ))));
}
