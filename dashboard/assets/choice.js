// What a viewer has chosen: the page's controls hold axes and switches, this the rest; all of it stands in the address.
export const AXES = ["x1", "y1", "x2", "y2", "x3", "y3"];

export class Choice {
  constructor(controls, data) {
    const listed = (name) => (new URLSearchParams(location.search).get(name) ?? "").split(",").filter(Boolean);
    Object.assign(this, { controls, data, log: new Set(listed("log")) });
    const picks = listed("pick").map((part) => part.split(":"));
    this.ranges = new Map(picks.map(([key, ...ends]) => [key, ends.map(Number)]));
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

  // For each trial a 1 where the switches let it be seen, and one where it is also within all ranges.
  masks() {
    const { feasible, values } = this.data;
    const shown = new Uint8Array(feasible.map((known) => known !== 0 || this.controls.infeasible.checked));
    const picked = shown.slice();
    this.ranges.forEach(([low, high], key) => values[key].forEach((value, i) => { picked[i] &= value >= low && value <= high; }));
    return { shown, picked };
  }
}
