// Parallel coordinates: an axis for each loaded column, brushed by dragging along it or by its two number fields.
import { colour, extent, label, show, stroke } from "./plotting.js";

// Pixels above and below the axes; and how many trials of a colour are drawn: more are slow and add nothing visible.
const [TOP, BOTTOM, MOST] = [24, 14, 1500];

export class Parallel {
  constructor(box, page) {
    const [canvas, fields] = ["canvas", ".fields"].map((part) => box.querySelector(part));
    Object.assign(this, { page, canvas, fields });
    let held = null;
    canvas.onpointerdown = ({ offsetX, offsetY, pointerId }) => {
      held = { axis: this.axes[Math.floor((offsetX / canvas.clientWidth) * this.axes.length)], from: offsetY };
      canvas.setPointerCapture(pointerId);
    };
    canvas.onpointermove = ({ offsetY: to }) => held && page.pick([held.axis.key, [held.from, to].map(held.axis.value)]);
    canvas.onpointerup = ({ offsetY }) => {
      if (held?.from === offsetY) page.pick([held.axis.key, null]); // a click clears the range
      held = null;
    };
    fields.onchange = ({ target: { parentElement: { children, dataset: { key } } } }) => {
      const given = [...children].slice(1).map((input) => input.valueAsNumber);
      const ends = extent(page, key).map((end, i) => (Number.isNaN(given[i]) ? end : given[i]));
      page.pick([key, given.every(Number.isNaN) ? null : ends]);
    };
    new ResizeObserver(() => this.axes && this.update()).observe(box);
  }

  // Builds the axes again.
  build() {
    const { data } = this.page;
    this.fields.replaceChildren(...data.axes.filter(({ key }) => key in data.values).map((axis) => {
      const group = document.getElementById("range-fields").content.firstElementChild.cloneNode(true);
      group.dataset.key = axis.key;
      group.firstElementChild.textContent = label(axis);
      return group;
    }));
    this.update();
  }

  update() {
    const { canvas, fields, page: { choice, data } } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight - TOP - BOTTOM];
    this.axes = [...fields.children].map(({ children, dataset: { key } }, i, all) => {
      const [of, back] = choice.log.has(key) ? [Math.log, Math.exp] : [Number, Number];
      const [ends, range] = [extent(this.page, key), choice.ranges.get(key)];
      const [low, high] = ends.map(of);
      const y = (value) => TOP + ((high - of(value)) / (high - low)) * height;
      const value = (at) => back(high - (high - low) * Math.min(1, Math.max(0, (at - TOP) / height)));
      [...children].slice(1).forEach((input, end) => { input.value = range?.[end] ?? ""; });
      return { key, x: ((i + 0.5) * width) / all.length, y, value, name: label(data.axis(key)), ends, range };
    });
    Object.assign(canvas, { width: width * devicePixelRatio, height: canvas.clientHeight * devicePixelRatio });
    const context = canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    Object.assign(context, { font: "11px system-ui", textAlign: "center" });
    this.drawLines(context);
    for (const { x, y, name, ends, range } of this.axes) {
      Object.assign(context, { fillStyle: colour("ink"), strokeStyle: colour("ink"), globalAlpha: 1 });
      context.strokeRect(x, TOP, 0, height);
      for (const [text, at] of [[name, 10], [show(ends[1]), 21], [show(ends[0]), height + TOP + 12]]) context.fillText(text, x, at);
      const [low, high] = (range ?? []).map((value) => Math.min(TOP + height, Math.max(TOP, y(value))));
      Object.assign(context, { fillStyle: colour("link"), globalAlpha: 0.35 });
      context.fillRect(x - 6, high, 12, low - high);
    }
  }

  drawLines(context) {
    const { data, choice: { ranges }, picked, layers } = this.page;
    const lines = (trials, name, strength, step = 1) => {
      context.strokeStyle = colour(name);
      for (let i = 0; i < trials.length; i += step) {
        context.globalAlpha = strength(trials[i]);
        stroke(context, this.axes.map(({ key, x, y }) => [x, y(data.values[key][trials[i]])]));
      }
    };
    const names = ranges.size ? ["bad", "soft", "link"] : ["bad", "soft"];
    names.forEach((name, i) => lines(layers[i][1], name, () => (i < 2 ? 0.15 : 0.4), Math.ceil(layers[i][1].length / MOST)));
    lines(data.front.map(({ trial }) => trial), "hue-1", (trial) => (picked[trial] ? 1 : 0.15));
    lines(data.references.map(({ trial }) => trial), "ink", () => 0.8);
  }
}
