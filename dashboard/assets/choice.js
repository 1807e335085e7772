// The visitor's choices: axes and switches are in the page's controls, the rest is here; all of them are in the URL.
export const AXES = ["x1", "y1", "x2", "y2", "x3", "y3"];
const SWITCHES = ["infeasible", "incomplete", "far"];

export class Choice {
  constructor(controls, data) {
    const listed = (name) => (new URLSearchParams(location.search).get(name) ?? "").split(",").filter(Boolean);
    const ranges = listed("pick").map((part) => part.split(":")).map(([key, ...ends]) => [key, ends.map(Number)]);
    Object.assign(this, { controls, data, log: new Set(listed("log")), ranges: new Map(ranges) });
  }

  // The key of the axis on a side of a panel: of the same figure on the chosen device and runtime, if there is one.
  key(name) {
    const [key, place] = [this.controls[name].value, this.controls.place.value];
    const { metric, workload, place: own } = this.data.axis(key) ?? {};
    const alike = this.data.axes.filter((axis) => own && axis.metric === metric && axis.workload === workload);
    return alike.find((axis) => axis.place === place)?.key ?? key;
  }

  // Keys of the columns that are drawn or filtered.
  get keys() {
    const objectives = this.data.axes.filter((axis) => axis.objective).map((axis) => axis.key);
    return [...new Set([...objectives, ...AXES.map((name) => this.key(name)), ...this.ranges.keys()])];
  }

  // Whether the axes leave out what is far from the front: not where the visitor asked for more trials.
  get near() {
    return SWITCHES.every((name) => !this.controls[name].checked);
  }

  // Replaces the URL, without a new entry in the history.
  write() {
    const query = new URLSearchParams(location.search);
    for (const name of [...AXES, "place"]) query.set(name, this.controls[name].value);
    for (const name of SWITCHES) query.set(name, Number(this.controls[name].checked));
    query.set("log", [...this.log].join());
    query.set("pick", [...this.ranges].map(([key, ends]) => [key, ...ends].join(":")).join());
    for (const [name, value] of [...query]) if (value === "") query.delete(name);
    history.replaceState(null, "", `?${query}`.replaceAll("%2C", ",").replaceAll("%3A", ":") + location.hash);
  }

  // For each trial 1 in `shown` if the switches show it, and 1 in `picked` if it is also within all ranges; and the layers
  // of shown trials: those that break a budget, all others, and on top the picked or complete ones.
  masks() {
    const { data: { feasible, status, statuses, values }, controls: { infeasible, incomplete } } = this;
    const [ranges, complete, { length }] = [[...this.ranges], statuses.indexOf("complete"), feasible];
    const [shown, picked, bad, others, marked] = [new Uint8Array(length), new Uint8Array(length), [], [], []];
    const within = (i) => ranges.every(([key, [low, high]]) => values[key][i] >= low && values[key][i] <= high);
    for (let i = 0; i < length; i++) {
      if (feasible[i] === 0 ? !infeasible.checked : status[i] !== complete && !incomplete.checked) continue;
      [shown[i], picked[i]] = [1, within(i)];
      (feasible[i] === 0 ? bad : others).push(i);
      if (ranges.length ? picked[i] : status[i] === complete) marked.push(i);
    }
    const [below, top] = ranges.length ? ["line", "link"] : ["hue-6", "hue-4"];
    return { shown, picked, layers: [["bad", bad], [below, others], [top, marked]] };
  }
}
