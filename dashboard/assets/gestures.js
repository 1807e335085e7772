// Mouse and keys in a panel: hovering shows details, a click opens a trial, dragging selects, Ctrl and the wheel zoom, a
// double click shows the whole panel; with the keyboard + and - zoom, arrows move, 0 shows the whole panel.
import { label, show } from "./plotting.js";

// Zoom factor, and the shares of the panel to move right and down.
const KEYS = { ArrowLeft: [1, -0.1, 0], ArrowRight: [1, 0.1, 0], ArrowDown: [1, 0, 0.1], ArrowUp: [1, 0, -0.1],
  "+": [0.8, 0, 0], "-": [1.25, 0, 0], 0: [0, 0, 0] };
const REACH = 8; // pixels

// Returns the options of uPlot for them.
export function gestures(panel) {
  const init = ({ over }) => {
    over.addEventListener("click", ({ offsetX, offsetY }) => {
      const point = nearest(panel, offsetX, offsetY);
      if (point) location.assign(`${location.pathname}/trials/${point.trial}`);
    });
    over.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      view(panel, event.deltaY < 0 ? 0.8 : 1.25, [event.offsetX, event.offsetY]);
    }, { passive: false });
  };
  const setSelect = (plot) => {
    const { left, top, width, height } = plot.select;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    const range = (side, ...places) => [panel.keys[side], places.map((at) => plot.posToVal(at, side))];
    panel.page.pick(range("x", left, left + width), range("y", top + height, top));
  };
  panel.box.onkeydown = (event) => {
    if (!(event.key in KEYS)) return;
    event.preventDefault();
    const { clientWidth: width, clientHeight: height } = panel.plot.over;
    const [factor, right, down] = KEYS[event.key];
    view(panel, factor, [width * (0.5 + right), height * (0.5 + down)], [width / 2, height / 2]);
  };
  const cursor = { x: false, y: false, points: { show: false }, drag: { x: true, y: true, setScale: false, dist: REACH / 2 },
    bind: { dblclick: () => () => view(panel, 0) } };
  const setCursor = (plot) => showTip(panel, plot.cursor);
  return { cursor, hooks: { init: [init], draw: [() => panel.draw()], setSelect: [setSelect], setCursor: [setCursor] } };
}

// Shows a part of the axes `factor` times as wide, moving the point `from` to `to`; everything for 0.
function view(panel, factor, from = [0, 0], to = from) {
  const { over, posToVal } = panel.plot;
  const ends = (side, i, ...edges) => edges.map((edge) => posToVal(from[i] + (edge - to[i]) * factor, side));
  panel.zoomed = factor ? { x: ends("x", 0, 0, over.clientWidth), y: ends("y", 1, over.clientHeight, 0) } : {};
  panel.update();
}

// Returns the point at a position: of the front or the references, else of the cloud.
function nearest(panel, left, top) {
  const { cloud: [xs, ys], page: { data, shown }, plot: { bbox } } = panel;
  const reach = REACH * devicePixelRatio;
  const [x, y] = [bbox.left + left * devicePixelRatio, bbox.top + top * devicePixelRatio];
  const far = (point) => Math.hypot(...panel.place(point).map((at, i) => at - [x, y][i]));
  const [first] = [...data.front, ...data.references].filter((each) => far(each) < reach).sort((a, b) => far(a) - far(b));
  const trial = xs.findIndex((at, i) => shown[i] && Math.hypot(at - x, ys[i] - y) < reach / 2);
  return first ?? (trial < 0 ? null : { trial });
}

function showTip(panel, { left, top }) {
  const { page: { data, choice }, tip } = panel;
  const point = nearest(panel, left, top);
  tip.hidden = !point;
  if (!point) return;
  const { over, bbox } = panel.plot;
  const [across, down] = [left + bbox.left / devicePixelRatio, top + bbox.top / devicePixelRatio];
  const beyond = left > over.clientWidth / 2; // to the left of the pointer in the right half
  Object.assign(tip.style, { top: `${down + 12}px`, left: beyond ? "auto" : `${across + 12}px`,
    right: beyond ? `${panel.box.clientWidth - across + 12}px` : "auto" });
  const { trial, name, layout, on, p_front: chance, ties = [], low = {}, high = {} } = point;
  const interval = (key) => (Number.isFinite(low[key]) ? ` (${show(low[key])} to ${show(high[key])})` : "");
  tip.textContent = [
    `${name ? `${name} reference, ` : ""}trial ${trial}, ${data.statuses[data.status[trial]]}`,
    on !== undefined && `${on ? "on" : "tied with"} the front, P(front) ${show(chance ?? NaN)}`,
    ties.length > 0 && `tied with ${ties.slice(0, 8).join(", ")}${ties.length > 8 ? ", …" : ""}`,
    ...choice.keys.map((key) => `${label(data.axis(key))}: ${show(data.values[key][trial])}${interval(key)}`), layout,
  ].filter(Boolean).join("\n");
}
