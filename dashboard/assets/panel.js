// One panel: a study's trials over two axes. The cloud is pixels; the front and the references are drawn over it.
import uPlot from "./uplot.esm.js";
import { listen } from "./brushes.js";
import { axis, colour, extent, label } from "./plotting.js";
import { Raster } from "./raster.js";

const SIDES = ["x", "y"];

export class Panel {
  // `page` has the study's `data`, the viewer's `choice`, and `picked`, a 1 for each trial that is.
  constructor(figure, page) {
    Object.assign(this, { page, number: figure.dataset.panel, box: figure.querySelector(".plot"), zoomed: {}, outline: [] });
    this.tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
    listen(this);
    new ResizeObserver(() => this.plot?.setSize(this.size)).observe(this.box);
  }

  get size() {
    return { width: this.box.clientWidth, height: this.box.clientHeight };
  }

  key(side) {
    return this.page.choice.key(side + this.number);
  }

  // Lays the panel out anew, for other axes or other scales.
  build() {
    this.plot?.destroy();
    this.zoomed = {};
    const { choice, data } = this.page;
    const log = (side) => choice.log.has(this.key(side));
    const name = (side) => label(data.axis(this.key(side)));
    const scale = (side) => ({ time: false, distr: log(side) ? 3 : 1, range: () => this.range(side) });
    this.plot = new uPlot({
      ...this.size, legend: { show: false }, cursor: { show: false }, series: [{}, { show: false }],
      axes: SIDES.map((side) => axis(side, name(side), log(side))), scales: { x: scale("x"), y: scale("y") },
      hooks: { draw: [() => this.draw()] },
    }, [[1, 2], [1, 2]], this.box);
    this.box.append(this.tip);
    this.box.setAttribute("aria-label", `${name("y")} over ${name("x")}: arrow keys move, + and - zoom, 0 shows all`);
  }

  range(side) {
    return this.zoomed[side] ?? extent(this.page, this.key(side));
  }

  // Shows new data, another part of the axes, or what else was picked.
  update() {
    this.plot.batch(() => SIDES.forEach((side) => {
      const [min, max] = this.range(side);
      this.plot.setScale(side, { min, max });
    }));
    this.plot.redraw(false);
  }

  // Where a value is on a side, in pixels of the canvas; NaN for none.
  at(value, side) {
    return this.plot.valToPos(value ?? NaN, side, true);
  }

  draw() {
    const { plot: { ctx: context, bbox }, page: { data } } = this;
    context.save();
    context.beginPath();
    context.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    context.clip();
    this.drawCloud(context, bbox);
    this.drawLines(context, bbox);
    for (const point of data.front) this.drawFront(context, point);
    for (const point of data.references) this.drawStar(context, point);
    context.restore();
  }

  drawCloud(context, { left, top, width, height }) {
    const { data: { feasible, trials, values }, picked, choice } = this.page;
    if (this.raster?.image.width !== width || this.raster.image.height !== height) this.raster = new Raster(width, height);
    const place = (side, start) => Float32Array.from({ length: trials }, (_, i) => this.at(values[this.key(side)][i], side) - start);
    this.cloud = [place("x", left), place("y", top)];
    if (choice.infeasible) this.raster.add(...this.cloud, (i) => feasible[i] === 0, colour("bad"), true);
    this.raster.add(...this.cloud, (i) => feasible[i] !== 0, colour(choice.brushed ? "line" : "hue-4"));
    if (choice.brushed) this.raster.add(...this.cloud, (i) => picked[i], colour("link"));
    this.raster.onto(context, left, top);
  }

  // Budgets, and what is brushed here.
  drawLines(context, { left, top, width, height }) {
    const { choice: { ranges, lasso }, data } = this.page;
    const [right, bottom, [x, y]] = [left + width, top + height, SIDES.map((side) => this.key(side))];
    const line = (points, name, ...dashes) => {
      context.strokeStyle = colour(name);
      context.setLineDash(dashes);
      context.beginPath();
      for (const point of points) context.lineTo(...point);
      context.stroke();
      context.setLineDash([]);
    };
    for (const [key, side] of [[x, "x"], [y, "y"]]) {
      const ends = (at) => (side === "x" ? [[at, top], [at, bottom]] : [[left, at], [right, at]]);
      line(ends(this.at(data.axis(key).budget, side)), "bad", 6, 4);
      for (const value of ranges.get(key) ?? []) line(ends(this.at(value, side)), "link", 2, 2);
    }
    const drawn = lasso?.x === x && lasso.y === y ? lasso.corners : [];
    for (const corners of [drawn, this.outline]) {
      line([...corners, ...corners.slice(0, 1)].map(([a, b]) => [this.at(a, "x"), this.at(b, "y")]), "link", 2, 2);
    }
  }

  // A dot with its 95 % intervals; hollow where it is not on the front, but tied with it.
  drawFront(context, { trial, on, values, low, high }) {
    const [x, y] = SIDES.map((side) => (ends) => this.at(ends[this.key(side)], side));
    context.globalAlpha = this.page.picked[trial] ? 1 : 0.25;
    context.strokeStyle = colour("hue-1");
    context.fillStyle = colour(on ? "hue-1" : "ground");
    context.beginPath();
    for (const [a, b] of [[x(low), y(values)], [x(high), y(values)]]) context.lineTo(a, b);
    context.moveTo(x(values), y(low));
    context.lineTo(x(values), y(high));
    context.stroke();
    context.beginPath();
    context.arc(x(values), y(values), 4 * uPlot.pxRatio, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
    context.globalAlpha = 1;
  }

  drawStar(context, { name, values }) {
    const [x, y] = SIDES.map((side) => this.at(values[this.key(side)], side));
    context.fillStyle = colour("ink");
    context.font = `${20 * uPlot.pxRatio}px system-ui`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText("★", x, y);
    context.font = `${11 * uPlot.pxRatio}px system-ui`;
    context.fillText(name, x, y - 14 * uPlot.pxRatio);
  }
}
