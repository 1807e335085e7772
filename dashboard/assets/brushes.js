// What pointer and keys do to a panel: hovering tells, a click opens, a box or with Shift a lasso picks, Alt moves,
// Ctrl and the wheel zoom, a double click shows all.
import { label, show } from "./plotting.js";

const ARROWS = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowDown: [0, 0.1], ArrowUp: [0, -0.1] };
const ZOOMS = { "+": 0.8, "-": 1.25, 0: 0 };
const CLICK = 4; // pixels that a hand may tremble

export function listen(panel) {
  const { box, page } = panel;
  let [from, path] = [null, []];
  const place = ({ clientX, clientY }) => {
    const { left, top } = panel.plot.over.getBoundingClientRect();
    return [clientX - left, clientY - top];
  };
  const value = ([x, y]) => [panel.plot.posToVal(x, "x"), panel.plot.posToVal(y, "y")];
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    [from, path] = [place(event), [place(event)]];
    box.setPointerCapture(event.pointerId);
  });
  box.addEventListener("pointermove", (event) => {
    const [at, [left, top]] = [place(event), from ?? []];
    if (!from) return tell(panel, at);
    if (event.altKey) {
      view(panel, left - at[0], top - at[1], 1);
      from = at;
    } else if (Math.hypot(at[0] - left, at[1] - top) > CLICK) {
      path.push(at);
      panel.outline = (event.shiftKey ? path : [from, [at[0], top], at, [left, at[1]]]).map(value);
      panel.update();
    }
  });
  box.addEventListener("pointerup", (event) => {
    const { outline } = panel;
    [panel.outline, panel.tip.hidden] = [[], true];
    if (outline.length > 2) page.brush(panel.key("x"), panel.key("y"), outline, event.shiftKey);
    else if (from && path.length === 1 && !event.altKey) page.open(nearest(panel, from));
    from = null;
  });
  box.addEventListener("pointerleave", () => { panel.tip.hidden = true; });
  box.addEventListener("dblclick", () => view(panel, 0, 0, 0));
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    view(panel, 0, 0, event.deltaY < 0 ? 0.8 : 1.25, place(event));
  }, { passive: false });
  box.addEventListener("keydown", (event) => {
    const { clientWidth: width, clientHeight: height } = panel.plot.over;
    const [right, down] = ARROWS[event.key] ?? [0, 0];
    if (event.key in ARROWS || event.key in ZOOMS) {
      event.preventDefault();
      view(panel, right * width, down * height, ZOOMS[event.key] ?? 1, [width / 2, height / 2]);
    }
  });
}

// Shows the part of the axes that begins `dx`, `dy` pixels further and is `factor` as wide about a place; all for 0.
function view(panel, dx, dy, factor, [x, y] = [0, 0]) {
  const { clientWidth: width, clientHeight: height } = panel.plot.over;
  const ends = (side, ...places) => places.map((at) => panel.plot.posToVal(at, side));
  const [left, top] = [x - x * factor + dx, y - y * factor + dy];
  panel.zoomed = factor ? { x: ends("x", left, left + width * factor), y: ends("y", top + height * factor, top) } : {};
  panel.update();
}

// What lies at a place: of the front and the references, else of the cloud.
function nearest({ page: { data, choice }, plot, cloud, ...panel }, [left, top]) {
  const keys = ["x", "y"].map((side) => choice.key(side + panel.number));
  let [found, least] = [null, 10];
  const offer = (point, x, y) => {
    const far = Math.hypot(x - left, y - top);
    if (far < least) [found, least] = [point, far];
  };
  for (const point of [...data.front, ...data.references]) {
    offer(point, ...["x", "y"].map((side, i) => plot.valToPos(point.values[keys[i]] ?? NaN, side)));
  }
  const [xs, ys] = cloud;
  for (let i = 0; !found && i < data.trials; i++) {
    const near = Math.hypot(xs[i] / devicePixelRatio - left, ys[i] / devicePixelRatio - top) < least;
    if (near && (choice.infeasible || data.feasible[i] !== 0)) found = { trial: i };
  }
  return found;
}

function tell(panel, [left, top]) {
  const { page: { data, choice }, tip, plot } = panel;
  const point = nearest(panel, [left, top]);
  tip.hidden = !point;
  if (!point) return;
  const { trial, name, layout, on, p_front: chance, ties = [], low = {}, high = {} } = point;
  const value = (key) => `${label(data.axis(key))}: ${show(data.values[key][trial])}`;
  const interval = (key) => (Number.isFinite(low[key]) ? ` (${show(low[key])} to ${show(high[key])})` : "");
  tip.textContent = [
    `${name ? `${name} reference, ` : ""}trial ${trial}, ${data.statuses[data.status[trial]]}`,
    on === undefined ? "" : `${on ? "on" : "tied with"} the front, P(front) ${show(chance ?? NaN)}`,
    ties.length ? `tied with ${ties.slice(0, 8).join(", ")}${ties.length > 8 ? ", …" : ""}` : "",
    ...choice.keys.map((key) => value(key) + interval(key)), layout,
  ].filter(Boolean).join("\n");
  const before = left > plot.over.clientWidth / 2;
  tip.style.top = `${top + 20}px`;
  tip.style.left = before ? "" : `${left + 70}px`;
  tip.style.right = before ? `${plot.over.clientWidth - left + 10}px` : "";
}
