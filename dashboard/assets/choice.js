// What a viewer has chosen: the page's controls hold axes and switches, this the rest; all of it stands in the address.
const AXES = ["x1", "y1", "x2", "y2", "x3", "y3"];

export class Choice {
  constructor(controls, data) {
    const listed = (name) => (new URLSearchParams(location.search).get(name) ?? "").split(",").filter(Boolean);
    Object.assign(this, { controls, data, log: new Set(listed("log")) });
    this.ranges = new Map(listed("pick").map((part) => part.split(":")).map(([key, ...ends]) => [key, ends.map(Number)]));
    const [x, y, ...numbers] = listed("lasso").join("").split(":");
    const corners = numbers.flatMap((at, i) => (i % 2 ? [[Number(numbers[i - 1]), Number(at)]] : []));
    this.lasso = corners.length > 2 ? { x, y, corners } : null;
  }

  get infeasible() {
    return this.controls.infeasible.checked;
  }

  get brushed() {
    return this.ranges.size > 0 || this.lasso !== null;
  }

  // The key of the axis that a panel shows on a side: where a place is chosen, its figure there.
  key(name) {
    const [key, place] = [this.controls[name].value, this.controls.place.value];
    const { metric, workload, place: own } = this.data.axis(key) ?? {};
    const there = (axis) => axis.metric === metric && axis.workload === workload && axis.place === place;
    return (own && place && this.data.axes.find(there)?.key) || key;
  }

  // The columns that it takes to draw and to pick.
  get keys() {
    const lassoed = this.lasso ? [this.lasso.x, this.lasso.y] : [];
    return [...new Set([...this.data.objectives, ...AXES.map((name) => this.key(name)), ...this.ranges.keys(), ...lassoed])];
  }

  setLog(name, yes) {
    this.log[yes ? "add" : "delete"](this.key(name));
  }

  // The history keeps one entry of the page, whatever is chosen there.
  write() {
    for (const name of AXES) this.controls[`log${name}`].checked = this.log.has(this.key(name));
    const query = new URLSearchParams(location.search);
    for (const name of [...AXES, "place"]) query.set(name, this.controls[name].value);
    query.set("infeasible", this.infeasible ? "1" : "0");
    query.set("log", [...this.log].join());
    query.set("pick", [...this.ranges].map(([key, ends]) => [key, ...ends.map(short)].join(":")).join());
    query.set("lasso", this.lasso ? [this.lasso.x, this.lasso.y, ...this.lasso.corners.flat().map(short)].join(":") : "");
    for (const [name, value] of [...query]) if (value === "") query.delete(name);
    history.replaceState(null, "", `?${query}`.replaceAll("%2C", ",").replaceAll("%3A", ":") + location.hash);
  }

  // [trials] 1 where a trial is shown and within all that is brushed.
  picked() {
    const { ranges, lasso, data: { feasible, trials, values } } = this;
    return Uint8Array.from({ length: trials }, (_, i) => (this.infeasible || feasible[i] !== 0)
      && [...ranges].every(([key, [low, high]]) => values[key][i] >= low && values[key][i] <= high)
      && (!lasso || inside(lasso.corners, values[lasso.x][i], values[lasso.y][i])));
  }
}

const short = (value) => Number(value.toPrecision(6));

// Whether a ray from the point crosses the outline an odd number of times.
function inside(corners, x, y) {
  return corners.filter(([ax, ay], i) => {
    const [bx, by] = corners.at(i - 1);
    return ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax;
  }).length % 2 === 1;
}
