// What the plots share: colours of the page, ends and ticks of axes, numbers as people read them.
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const label = (axis) => `${axis.label}${axis.unit && ` [${axis.unit}]`} ${axis.direction === "max" ? "↑" : "↓"}`;

export function show(value) {
  const [size, prefix] = [[1e9, " G"], [1e6, " M"], [1e3, " k"]].find(([each]) => Math.abs(value) >= 10 * each) ?? [1, ""];
  return Number.isFinite(value) ? `${Number((value / size).toPrecision(4))}${prefix}` : "–";
}

// From where to where an axis goes: over all that is shown, its budget too where that is not far off.
export function extent({ data, choice, shown }, key) {
  const [log, { budget }, column] = [choice.log.has(key), data.axis(key), data.values[key]];
  let [low, high] = [Infinity, -Infinity];
  const take = (value) => {
    if (value < low && (value > 0 || !log)) low = value;
    if (value > high) high = value;
  };
  for (let i = 0; i < column.length; i++) if (shown[i]) take(column[i]);
  for (const point of [...data.front, ...data.references]) {
    for (const ends of [point.values, point.low, point.high]) take(ends[key] ?? NaN);
  }
  if (!(low <= high)) return log ? [1, 10] : [0, 1];
  if (budget !== null && Math.abs(budget - (low + high) / 2) < 1.5 * (high - low)) take(budget);
  const room = log ? (high / low) ** 0.05 * 1.001 : 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  return log ? [low / room, high * room] : [low - room, high + room];
}

// Some six round numbers between the ends; over decades, 1, 2 and 5 of each.
function ticks(low, high, log) {
  const first = 10 ** Math.floor(Math.log10(log ? low : (high - low) / 6));
  const step = first * [1, 2, 5, 10].find((digit) => 6 * digit * first >= high - low);
  const from = Math.ceil(low / step);
  if (!log || high / low < 30) return Array.from({ length: Math.floor(high / step) - from + 1 }, (_, i) => (from + i) * step);
  const decades = Array.from({ length: Math.log10(high / first) + 1 }, (_, i) => first * 10 ** i);
  return decades.flatMap((one) => (high / low > 3000 ? [one] : [one, 2 * one, 5 * one])).filter((at) => at >= low && at <= high);
}

// An axis of uPlot.
export const axis = (scale, text, log = false) => ({
  scale, label: text, labelSize: 20, size: scale === "x" ? 36 : 56, font: "12px system-ui", labelFont: "12px system-ui",
  stroke: () => colour("ink"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false },
  splits: (plot, at, low, high) => ticks(low, high, log), filter: (plot, found) => found, values: (plot, found) => found.map(show),
});
