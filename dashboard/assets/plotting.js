// What the plots share: colours of the page, ends and ticks of axes, numbers as people read them.
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const label = (axis) => `${axis.label}${axis.unit && ` [${axis.unit}]`} ${axis.direction === "max" ? "↑" : "↓"}`;

export function show(value) {
  const [size, prefix] = [[1e9, " G"], [1e6, " M"], [1e4, " k"]].find(([least]) => Math.abs(value) >= least) ?? [1, ""];
  return Number.isFinite(value) ? `${Number((value / (size === 1e4 ? 1e3 : size)).toPrecision(4))}${prefix}` : "–";
}

// From where to where an axis goes: over all that is shown, its budget too where that is not far off.
export function extent({ data, choice }, key) {
  const [log, budget] = [choice.log.has(key), data.axis(key).budget];
  let [low, high] = [Infinity, -Infinity];
  const take = (value) => {
    if (value < low && (value > 0 || !log)) low = value;
    if (value > high) high = value;
  };
  for (let i = 0; i < data.trials; i++) if (choice.infeasible || data.feasible[i] !== 0) take(data.values[key][i]);
  for (const { values, low, high } of [...data.front, ...data.references]) [values, low, high].forEach((ends) => take(ends[key] ?? NaN));
  if (!(low <= high)) return log ? [1, 10] : [0, 1];
  if (budget !== null && Math.abs(budget - (low + high) / 2) < 1.5 * (high - low)) take(budget);
  const room = log ? (high / low) ** 0.05 * 1.001 : 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  return log ? [low / room, high * room] : [low - room, high + room];
}

// Some six round numbers between the ends.
export function ticks(low, high, log) {
  if (log && high / low > 30) {
    const powers = Array.from({ length: Math.ceil(Math.log10(high / low)) + 1 }, (_, i) => 10 ** (Math.floor(Math.log10(low)) + i));
    return powers.flatMap((power) => (high / low > 3000 ? [power] : [power, 2 * power, 5 * power])).filter((at) => at >= low && at <= high);
  }
  const unit = 10 ** Math.floor(Math.log10((high - low) / 6));
  const step = unit * [1, 2, 5, 10].find((digit) => 6 * digit * unit >= high - low);
  return Array.from({ length: Math.floor(high / step) - Math.ceil(low / step) + 1 }, (_, i) => (Math.ceil(low / step) + i) * step);
}

// An axis of uPlot.
export const axis = (scale, text, log = false) => ({
  scale, label: text, labelSize: 20, size: scale === "x" ? 36 : 56, font: "12px system-ui", labelFont: "12px system-ui",
  stroke: () => colour("ink"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false },
  splits: (plot, at, low, high) => ticks(low, high, log), filter: (plot, found) => found, values: (plot, found) => found.map(show),
});
