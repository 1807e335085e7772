// A study's trials in columns, as `/studies/NAME/points` tells them, kept up by what changed since.
export class StudyData {
  constructor(url) {
    this.url = url;
    this.empty();
  }

  empty() {
    Object.assign(this, { study: null, revision: 0, trials: 0, values: {}, front: [], references: [], axes: [], course: null });
    this.status = this.feasible = new Int8Array(0);
  }

  axis(key) {
    return this.axes.find((axis) => axis.key === key);
  }

  get objectives() {
    return this.axes.filter((axis) => axis.objective).map((axis) => axis.key);
  }

  // Asks for what is new in the columns `keys`; whether anything is.
  async update(keys) {
    const whole = keys.some((key) => !(key in this.values));
    const query = new URLSearchParams({ since: whole ? 0 : this.revision, axes: keys.join(",") });
    const answer = await fetch(`${this.url}?${query}`, { headers: { Accept: "application/json" }, redirect: "error" });
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error);
    if (!whole && told.study !== this.study) { // another one, made under the same name
      this.empty();
      return this.update(keys);
    }
    const news = whole || told.revision !== this.revision || told.state !== this.state;
    if (whole) this.empty();
    this.take(told, told.told);
    return news;
  }

  take(whole, { trial, status, statuses, feasible, values }) {
    const { told, course, ...rest } = whole;
    Object.assign(this, rest, { statuses, course: course ?? this.course });
    this.status = put(this.status, this.trials, 0, trial, status);
    this.feasible = put(this.feasible, this.trials, -1, trial, feasible);
    for (const [key, column] of Object.entries(values)) {
      this.values[key] = put(this.values[key] ?? new Float64Array(0), this.trials, NaN, trial, column);
    }
  }
}

// The array, longer where it has to be, with the values at their places; `none` where nothing is known.
function put(array, length, none, places, values) {
  const room = array.length >= length ? array : new array.constructor(Math.max(length, 2 * array.length)).fill(none);
  if (room !== array) room.set(array);
  for (let i = 0; i < places.length; i++) room[places[i]] = values[i] ?? none;
  return room;
}
