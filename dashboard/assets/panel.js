// One panel: a study's trials over two axes. The front and the references are drawn over the cloud of all trials.
import uPlot from "./uplot.esm.js";
import { gestures } from "./gestures.js";
import { axis, colour, extent, label, show, sizeOf, stroke } from "./plotting.js";

const SIDES = ["x", "y"];
const ARROWS = { x: { "-1": "←", 1: "→" }, y: { "-1": "↑", 1: "↓" } };

export class Panel {
  // `page` has the study's `data`, the visitor's `choice`, and the masks `shown` and `picked`.
  constructor(figure, page) {
    const [box, tip] = [".plot", ".tip"].map((part) => figure.querySelector(part));
    Object.assign(this, { page, box, tip, number: figure.dataset.panel });
    new ResizeObserver(() => this.plot?.setSize(sizeOf(box))).observe(box);
  }

  // Builds the panel again, for other axes or scales.
  build() {
    this.plot?.destroy();
    const { page: { choice, data } } = this;
    this.keys = Object.fromEntries(SIDES.map((side) => [side, choice.key(side + this.number)]));
    const logs = SIDES.map((side) => choice.log.has(this.keys[side]));
    const names = SIDES.map((side) => label(data.axis(this.keys[side])));
    const [x, y] = SIDES.map((side, i) => ({ time: false, distr: logs[i] ? 3 : 1, range: () => this.range(side) }));
    this.zoomed = {};
    this.plot = new uPlot({
      ...sizeOf(this.box), ...gestures(this), legend: { show: false }, series: [{}, { show: false }], scales: { x, y },
      axes: SIDES.map((side, i) => axis(side, names[i], logs[i])),
    }, [[1, 2], [1, 2]], this.box);
    this.box.setAttribute("aria-label", `${names[1]} over ${names[0]}: arrow keys move, + and - zoom, 0 shows the whole panel`);
  }

  range = (side) => this.zoomed[side] ?? extent(this.page, this.keys[side], this.page.near);

  // Shows new data, another part of the axes, or another selection.
  update() {
    const ends = ([min, max]) => ({ min, max });
    this.plot.batch(() => SIDES.forEach((side) => this.plot.setScale(side, ends(this.range(side)))));
  }

  // Returns the position of a point, or of an end of its interval, in canvas pixels; NaN if not known.
  at = (ends, side) => this.plot.valToPos(ends[this.keys[side]] ?? NaN, side, true);

  // Returns where a point is drawn: a reference outside of the panel at its edge.
  place({ name, values }) {
    const { left, top, width, height } = this.plot.bbox;
    const [edge, ends] = [10 * uPlot.pxRatio, [[left, left + width], [top, top + height]]];
    return SIDES.map((side, i) => {
      const [[from, to], at] = [ends[i], this.at(values, side)];
      return !name || (from <= at && at <= to) ? at : Math.min(Math.max(at, from + edge), to - edge);
    });
  }

  draw() {
    const { plot: { ctx: context, bbox: area }, page: { data } } = this;
    context.save();
    context.beginPath();
    context.rect(area.left, area.top, area.width, area.height);
    context.clip();
    this.drawStairs(context, area);
    this.drawCloud(context);
    for (const point of [...data.front, ...data.references]) this.drawPoint(context, point);
    this.drawLines(context, area);
    this.drawBest(context, area);
    this.drawCorner(context, area);
    this.drawOutside(context, area);
    context.restore();
  }

  // All trials, layer by layer: squares, and crosses for those that break a budget.
  drawCloud(context) {
    const { plot, page: { data, layers } } = this;
    this.cloud = SIDES.map((side) => Array.from(data.values[this.keys[side]], (value) => plot.valToPos(value, side, true)));
    const [[xs, ys], reach] = [this.cloud, 2 * uPlot.pxRatio];
    for (const [name, trials] of layers) {
      context.fillStyle = context.strokeStyle = colour(name);
      for (const [x, y] of trials.map((trial) => [xs[trial], ys[trial]])) {
        if (name !== "bad") context.fillRect(x - reach, y - reach, 2 * reach, 2 * reach);
        else for (const turn of [1, -1]) stroke(context, [[x - 2 * reach, y - 2 * turn * reach], [x + 2 * reach, y + 2 * turn * reach]]);
      }
    }
  }

