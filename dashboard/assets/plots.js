// Draws every plot of a page: elements with data-plot="JSON", as nas/serve/dashboard/plots.py describes them.
import uPlot from "./uplot.esm.js";
import { axis, colour, show, stroke } from "./plotting.js";

const HEIGHT = 240;
const SMALL = 28;
const { bars, stepped } = uPlot.paths;
const PATHS = { steps: stepped({ align: 1 }), bars: bars({ size: [1, Infinity] }), dots: () => null };

const sizeOf = (box) => ({ width: box.clientWidth || 300, height: box.matches(".sparkline") ? SMALL : HEIGHT });
const resized = new ResizeObserver((entries) => entries.forEach(({ target: box }) => box.plot?.setSize(sizeOf(box))));

// The ends of an axis: all data and what it covers, with some margin.
const range = ({ log, covers = [] }) => (plot, low, high) => {
  const known = [low, high, ...covers].filter(Number.isFinite);
  if (!known.length) return [log ? 1 : 0, 10];
  const [min, max] = [Math.min(...known), Math.max(...known)];
  if (log) return [min / 1.3, max * 1.3];
  const room = 0.04 * (max - min) || 0.5;
  return [covers.includes(min) ? min : min - room, covers.includes(max) ? max : max + room];
};

// The point of a series nearest to the cursor: series need not have the same x.
function nearest(plot, number, at) {
  const column = plot.data[number];
  for (let step = 0; number && step < column.length; step++) {
    const found = [at - step, at + step].find((i) => (column[i] ?? null) !== null);
    if (found !== undefined) return found;
  }
  return at;
}

function seriesOf({ name, draw = "line", hue = 0, hollow, right }, small) {
  const [own, dots] = [() => colour(`hue-${hue}`), draw === "dots"];
  const fill = draw === "bars" ? own : undefined;
  const points = dots ? { show: true, size: 7, stroke: own, fill: hollow ? () => colour("ground") : own } : { show: small ? false : undefined };
  return {
    label: name, scale: right ? "right" : "y", stroke: own, fill, width: draw === "bars" ? 0 : 1.5, paths: PATHS[draw], points,
    value: (plot, value) => show(value),
  };
}

const drawn = new Set();  // boxes: a plot that leaves the page has to be destroyed, or the window keeps it

// Draws a description into a box, replacing its plot.
export function draw(box, { x, y = {}, right, series, limits = [] }) {
  box.plot?.destroy();
  const small = !x;
  const none = { show: false };
  box.plot = new uPlot({
    ...sizeOf(box),
    ...(small && { padding: [2, 2, 2, 2] }),
    legend: { show: !small },
    cursor: { show: !small, y: false, drag: { x: false, y: false }, dataIdx: nearest },
    scales: {
      x: { time: false, distr: x?.log ? 3 : 1, range: range({ covers: [], ...x }) },
      y: { distr: y.log ? 3 : 1, range: range(y) },
      ...(right && { right: { range: range({}) } }),
    },
    axes: small ? [none, none] : [
      axis("x", x.label, x.log), axis("y", y.label, y.log),
      ...(right ? [{ ...axis("right", right), side: 1, grid: none }] : []),
    ],
    series: [{ label: x?.label, value: (plot, value) => show(value) }, ...series.map((each) => seriesOf(each, small))],
    hooks: { draw: [(plot) => decorate(plot, series, limits)] },
  }, uPlot.join(series.map(({ points }) => [0, 1].map((side) => points.map((point) => point[side])))), box);
  resized.observe(box);
  drawn.add(box);
}

// Limits, error bars, and the names of points.
function decorate(plot, series, limits) {
  const { ctx: context, bbox: { left, top, width, height } } = plot;
  const [pixel, taken] = [uPlot.pxRatio, []];
  const at = (value, scale) => plot.valToPos(value, scale, true);
  const write = (text, from, down) => {  // below what is already written there
    const end = from + context.measureText(text).width;
    while (taken.some(([start, last, level]) => start < end && from < last && Math.abs(level - down) < 11 * pixel)) down += 11 * pixel;
    taken.push([from, end, down]);
    context.fillText(text, from, down);
  };
  context.save();
  context.textAlign = "left";
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.font = `${11 * pixel}px system-ui`;
  context.setLineDash([6 * pixel, 4 * pixel]);
  for (const { axis: side, name, value } of limits) {
    const [place, late] = [at(value, side), at(value, side) > left + width / 2];
    context.strokeStyle = context.fillStyle = colour("bad");
    stroke(context, side === "x" ? [[place, top], [place, top + height]] : [[left, place], [left + width, place]]);
    const below = place < top + 16 * pixel ? 12 : -4;
    const [across, down] = side === "x" ? [place + (late ? -4 : 4) * pixel, top + 11 * pixel] : [left + 4 * pixel, place + below * pixel];
    const inside = side === "x" ? place >= left && place <= left + width : place >= top && place <= top + height;
    if (inside) write(name, side === "x" && late ? across - context.measureText(name).width : across, down);
  }
  context.setLineDash([]);
  for (const { points, hue = 0, low = [], high = [], texts = [] } of series) if (low.length || texts.length) points.forEach(([x, y], i) => {
    const [across, up] = [at(x, "x"), at(y, "y")];
    context.strokeStyle = colour(`hue-${hue}`);
    context.fillStyle = colour("ink");
    if (Number.isFinite(low[i]) && Number.isFinite(high[i])) stroke(context, [[across, at(low[i], "y")], [across, at(high[i], "y")]]);
    if (!texts[i]) return;
    const long = context.measureText(texts[i]).width;
    const before = across + long + 8 * pixel > left + width;
    const from = before ? across - long - 8 * pixel : across + 8 * pixel;
    write(texts[i], from, up + 4 * pixel);
  });
  context.restore();
}

function drawAll(again = false) {
  for (const box of drawn) if (!box.isConnected) {
    box.plot.destroy();
    resized.unobserve(box);
    drawn.delete(box);
  }
  for (const box of document.querySelectorAll("[data-plot]")) if (again || !box.plot) draw(box, JSON.parse(box.dataset.plot));
}

drawAll();
document.addEventListener("refreshed", () => drawAll());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(true));
