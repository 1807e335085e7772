// A study's page: linked panels, parallel coordinates and the course of the hypervolume, updated while the page is visible.
import { AXES, Choice } from "./choice.js";
import { Panel } from "./panel.js";
import { Parallel } from "./parallel.js";
import { draw } from "./plots.js";
import { StudyData } from "./study-data.js";

// Milliseconds between updates.
const EVERY = 3000;
const short = (value) => Number(value.toPrecision(6));
const byId = (id) => document.getElementById(id);

class StudyPage {
  constructor(section) {
    const controls = Object.fromEntries([...section.querySelectorAll("[name]")].map((each) => [each.name, each]));
    const data = new StudyData(section.dataset.points);
    // Drawn layouts by trial; and whether there is anything to draw yet.
    Object.assign(this, { section, data, controls, choice: new Choice(controls, data), cards: {}, drawn: !section.hidden });
    this.panels = [...section.querySelectorAll(".panel")].map((figure) => new Panel(figure, this));
    this.parallel = new Parallel(byId("parallel"), this);
    section.addEventListener("change", ({ target: { name, checked } }) => {
      if (name.startsWith("log")) this.choice.log[checked ? "add" : "delete"](this.choice.key(name.slice(3)));
      if (name) this.load();
    });
    const clear = () => this.pick(...[...this.choice.ranges.keys()].map((key) => [key, null]));
    byId("clear").addEventListener("click", clear);
    byId("png").addEventListener("click", () => savePng(section.querySelector(".panels"), data.name));
    document.addEventListener("keydown", ({ key }) => key === "Escape" && clear());
    document.addEventListener("visibilitychange", () => this.keepUpdated());
    document.addEventListener("refreshed", () => this.showRows());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.load());
  }
  // Selects trials within ranges: the key of an axis with two ends, or null to clear its range.
  pick(...ranges) {
    for (const [key, ends] of ranges) this.choice.ranges[ends ? "set" : "delete"](key, ends?.map(short).sort((a, b) => a - b));
    this.show();
  }

  // Fetches the data of the chosen axes, and draws everything.
  async load() {
    const later = ({ message }) => {
      byId("picked").textContent = message;
      return new Promise((done) => setTimeout(done, EVERY / 3));
    };
    while (!this.data.has(this.choice.keys)) await this.data.update(this.choice.keys).catch(later);
    for (const name of AXES) this.controls[`log${name}`].checked = this.choice.log.has(this.choice.key(name));
    this.show("build");
  }

  show(how = "update") {
    const { choice, data } = this;
    choice.write();
    Object.assign(this, choice.masks(), { extents: {}, near: choice.near });
    byId("picked").textContent = choice.ranges.size ? `${this.layers[2][1].length} of ${data.trials} trials selected` : "";
    byId("clear").hidden = !choice.ranges.size;
    this.showRows();
    if (!this.drawn && !data.front.length) return;
    if (!this.drawn) how = "build";
    this.drawn = true;
    for (const id of ["panels", "courses"]) byId(id).hidden = false;
    for (const each of [...this.panels, this.parallel]) each[how]();
    this.drawCourse();
  }

  // Draws the hypervolume over complete trials and over device time, up to now.
  drawCourse() {
    const { course, device_seconds: seconds } = this.data;
    const grown = [...course.hypervolume, ...course.hypervolume.slice(-1)];
    const hours = [...course.device_seconds, seconds].map((each) => each / 3600);
    for (const [id, label, x] of [["trials", "complete trials", [...course.complete, course.counted]], ["hours", "hours of device time", hours]]) {
      const series = [{ name: "hypervolume", draw: "steps", points: grown.map((value, i) => [x[i], value]) }];
      draw(byId(`course-${id}`), { x: { label }, y: { label: "hypervolume" }, series });
    }
  }

  // Marks selected trials in the ranked list, which is replaced while the study runs.
  showRows() {
    const marked = ({ trial }) => this.choice.ranges.size > 0 && this.picked?.[trial] === 1;
    for (const row of document.querySelectorAll("#ranked [data-trial]")) row.classList.toggle("picked", marked(row.dataset));
  }

  // Updates the data while the page is visible; a failure is shown.
  async keepUpdated() {
    clearTimeout(this.timer);
    if (document.visibilityState === "hidden") return;
    const news = await this.data.update(this.choice.keys).catch((error) => console.info(`not updated: ${error.message}`));
    this.section.dataset.live = news === undefined ? "no" : "yes";
    const states = ["complete", "stopped", "failed"];
    if (news && this.section.dataset.over === "1" && !states.includes(this.data.state)) location.reload(); // it was resumed
    if (news) this.cards = {};
    if (news) this.show();
    this.timer = setTimeout(() => this.keepUpdated(), EVERY);
  }
}

// Saves the canvases of a part of the page as one picture.
async function savePng(part, name) {
  const { left, top, width, height } = part.getBoundingClientRect();
  const whole = new OffscreenCanvas(width * devicePixelRatio, height * devicePixelRatio);
  const context = whole.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, width, height);
  for (const canvas of part.querySelectorAll("canvas")) {
    const box = canvas.getBoundingClientRect();
    context.drawImage(canvas, box.left - left, box.top - top, box.width, box.height);
  }
  const link = { href: URL.createObjectURL(await whole.convertToBlob()), download: `${name}.png` };
  Object.assign(document.createElement("a"), link).click();
}

export const page = new StudyPage(byId("panels"));
await page.load();
page.keepUpdated();