  // Whether the right and the upper end of the axes are the better ones.
  better = () => SIDES.map((side) => this.page.data.axis(this.keys[side]).direction === "max");

  // What the front beats on these two axes, and its boundary: steps through the trials that no other one beats on both, to
  // the edges of the panel.
  drawStairs(context, { left, top, width, height }) {
    const { page: { data } } = this;
    const [right, up] = this.better();
    const [worst, lowest] = [right ? left : left + width, up ? top + height : top];
    const places = data.front.filter(({ on }) => on).map(({ values }) => SIDES.map((side) => this.at(values, side)));
    const best = places.filter((place) => place.every(Number.isFinite)).sort(([a], [b]) => (right ? b - a : a - b));
    const steps = [];
    for (const [x, y] of best) {
      const last = steps.at(-1);
      if (last && (up ? y >= last[1] : y <= last[1])) continue; // pixels count down from the top
      steps.push([x, last ? last[1] : lowest], [x, y]);
    }
    if (!steps.length) return;
    steps.push([worst, steps.at(-1)[1]]);
    context.strokeStyle = context.fillStyle = colour("hue-0");
    context.lineWidth = 2.5 * uPlot.pxRatio;
    stroke(context, steps);
    context.lineTo(worst, lowest);
    context.globalAlpha = 0.07;
    context.fill();
    [context.globalAlpha, context.lineWidth] = [1, uPlot.pxRatio];
  }

  // A ring around the trial that the headline names, and its name towards the better corner, if no reference's name is there.
  drawBest(context, { left, width }) {
    const { page: { data } } = this;
    const best = data.front.find(({ trial }) => trial === data.best);
    const [x, y] = best ? this.place(best) : [NaN, NaN];
    if (!Number.isFinite(x + y)) return;
    const [[right, up], pixel, text] = [this.better(), uPlot.pxRatio, `trial ${data.best}`];
    context.globalAlpha = 1;
    context.strokeStyle = colour("ink");
    context.lineWidth = 2 * pixel;
    context.setLineDash([]);
    context.beginPath();
    context.arc(x, y, 9 * pixel, 0, 2 * Math.PI);
    context.stroke();
    context.font = `600 ${12 * pixel}px system-ui`;
    const long = context.measureText(text).width + 16 * pixel;
    const after = right ? x + long < left + width : x - long < left;
    const named = data.references.map((each) => this.place(each)).some(([a, b]) => Math.abs(a - x) < 2 * long && Math.abs(b - y) < 24 * pixel);
    context.textAlign = after ? "left" : "right";
    write(context, text, x + (after ? 8 : -8) * pixel, y + (up !== named ? -12 : 20) * pixel);
  }

  // Names the corner in which both axes are best.
  drawCorner(context, { left, top, width, height }) {
    const [[right, up], room] = [this.better(), 8 * uPlot.pxRatio];
    context.globalAlpha = 1;
    context.fillStyle = colour("soft");
    context.font = `600 ${13 * uPlot.pxRatio}px system-ui`;
    context.textAlign = right ? "right" : "left";
    const text = right ? `better ${up ? "↗" : "↘"}` : `${up ? "↖" : "↙"} better`;
    context.fillText(text, right ? left + width - room : left + room, up ? top + 2 * room : top + height - room);
  }

  // Says how many complete trials the axes leave out, in the corner opposite to the best one.
  drawOutside(context, { left, top, width, height }) {
    const { cloud: [xs, ys], page: { data, shown, near } } = this;
    const beyond = (at, from, size) => at < from || at > from + size;
    const references = data.references.map(({ trial }) => trial);
    const out = xs.filter((x, i) => shown[i] && !references.includes(i) && data.statuses[data.status[i]] === "complete" && (beyond(x, left, width) || beyond(ys[i], top, height)));
    if (!near || !out.length || this.zoomed.x) return;
    const [[right, up], room] = [this.better(), 8 * uPlot.pxRatio];
    context.font = `${11 * uPlot.pxRatio}px system-ui`;
    context.textAlign = right ? "left" : "right";
    context.fillText(`${out.length} complete outside`, right ? left + room : left + width - room, up ? top + height - room : top + 2 * room);
  }

