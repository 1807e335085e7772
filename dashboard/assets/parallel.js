// Parallel coordinates: an axis for each column at hand, brushed by dragging along it or by its two number fields.
import { colour, extent, label, show } from "./plotting.js";

const MOST = 1500; // lines of trials off the front: more are slow, and no clearer
const [TOP, BOTTOM] = [24, 14];

export class Parallel {
  constructor(box, page) {
    Object.assign(this, { page, held: null, canvas: document.createElement("canvas") });
    const [inner, fields, note] = ["div", "div", "p"].map((tag) => document.createElement(tag));
    Object.assign(this, { fields, note });
    inner.append(this.canvas, fields);
    box.append(inner, note);
    this.canvas.setAttribute("aria-hidden", "true");
    this.canvas.addEventListener("pointerdown", ({ offsetX, offsetY, pointerId }) => {
      this.held = { key: this.keys[Math.floor((offsetX / this.canvas.clientWidth) * this.keys.length)], from: offsetY };
      this.canvas.setPointerCapture(pointerId);
    });
    this.canvas.addEventListener("pointermove", ({ offsetY }) => this.held && this.drag(this.held, offsetY));
    this.canvas.addEventListener("pointerup", ({ offsetY }) => {
      if (this.held?.from === offsetY) page.pick(this.held.key, null); // a click lets go
      this.held = null;
    });
    new ResizeObserver(() => this.keys && this.update()).observe(box);
  }

  // Lays the axes out anew.
  build() {
    const { data } = this.page;
    this.keys = data.axes.map((axis) => axis.key).filter((key) => key in data.values);
    this.fields.replaceChildren(...this.keys.map((key) => {
      const group = document.createElement("fieldset");
      const legend = Object.assign(document.createElement("legend"), { textContent: label(data.axis(key)) });
      group.append(legend, ...["from", "to"].map((which, end) => this.field(key, which, end)));
      return group;
    }));
  }

  field(key, which, end) {
    const input = Object.assign(document.createElement("input"), { type: "number", step: "any", placeholder: which });
    input.setAttribute("aria-label", which);
    input.dataset.range = `${end}${key}`;
    input.addEventListener("change", () => {
      const ends = [...(this.page.choice.ranges.get(key) ?? extent(this.page, key))];
      ends[end] = input.value === "" ? extent(this.page, key)[end] : Number(input.value);
      this.page.pick(key, ends[0] <= ends[1] ? ends : null);
    });
    return input;
  }

  drag({ key, from }, to) {
    const [log, height] = [this.page.choice.log.has(key), this.canvas.clientHeight - TOP - BOTTOM];
    const [low, high] = extent(this.page, key).map(log ? Math.log : Number);
    const values = [from, to].map((at) => low + (high - low) * Math.min(1, Math.max(0, (height + TOP - at) / height)));
    if (from !== to) this.page.pick(key, values.map(log ? Math.exp : Number).sort((a, b) => a - b));
  }

  update() {
    const { page: { data, choice }, canvas, keys } = this;
    for (const input of this.fields.querySelectorAll("input")) {
      const value = choice.ranges.get(input.dataset.range.slice(1))?.[Number(input.dataset.range[0])];
      input.value = value === undefined ? "" : Number(value.toPrecision(6));
    }
    Object.assign(canvas, { width: canvas.clientWidth * devicePixelRatio, height: canvas.clientHeight * devicePixelRatio });
    const context = canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    const [bottom, width] = [canvas.clientHeight - BOTTOM, canvas.clientWidth / keys.length];
    const axes = keys.map((key, i) => {
      const [ends, of] = [extent(this.page, key), choice.log.has(key) ? Math.log : Number];
      const [low, high] = ends.map(of);
      return { key, ends, x: (i + 0.5) * width, y: (value) => bottom - ((of(value) - low) / (high - low)) * (bottom - TOP) };
    });
    this.drawLines(context, axes);
    for (const { key, ends, x, y } of axes) {
      context.fillStyle = context.strokeStyle = colour("ink");
      context.strokeRect(x, TOP, 0, bottom - TOP);
      [context.font, context.textAlign] = ["11px system-ui", "center"];
      [[label(data.axis(key)), 10], [show(ends[1]), 21], [show(ends[0]), bottom + 12]].forEach(([text, at]) => context.fillText(text, x, at));
      const [least, most] = (choice.ranges.get(key) ?? []).map((value) => Math.min(bottom, Math.max(TOP, y(value))));
      context.fillStyle = colour("link");
      context.globalAlpha = 0.35;
      context.fillRect(x - 6, most, 12, least - most);
      context.globalAlpha = 1;
    }
  }

  drawLines(context, axes) {
    const { data, choice, picked } = this.page;
    const line = (value, name, strength) => {
      [context.strokeStyle, context.globalAlpha] = [colours[name], strength];
      context.beginPath();
      let gap = true; // nothing is drawn through a missing value
      for (const { key, x, y } of axes) {
        const at = y(value(key) ?? NaN);
        if (Number.isFinite(at)) context[gap ? "moveTo" : "lineTo"](x, at);
        gap = !Number.isFinite(at);
      }
      context.stroke();
    };
    const colours = Object.fromEntries(["bad", "soft", "link", "hue-1", "ink"].map((name) => [name, colour(name)]));
    const shown = [...data.feasible.subarray(0, data.trials).keys()].filter((i) => choice.infeasible || data.feasible[i] !== 0);
    const thin = (trials) => trials.filter((_, i) => i % Math.ceil(trials.length / MOST) === 0);
    const [others, chosen] = [shown.filter((i) => !choice.brushed || !picked[i]), shown.filter((i) => choice.brushed && picked[i])].map(thin);
    for (const i of others) line((key) => data.values[key][i], data.feasible[i] === 0 ? "bad" : "soft", 0.15);
    for (const i of chosen) line((key) => data.values[key][i], "link", 0.4);
    for (const { trial, values } of data.front) line((key) => values[key], "hue-1", picked[trial] ? 1 : 0.15);
    for (const { values } of data.references) line((key) => values[key], "ink", 0.8);
    context.globalAlpha = 1;
    const drawn = others.length + chosen.length;
    this.note.textContent = drawn < shown.length ? `Lines of ${drawn} of ${shown.length} trials, and of all on the front.` : "";
  }
}
