// A study's trials in columns, from `/studies/NAME/points`, updated by changes.
export class StudyData {
  constructor(url) {
    Object.assign(this, { url, axes: [] });
  }

  axis = (key) => this.axes.find((axis) => axis.key === key);
  has = (keys) => keys.every((key) => key in (this.values ?? {}));

  // Fetches changes of the columns `keys`; returns whether there were any.
  async update(keys, whole = !this.has(keys)) {
    const { values } = this;
    const query = new URLSearchParams({ since: whole ? 0 : this.revision, axes: keys.join(",") });
    const answer = await fetch(`${this.url}?${query}`, { headers: { Accept: "application/json" }, redirect: "error" });
    const { told: rows, ...study } = await answer.json();
    if (!answer.ok) throw new Error(study.error);
    if (values !== this.values) return false; // another answer was faster
    if (!whole && study.study !== this.study) return this.update(keys, true); // another one of the same name
    const news = whole || study.revision !== this.revision || study.state !== this.state;
    const known = whole ? {} : this;
    const put = (column, none, values) => {
      const longer = new Float64Array(study.trials).fill(none);
      longer.set(column ?? []);
      values.forEach((value, i) => { longer[rows.trial[i]] = value ?? none; });
      return longer;
    };
    if (news) Object.assign(this, study, {
      statuses: rows.statuses,
      course: study.course ?? known.course,
      front: study.front ?? known.front,
      status: put(known.status, 0, rows.status),
      feasible: put(known.feasible, -1, rows.feasible),
      values: Object.fromEntries(keys.map((key) => [key, put(known.values?.[key], NaN, rows.values[key])])),
    });
    return news;
  }
}