  // Budgets, and the ends of selected ranges.
  drawLines(context, { left, top, width, height }) {
    const { choice: { ranges }, data } = this.page;
    context.globalAlpha = 1;
    for (const [side, key] of Object.entries(this.keys)) {
      const picks = (ranges.get(key) ?? []).map((end) => [end, "link", [2, 2]]);
      for (const [value, name, dashes] of [[data.axis(key).budget, "bad", [6, 4]], ...picks]) {
        const at = this.at({ [key]: value }, side);
        context.strokeStyle = colour(name);
        context.setLineDash(dashes);
        stroke(context, side === "x" ? [[at, top], [at, top + height]] : [[left, at], [left + width, at]]);
      }
    }
  }

  // A dot for a trial of the front, hollow where it is only tied with it, or a reference's star; with 95 % intervals. A
  // reference outside of the panel is an arrow head at its edge, with its figures.
  drawPoint(context, point) {
    const { trial, on, name, values, low, high } = point;
    const [x, y] = this.place(point);
    const outside = SIDES.map((side, i) => Math.sign(Math.round(this.at(values, side) - [x, y][i])));
    const strength = name || this.page.picked[trial] ? 1 : 0.25;
    context.globalAlpha = 0.35 * strength;
    context.strokeStyle = colour(name ? "ink" : "hue-1");
    context.fillStyle = on === false ? colour("ground") : context.strokeStyle;
    stroke(context, [[this.at(low, "x"), y], [this.at(high, "x"), y]]);
    stroke(context, [[x, this.at(low, "y")], [x, this.at(high, "y")]]);
    context.globalAlpha = strength;
    context.beginPath();
    if (outside.some(Boolean)) arrow(context, x, y, Math.atan2(outside[1], outside[0]), 8 * uPlot.pxRatio);
    else if (name) star(context, x, y, 8 * uPlot.pxRatio);
    else context.arc(x, y, 4 * uPlot.pxRatio, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
    if (!name) return;
    context.font = `${11 * uPlot.pxRatio}px system-ui`;
    const figures = SIDES.map((side, i) => outside[i] && ` ${ARROWS[side][outside[i]]} ${show(values[this.keys[side]])}`).filter(Boolean);
    const text = name + figures.join("");
    const [{ left, top, width }, near] = [this.plot.bbox, context.measureText(text).width / 2]; // it stays inside
    const [align, up] = [x < left + near ? "left" : x > left + width - near ? "right" : "center", y < top + 30 * uPlot.pxRatio ? (figures.length ? -36 : -22) : 12];
    context.textAlign = align;
    write(context, text, x, y - up * uPlot.pxRatio);
  }
}

// Writes a text with an edge in the colour of the ground, which separates it from what is below.
function write(context, text, x, y) {
  Object.assign(context, { strokeStyle: colour("ground"), fillStyle: colour("ink"), lineWidth: 3 * uPlot.pxRatio, lineJoin: "round" });
  context.strokeText(text, x, y);
  context.fillText(text, x, y);
  context.lineWidth = uPlot.pxRatio;
}

// Adds the path of an arrow head around a place, which points at an angle from the x axis.
function arrow(context, x, y, angle, radius) {
  for (const turn of [0, 2.4, -2.4]) context.lineTo(x + radius * Math.cos(angle + turn), y + radius * Math.sin(angle + turn));
  context.closePath();
}

// Adds the path of a star of five points whose centre is the place that it marks.
function star(context, x, y, radius) {
  for (let i = 0; i < 10; i++) {
    const [angle, reach] = [(i * Math.PI) / 5 - Math.PI / 2, i % 2 ? 0.4 * radius : radius];
    context[i ? "lineTo" : "moveTo"](x + reach * Math.cos(angle), y + reach * Math.sin(angle));
  }
  context.closePath();
}
