// Curves over any numbers, drawn by uPlot from the data of the page.

const COLOURS = ["--case", "--golden", "--twin", "--solo"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const digits = (value) => (Number.isInteger(value) ? value : Number(value.toPrecision(4)));
const short = (value) => (value === null || value === undefined ? "–" : digits(value).toLocaleString("en"));

function plot(drawing) {
  const place = document.createElement("div");
  place.className = "plot";
  const caption = document.createElement("figcaption");
  caption.append(drawing.title);
  const figure = document.createElement("figure");
  figure.append(caption, place);
  document.getElementById("plots").append(figure);
  const axis = { stroke: () => colour("--muted"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false } };
  const width = () => Math.max(place.clientWidth, 240);
  const drawn = new uPlot(
    {
      width: width(),
      height: 260,
      series: [
        { label: drawing.across, value: (_, value) => short(value) },
        ...Object.keys(drawing.lines).map((name, number) => ({
          label: name,
          stroke: () => colour(COLOURS[number % COLOURS.length]),
          width: 2,
          dash: DASHES[number % DASHES.length],
          points: { show: drawing.places.length < 30, size: 6 },
          value: (_, value) => short(value),
        })),
      ],
      scales: { x: { time: false, distr: drawing.logarithmic ? 3 : 1, log: 2 } },
      axes: [
        { ...axis, size: 52, label: drawing.across, splits: drawing.logarithmic ? drawing.places : undefined,
          values: (_, ticks) => ticks.map(short) },
        { ...axis, size: 72, values: (_, ticks) => ticks.map(short) },
      ],
      cursor: { drag: { x: true, y: false } },
    },
    [drawing.places, ...Object.values(drawing.lines)],
    place,
  );
  addEventListener("resize", () => drawn.setSize({ width: width(), height: 260 }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.redraw());
}

JSON.parse(document.getElementById("drawings").textContent).forEach(plot);
document.documentElement.dataset.ready = "";
