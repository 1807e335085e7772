// What a viewer has chosen: the page's controls hold axes and switches, this the rest; all of it stands in the address.
export const AXES = ["x1", "y1", "x2", "y2", "x3", "y3"];

export class Choice {
  constructor(controls, data) {
    const listed = (name) => (new URLSearchParams(location.search).get(name) ?? "").split(",").filter(Boolean);
    Object.assign(this, { controls, data, log: new Set(listed("log")) });
    this.ranges = new Map(listed("pick").map((part) => part.split(":")).map(([key, ...ends]) => [key, ends.map(Number)]));
  }

  // The key of the axis that a panel shows on a side: where a place is chosen, of the figure there.
  key(name) {
    const { axes } = this.data;
    const [key, place] = [this.controls[name].value, this.controls.place.value];
    const { metric, workload, place: own } = this.data.axis(key) ?? {};
    const there = axes.find((axis) => axis.metric === metric && axis.workload === workload && axis.place === place);
    return (own && there?.key) ?? key;
  }

  // The columns that it takes to draw and to pick.
  get keys() {
    return [...new Set([...this.data.objectives, ...AXES.map((name) => this.key(name)), ...this.ranges.keys()])];
  }

  // The history keeps one entry of the page, whatever is chosen there.
  write() {
    const query = new URLSearchParams(location.search);
    for (const name of [...AXES, "place"]) query.set(name, this.controls[name].value);
    query.set("infeasible", Number(this.controls.infeasible.checked));
    query.set("log", [...this.log].join());
    query.set("pick", [...this.ranges].map(([key, ends]) => [key, ...ends.map(short)].join(":")).join());
    for (const [name, value] of [...query]) if (value === "") query.delete(name);
    history.replaceState(null, "", `?${query}`.replaceAll("%2C", ",").replaceAll("%3A", ":") + location.hash);
  }

  // [trials] 1 for each that the switches let be seen.
  shown() {
    return Uint8Array.from(this.data.feasible, (known) => known !== 0 || this.controls.infeasible.checked);
  }

  // [trials] 1 for each of the `shown` that is within all ranges.
  picked(shown) {
    const mask = shown.slice();
    for (const [key, [low, high]] of this.ranges) {
      this.data.values[key].forEach((value, i) => { mask[i] &= value >= low && value <= high; });
    }
    return mask;
  }
}

export const short = (value) => Number(value.toPrecision(6));
