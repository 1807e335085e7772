// A study's page: linked panels, parallel coordinates and the course of the hypervolume, kept up while one looks.
import { Choice } from "./choice.js";
import { Course } from "./course.js";
import { Panel } from "./panel.js";
import { Parallel } from "./parallel.js";
import { savePng } from "./picture.js";
import { StudyData } from "./study-data.js";

const EVERY = 3000; // milliseconds between questions for what is new
const byId = (id) => document.getElementById(id);

class StudyPage {
  constructor(section) {
    const controls = Object.fromEntries([...section.querySelectorAll("[name]")].map((each) => [each.name, each]));
    this.section = section;
    this.data = new StudyData(section.dataset.points);
    this.choice = new Choice(controls, this.data);
    this.panels = [...section.querySelectorAll(".panel")].map((figure) => new Panel(figure, this));
    this.parallel = new Parallel(byId("parallel"), this);
    this.courses = [
      new Course(byId("course-trials"), "complete trials", (course) => course.complete, (data) => this.complete(data)),
      new Course(byId("course-hours"), "hours of device time", (course) => course.device_seconds.map((each) => each / 3600),
        (data) => data.device_seconds / 3600),
    ];
    section.addEventListener("change", ({ target: { name, checked } }) => {
      if (name?.startsWith("log")) this.choice.setLog(name.slice(3), checked);
      if (name) this.load();
    });
    byId("clear").addEventListener("click", () => this.clear());
    byId("png").addEventListener("click", () => savePng(section.querySelectorAll("canvas"), this.data.name));
    document.addEventListener("keydown", ({ key }) => key === "Escape" && this.clear());
    document.addEventListener("visibilitychange", () => this.keepUp());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.load());
  }

  // Trials that count, as the course counts them; those after its last step added nothing.
  complete({ status, statuses, trials }) {
    const code = statuses.indexOf("complete");
    return status.subarray(0, trials).filter((each) => each === code).length;
  }

  brush(x, y, corners, free) {
    if (free) this.choice.lasso = { x, y, corners };
    else [x, y].forEach((key, side) => {
      const values = corners.map((corner) => corner[side]);
      this.choice.ranges.set(key, [Math.min(...values), Math.max(...values)]);
    });
    this.show();
  }

  // Picks what lies between the ends on an axis; null lets it go.
  pick(key, ends) {
    this.choice.ranges[ends ? "set" : "delete"](key, ends);
    this.show();
  }

  clear() {
    this.choice.ranges.clear();
    this.choice.lasso = null;
    this.show();
  }

  open(point) {
    if (point) location.assign(`${location.pathname}/trials/${point.trial}`);
  }

  // Fetches what the chosen axes need, and lays everything out for them.
  async load() {
    do await this.data.update(this.choice.keys); while (this.choice.keys.some((key) => !(key in this.data.values)));
    for (const each of [...this.panels, this.parallel]) each.build();
    this.show();
  }

  show() {
    const { choice, data } = this;
    choice.write();
    this.picked = choice.picked();
    const count = this.picked.reduce((sum, one) => sum + one, 0);
    byId("picked").textContent = choice.brushed ? `${count} of ${data.trials} trials picked` : "";
    for (const row of document.querySelectorAll("#ranked [data-trial]")) {
      row.classList.toggle("picked", choice.brushed && this.picked[row.dataset.trial] === 1);
    }
    for (const each of [...this.panels, this.parallel, ...this.courses]) each.update(data);
  }

  // Asks again and again while the page is seen; where that fails, the page says so.
  async keepUp() {
    clearTimeout(this.timer);
    if (document.visibilityState === "hidden") return;
    try {
      if (await this.data.update(this.choice.keys)) this.show();
      this.section.dataset.live = "yes";
    } catch (error) {
      this.section.dataset.live = "no";
      console.info(`not kept up: ${error.message}`);
    }
    this.timer = setTimeout(() => this.keepUp(), EVERY);
  }
}

const page = new StudyPage(byId("panels"));
await page.load();
page.keepUp();
