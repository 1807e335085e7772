// What a viewer has chosen: the page's controls hold axes and switches, this the rest; all of it stands in the address.
export const AXES = ["x1", "y1", "x2", "y2", "x3", "y3"];

export class Choice {
  constructor(controls, data) {
    const listed = (name) => (new URLSearchParams(location.search).get(name) ?? "").split(",").filter(Boolean);
    const ranges = listed("pick").map((part) => part.split(":")).map(([key, ...ends]) => [key, ends.map(Number)]);
    Object.assign(this, { controls, data, log: new Set(listed("log")), ranges: new Map(ranges) });
  }

  // The key of the axis that a panel shows on a side: where a place is chosen, of the figure there.
  key(name) {
    const [key, place] = [this.controls[name].value, this.controls.place.value];
    const { metric, workload, place: own } = this.data.axis(key) ?? {};
    const alike = this.data.axes.filter((axis) => own && axis.metric === metric && axis.workload === workload);
    return alike.find((axis) => axis.place === place)?.key ?? key;
  }

  // The columns that it takes to draw and to pick.
  get keys() {
    const objectives = this.data.axes.filter((axis) => axis.objective).map((axis) => axis.key);
    return [...new Set([...objectives, ...AXES.map((name) => this.key(name)), ...this.ranges.keys()])];
  }

  // The history keeps one entry of the page, whatever is chosen there.
  write() {
    const query = new URLSearchParams(location.search);
    for (const name of [...AXES, "place"]) query.set(name, this.controls[name].value);
    query.set("infeasible", Number(this.controls.infeasible.checked));
    query.set("log", [...this.log].join());
    query.set("pick", [...this.ranges].map(([key, ends]) => [key, ...ends].join(":")).join());
    for (const [name, value] of [...query]) if (value === "") query.delete(name);
    history.replaceState(null, "", `?${query}`.replaceAll("%2C", ",").replaceAll("%3A", ":") + location.hash);
  }

  // For each trial a 1 where the switches let it be seen, and one where it is also within all ranges; and the layers in
  // which those that are seen are drawn: what breaks a budget, all others, and on top what is picked, or is complete.
  masks() {
    const { data: { feasible, status, statuses, values }, controls: { infeasible: { checked } } } = this;
    const [ranges, complete, { length }] = [[...this.ranges], statuses.indexOf("complete"), feasible];
    const [shown, picked, bad, others, marked] = [new Uint8Array(length), new Uint8Array(length), [], [], []];
    const within = (i) => ranges.every(([key, [low, high]]) => values[key][i] >= low && values[key][i] <= high);
    for (let i = 0; i < length; i++) {
      if (!checked && feasible[i] === 0) continue;
      [shown[i], picked[i]] = [1, within(i)];
      (feasible[i] === 0 ? bad : others).push(i);
      if (ranges.length ? picked[i] : status[i] === complete) marked.push(i);
    }
    const [below, top] = ranges.length ? ["line", "link"] : ["hue-6", "hue-4"];
    return { shown, picked, layers: [["bad", bad], [below, others], [top, marked]] };
  }
}
