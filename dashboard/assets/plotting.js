// Shared by the plots: colours of the page, ends and ticks of axes, formatted numbers.
const [page, dark, colours] = [document.documentElement, matchMedia("(prefers-color-scheme: dark)"), {}];
export const colour = (name) => (colours[name + dark.matches] ??= getComputedStyle(page).getPropertyValue(`--${name}`).trim());
export const label = ({ label, unit, direction }) => `${label}${unit && ` [${unit}]`} ${direction === "max" ? "↑" : "↓"}`;

export const sizeOf = (box) => ({ width: box.clientWidth, height: box.clientHeight });

export function show(value, digits = 4) {
  const sizes = [[1e9, " G"], [1e6, " M"], [1e3, " k"], [0, ""]];
  const [size, prefix] = sizes.find(([each]) => Math.abs(value) >= 10 * each) ?? [0, ""];
  return Number.isFinite(value) ? `${Number((value / (size || 1)).toPrecision(digits))}${prefix}` : "–";
}

// Digits that tell ticks so far apart from each other.
const digitsOf = (value, step) => Math.min(15, Math.max(4, (Math.ceil(Math.log10(Math.abs(value / step))) || 0) + 1));

// Returns a number, and the ends of its interval, with the digits that the interval leaves: `show_number` and `show_range` of
// nas/core/units.py, which are tested with the same cases.
export function showWithin(value, low, high) {
  if (!Number.isFinite(value)) return ["–", ""];
  const within = [low, high].every(Number.isFinite) && low < high;
  if (!within) return [Math.abs(value) < 1e4 ? String(Number(value.toPrecision(4))) : grouped(value, 0, value), ""];
  const first = (number) => Math.floor(Math.log10(Math.abs(number)) + 1e-9);
  const noise = low < value && value < high ? Math.min(value - low, high - value) : (high - low) / 2;
  const wide = low > 0 && (high > 10 * value || value > 10 * low);
  const last = first(noise) - (noise < 2 * 10 ** first(noise) * (1 - 1e-9) ? 1 : 0);
  const place = Math.max(last, value === 0 ? -Infinity : first(value) - 5);
  const shown = (number) => grouped(number, wide ? first(number) - 1 : place, number);
  const ends = [shown(low), shown(high)];
  return [shown(value), ends[0] === ends[1] ? "" : ends.join(" to ")];
}

function grouped(number, place, size) {
  const [digits, unit] = [Math.max(0, -place), 10 ** Math.max(0, place)];
  const format = (useGrouping, each) => new Intl.NumberFormat("en", { useGrouping, roundingMode: "halfEven",
    minimumFractionDigits: digits, maximumFractionDigits: digits }).format(each);
  const text = format(Math.abs(size) >= 1e4, Number(format(false, number / unit)) * unit);
  return Number(text.replaceAll(",", "")) === 0 ? text.replace("-", "") : text;
}

// Returns the ends of an axis: of the front, the published reference and its budget if that is near; of all other values that
// are shown too, or only those no further away than the former are from each other.
export const extent = (page, key, near = false) => (page.extents[key + near] ??= extentOf(page, key, near));

function extentOf({ data, choice, shown }, key, near) {
  const [log, { budget, direction }, column] = [choice.log.has(key), data.axis(key), data.values[key]];
  let [low, high] = [Infinity, -Infinity];
  const take = (value) => {
    if (value < low && (value > 0 || !log)) low = value;
    if (value > high) high = value;
  };
  const ends = (points) => points.flatMap(({ values, low, high }) => [values, low, high].map((each) => each[key] ?? NaN));
  const others = data.references.filter(({ name }) => name !== "published");
  ends([...data.front, ...data.references.filter((each) => !others.includes(each))]).forEach(take);
  const scaled = log ? Math.log : Number;
  const [from, to] = [scaled(low), scaled(high)];
  const kept = near && from < to ? (value) => Math.abs(scaled(value) - (from + to) / 2) <= 1.5 * (to - from) : () => true;
  for (let i = 0; i < column.length; i++) if (shown[i] && kept(column[i])) take(column[i]);
  ends(others.filter(({ values }) => kept(values[key] ?? NaN))).forEach(take);
  if (!(low <= high)) return log ? [1, 10] : [0, 1];
  if (budget !== null && Math.abs(budget - (low + high) / 2) < 1.5 * (high - low)) take(budget);
  const room = direction === "max" ? [1, 3] : [3, 1]; // more at the better end, for the name of that corner
  const one = log ? (high / low) ** 0.05 * 1.001 : 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  return log ? [low / one ** room[0], high * one ** room[1]] : [low - one * room[0], high + one * room[1]];
}

// Returns about six round numbers between the ends; over decades, 1, 2 and 5 of each.
function ticks(low, high, log) {
  const first = 10 ** Math.floor(Math.log10(log ? low : (high - low) / 6));
  const step = first * [1, 2, 5, 10].find((digit) => 6 * digit * first >= high - low);
  const from = Math.ceil(low / step);
  const many = (count, at) => Array.from({ length: count }, (_, i) => at(i));
  if (!log || high / low < 30) return many(Math.floor(high / step) - from + 1, (i) => (from + i) * step);
  const digits = high / low > 3000 ? [1] : [1, 2, 5];
  const found = many(Math.log10(high / first) + 1, (i) => digits.map((digit) => digit * first * 10 ** i)).flat();
  return found.filter((at) => at >= low && at <= high);
}

// Draws a line through the points, interrupted at unknown ones.
export function stroke(context, points) {
  context.beginPath();
  points.forEach(([x, y], i) => context[points[i - 1]?.every(Number.isFinite) ? "lineTo" : "moveTo"](x, y));
  context.stroke();
}

// Returns an axis of uPlot.
export const axis = (scale, text, log = false) => ({
  scale, label: text, labelSize: 20, size: scale === "x" ? 36 : 56, font: "12px system-ui", labelFont: "12px system-ui",
  stroke: () => colour("ink"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false },
  splits: (plot, at, low, high) => ticks(low, high, log), filter: (plot, found) => found,
  values: (plot, found) => found.map((value) => show(value, digitsOf(value, found[1] - found[0]))),
});
