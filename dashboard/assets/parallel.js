// Parallel coordinates: an axis for each column at hand, brushed by dragging along it or by its two number fields.
import { short } from "./choice.js";
import { colour, extent, label, show } from "./plotting.js";

const MOST = 1500; // lines of trials off the front: more are slow, and no clearer
const [TOP, BOTTOM] = [24, 14];

export class Parallel {
  constructor(box, page) {
    const [canvas, fields, note] = ["canvas", ".fields", ".note"].map((part) => box.querySelector(part));
    Object.assign(this, { page, canvas, fields, note });
    let held = null;
    canvas.onpointerdown = ({ offsetX, offsetY, pointerId }) => {
      held = { axis: this.axes[Math.floor((offsetX / canvas.clientWidth) * this.axes.length)], from: offsetY };
      canvas.setPointerCapture(pointerId);
    };
    canvas.onpointermove = ({ offsetY }) => held && page.pick([held.axis.key, [held.from, offsetY].map(held.axis.value)]);
    canvas.onpointerup = ({ offsetY }) => {
      if (held?.from === offsetY) page.pick([held.axis.key, null]); // a click lets go
      held = null;
    };
    fields.onchange = ({ target: { parentElement: { children, dataset: { key } } } }) => {
      const given = [...children].slice(1).map((input) => input.valueAsNumber);
      const ends = extent(page, key).map((end, i) => (Number.isNaN(given[i]) ? end : given[i]));
      page.pick([key, given.every(Number.isNaN) ? null : ends]);
    };
    new ResizeObserver(() => this.axes && this.update()).observe(box);
  }

  // Lays the axes out anew.
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
      [...children].slice(1).forEach((input, end) => { input.value = range ? short(range[end]) : ""; });
      return { key, x: ((i + 0.5) * width) / all.length, y, value, name: label(data.axis(key)), ends, range };
    });
    Object.assign(canvas, { width: width * devicePixelRatio, height: canvas.clientHeight * devicePixelRatio });
    const context = canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    this.drawLines(context);
    for (const { x, y, name, ends, range } of this.axes) {
      Object.assign(context, { fillStyle: colour("ink"), strokeStyle: colour("ink"), font: "11px system-ui", textAlign: "center" });
      context.strokeRect(x, TOP, 0, height);
      [[name, 10], [show(ends[1]), 21], [show(ends[0]), height + TOP + 12]].forEach(([text, at]) => context.fillText(text, x, at));
      const [low, high] = (range ?? []).map((value) => Math.min(TOP + height, Math.max(TOP, y(value))));
      Object.assign(context, { fillStyle: colour("link"), globalAlpha: 0.35 });
      context.fillRect(x - 6, high, 12, low - high);
      context.globalAlpha = 1;
    }
  }

  drawLines(context) {
    const { data, choice: { ranges }, shown, picked } = this.page;
    const lines = (points, name, strength) => points.forEach(({ trial, values }) => {
      Object.assign(context, { strokeStyle: colour(name), globalAlpha: strength(trial) });
      context.beginPath();
      let gap = true; // nothing is drawn through a missing value
      for (const { key, x, y } of this.axes) {
        const at = y(values ? values[key] ?? NaN : data.values[key][trial]);
        if (Number.isFinite(at)) context[gap ? "moveTo" : "lineTo"](x, at);
        gap = !Number.isFinite(at);
      }
      context.stroke();
    });
    const kinds = { bad: [], soft: [], link: [] };
    shown.forEach((yes, trial) => {
      const others = data.feasible[trial] === 0 ? "bad" : "soft";
      if (yes) kinds[ranges.size && picked[trial] ? "link" : others].push({ trial });
    });
    const every = Object.values(kinds).map((points) => Math.ceil(points.length / MOST));
    Object.entries(kinds).forEach(([name, points], i) => {
      lines(points.filter((_, n) => n % every[i] === 0), name, () => (name === "link" ? 0.4 : 0.15));
    });
    lines(data.front, "hue-1", (trial) => (picked[trial] ? 1 : 0.15));
    lines(data.references, "ink", () => 0.8);
    context.globalAlpha = 1;
    this.note.textContent = Math.max(...every) > 1 ? `Of the trials, ${MOST} of a kind are drawn here; of the front, all.` : "";
  }
}
