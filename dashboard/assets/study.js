// A study's page: linked panels, parallel coordinates and the course of the hypervolume, kept up while one looks.
import { AXES, Choice } from "./choice.js";
import { course } from "./course.js";
import { Panel } from "./panel.js";
import { Parallel } from "./parallel.js";
import { savePng } from "./picture.js";
import { StudyData } from "./study-data.js";

// Milliseconds between questions for what is new.
const EVERY = 3000;
const short = (value) => Number(value.toPrecision(6));
const byId = (id) => document.getElementById(id);

class StudyPage {
  constructor(section) {
    const controls = Object.fromEntries([...section.querySelectorAll("[name]")].map((each) => [each.name, each]));
    const data = new StudyData(section.dataset.points);
    Object.assign(this, { section, data, controls, choice: new Choice(controls, data) });
    this.panels = [...section.querySelectorAll(".panel")].map((figure) => new Panel(figure, this));
    this.parallel = new Parallel(byId("parallel"), this);
    this.courses = [
      course(byId("course-trials"), "complete trials", ({ course, status, statuses }) => [
        ...course.complete, status.filter((code) => statuses[code] === "complete").length]),
      course(byId("course-hours"), "hours of device time", ({ course, device_seconds: now }) => [
        ...course.device_seconds, now].map((seconds) => seconds / 3600)),
    ];
    section.addEventListener("change", ({ target: { name, checked } }) => {
      if (name.startsWith("log")) this.choice.log[checked ? "add" : "delete"](this.choice.key(name.slice(3)));
      if (name) this.load();
    });
    const clear = () => this.pick(...[...this.choice.ranges.keys()].map((key) => [key, null]));
    byId("clear").addEventListener("click", clear);
    byId("png").addEventListener("click", () => savePng(section, data.name));
    document.addEventListener("keydown", ({ key }) => key === "Escape" && clear());
    document.addEventListener("visibilitychange", () => this.keepUp());
    document.addEventListener("refreshed", () => this.showRows());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.load());
  }
  // Picks what is within the ranges: of each axis, by its key, two ends, or null for all.
  pick(...ranges) {
    for (const [key, ends] of ranges) this.choice.ranges[ends ? "set" : "delete"](key, ends?.map(short).sort((a, b) => a - b));
    this.show();
  }

  // Fetches what the chosen axes need, and lays everything out for them.
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
    Object.assign(this, choice.masks(), { extents: {} });
    byId("picked").textContent = choice.ranges.size ? `${this.layers[2][1].length} of ${data.trials} trials picked` : "";
    this.showRows();
    for (const each of [...this.panels, this.parallel]) each[how]();
    for (const show of this.courses) show(data);
  }

  // Marks what is picked in the ranked list, which is replaced as the study goes on.
  showRows() {
    const marked = ({ trial }) => this.choice.ranges.size > 0 && this.picked?.[trial] === 1;
    for (const row of document.querySelectorAll("#ranked [data-trial]")) row.classList.toggle("picked", marked(row.dataset));
  }

  // Asks again and again while the page is seen; where that fails, the page says so.
  async keepUp() {
    clearTimeout(this.timer);
    if (document.visibilityState === "hidden") return;
    const news = await this.data.update(this.choice.keys).catch((error) => console.info(`not kept up: ${error.message}`));
    this.section.dataset.live = news === undefined ? "no" : "yes";
    if (news) this.show();
    this.timer = setTimeout(() => this.keepUp(), EVERY);
  }
}

export const page = new StudyPage(byId("panels"));
await page.load();
page.keepUp();
