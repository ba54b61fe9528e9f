// Curves of the case and of what it is compared with, drawn by uPlot.

let plots = [];
const CURVES = {  // colors of the style, and dashes for who cannot tell them apart
  case: ["--case", []], golden: ["--golden", [8, 4]], solo: ["--solo", [10, 3, 2, 3]],
};
const TOLD = { case: "case", golden: "golden (BF16)", solo: "single-rank reference" };
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const number = (value) => (value === null || value === undefined ? NaN : Number(value));
const drawn = (values) => values.map((value) => (Number.isFinite(number(value)) ? number(value) : null));
const short = (value) => (value === null || value === undefined ? "–" : Number(value).toPrecision(4).replace(/\.?0+(e|$)/, "$1"));

// `lines`: [name, values] of the curves; `band`: the lowest and highest allowed value of every step.
function curve(title, lines, band, height = 230) {
  const steps = Math.max(...lines.map(([, values]) => values.length), 1);
  const x = Array.from({ length: steps }, (_, step) => step + 1);
  const padded = (values) => x.map((_, step) => drawn(values)[step] ?? null);
  const series = lines.map(([name]) => ({
    label: TOLD[name],
    stroke: () => color(CURVES[name][0]),
    width: name === "case" ? 2.5 : 1.5,
    dash: CURVES[name][1],
    points: { show: steps < 30, size: 6 },
    value: (_, value) => short(value),
  }));
  const edges = band ? ["most allowed", "least allowed"].map((label) => ({
    label, stroke: () => color("--band-edge"), width: 1, points: { show: false }, value: (_, value) => short(value),
  })) : [];
  const axis = { stroke: () => color("--muted"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false } };
  const place = el("div", { class: "plot" });
  const figure = el("figure", {}, el("figcaption", {}, title), place);
  const draw = () => {
    const chart = new uPlot(
      {
        width: Math.max(place.clientWidth, 240),
        height,
        series: [{ label: "step" }, ...series, ...edges],
        bands: band ? [{ series: [lines.length + 1, lines.length + 2], fill: () => color("--band") }] : [],
        scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) } },
        axes: [
          { ...axis, size: 32, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] },
          { ...axis, size: 72, values: (_, ticks) => ticks.map((tick) => short(tick)) },
        ],
        cursor: { drag: { x: true, y: false } },
      },
      [x, ...lines.map(([, values]) => padded(values)), ...(band || []).map(padded)],
      place,
    );
    plots.push({ chart, place, height, draw });
  };
  return { figure, draw };
}

function curvesOf(detail) {
  const curves = detail.curves || {};
  const named = (field) => Object.keys(CURVES).filter((name) => (curves[name]?.[field] || []).length)
    .map((name) => [name, curves[name][field]]);
  const golden = curves.golden?.losses;
  const allowed = detail.allowed || [];
  const apart = (values, sign) => golden.map((loss, step) => number(loss) + sign * number(values[step]));
  const band = golden && allowed.length ? [apart(allowed, 1), apart(allowed, -1)] : null;
  const made = [];
  if (named("losses").length) made.push(curve("loss (nats)", named("losses"), band));
  if (golden && named("losses").length > 1) {
    const from = named("losses").filter(([name]) => name !== "golden")
      .map(([name, values]) => [name, values.map((loss, step) => number(loss) - number(golden[step]))]);
    const edges = allowed.length ? [allowed.map(number), allowed.map((most) => -number(most))] : null;
    made.push(curve("loss, distance from the golden (nats)", from, edges));
  }
  if (named("grad_norms").length) made.push(curve("gradient norm", named("grad_norms"), null));
  return made;
}

function forgetPlots() {
  for (const { chart } of plots) chart.destroy();
  plots = [];
}

// With the colors of now.
function redraw() {
  const again = plots.map(({ draw }) => draw);
  forgetPlots();
  again.forEach((draw) => draw());
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", () => plots.forEach(
  ({ chart, place, height }) => chart.setSize({ width: Math.max(place.clientWidth, 240), height }),
));
