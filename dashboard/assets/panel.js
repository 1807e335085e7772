// One panel: a study's trials over two axes. The cloud is pixels; the front and the references are drawn over it.
import uPlot from "./uplot.esm.js";
import { gestures } from "./gestures.js";
import { axis, colour, extent, label } from "./plotting.js";
import { Raster } from "./raster.js";

const SIDES = ["x", "y"];

export class Panel {
  // `page` has the study's `data`, the viewer's `choice`, and which trials are `shown` and `picked`.
  constructor(figure, page) {
    const [box, tip] = [".plot", ".tip"].map((part) => figure.querySelector(part));
    Object.assign(this, { page, box, tip, number: figure.dataset.panel });
    new ResizeObserver(() => this.plot?.setSize(this.size)).observe(box);
  }

  get size() {
    return { width: this.box.clientWidth, height: this.box.clientHeight };
  }

  // Lays the panel out anew, for other axes or other scales.
  build() {
    this.plot?.destroy();
    const { page: { choice, data } } = this;
    this.keys = Object.fromEntries(SIDES.map((side) => [side, choice.key(side + this.number)]));
    const logs = SIDES.map((side) => choice.log.has(this.keys[side]));
    const names = SIDES.map((side) => label(data.axis(this.keys[side])));
    const [x, y] = SIDES.map((side, i) => ({ time: false, distr: logs[i] ? 3 : 1, range: () => this.range(side) }));
    this.zoomed = {};
    this.plot = new uPlot({
      ...this.size, ...gestures(this), legend: { show: false }, series: [{}, { show: false }], scales: { x, y },
      axes: SIDES.map((side, i) => axis(side, names[i], logs[i])),
    }, [[1, 2], [1, 2]], this.box);
    this.box.setAttribute("aria-label", `${names[1]} over ${names[0]}: arrow keys move, + and - zoom, 0 shows all`);
  }

  range(side) {
    return this.zoomed[side] ?? extent(this.page, this.keys[side]);
  }

  // Shows new data, another part of the axes, or what else was picked.
  update() {
    this.plot.batch(() => SIDES.forEach((side) => {
      const [min, max] = this.range(side);
      this.plot.setScale(side, { min, max });
    }));
  }

  // Where a point is, or an end of its interval, on a side, in pixels of the canvas; NaN where it is nowhere.
  at(ends, side) {
    return this.plot.valToPos(ends[this.keys[side]] ?? NaN, side, true);
  }

  draw() {
    const { plot: { ctx: context, bbox: area }, page: { data } } = this;
    context.save();
    context.beginPath();
    context.rect(area.left, area.top, area.width, area.height);
    context.clip();
    this.drawCloud(context, area);
    this.drawLines(context, area);
    for (const point of data.front) this.drawFront(context, point);
    for (const point of data.references) this.drawStar(context, point);
    context.restore();
  }

  drawCloud(context, area) {
    const { data: { feasible, values }, choice: { ranges }, shown, picked } = this.page;
    this.cloud = SIDES.map((side) => {
      const [key, log] = [this.keys[side], this.plot.scales[side].distr === 3];
      const [start, one] = (log ? [1, Math.E] : [0, 1]).map((value) => this.at({ [key]: value }, side));
      const from = start - (side === "x" ? area.left : area.top);
      return Float32Array.from(values[key], (value) => from + (one - start) * (log ? Math.log(value) : value));
    });
    const raster = new Raster(area);
    raster.add(this.cloud, (i) => shown[i] && feasible[i] === 0, colour("bad"), true);
    raster.add(this.cloud, (i) => shown[i] && feasible[i] !== 0, colour(ranges.size ? "line" : "hue-4"));
    if (ranges.size) raster.add(this.cloud, (i) => picked[i], colour("link"));
    raster.onto(context, area);
  }

  // Budgets, and the ends of what is picked.
  drawLines(context, { left, top, width, height }) {
    const { choice: { ranges }, data } = this.page;
    for (const [side, key] of Object.entries(this.keys)) {
      const line = (value, name) => {
        const at = this.at({ [key]: value }, side);
        context.strokeStyle = colour(name);
        stroke(context, ...(side === "x" ? [[at, top], [at, top + height]] : [[left, at], [left + width, at]]));
      };
      context.setLineDash([6, 4]);
      line(data.axis(key).budget, "bad");
      context.setLineDash([2, 2]);
      for (const end of ranges.get(key) ?? []) line(end, "link");
    }
    context.setLineDash([]);
  }

  // A dot with its 95 % intervals; hollow where it is not on the front, but tied with it.
  drawFront(context, { trial, on, values, low, high }) {
    const [x, y] = SIDES.map((side) => this.at(values, side));
    Object.assign(context, { globalAlpha: this.page.picked[trial] ? 1 : 0.25, strokeStyle: colour("hue-1") });
    stroke(context, [this.at(low, "x"), y], [this.at(high, "x"), y]);
    stroke(context, [x, this.at(low, "y")], [x, this.at(high, "y")]);
    context.fillStyle = colour(on ? "hue-1" : "ground");
    context.beginPath();
    context.arc(x, y, 4 * uPlot.pxRatio, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
    context.globalAlpha = 1;
  }

  drawStar(context, { name, values }) {
    Object.assign(context, { fillStyle: colour("ink"), textAlign: "center", textBaseline: "middle" });
    for (const [text, size, above] of [["★", 20, 0], [name, 11, 14]]) {
      context.font = `${size * uPlot.pxRatio}px system-ui`;
      context.fillText(text, this.at(values, "x"), this.at(values, "y") - above * uPlot.pxRatio);
    }
  }
}

function stroke(context, ...points) {
  context.beginPath();
  for (const point of points) context.lineTo(...point);
  context.stroke();
}
