// Mouse, fingers and keys in a panel: hovering shows details, a click opens a trial, dragging selects, Ctrl and the wheel
// zoom, a double click shows the whole panel; the first tap shows details, the second opens the trial; with the keyboard + and
// - zoom, arrows move, 0 shows the whole panel.
import { fetchPage } from "./dashboard.js";
import { label, show, showWithin } from "./plotting.js";

// Zoom factor, and the shares of the panel to move right and down.
const KEYS = { ArrowLeft: [1, -0.1, 0], ArrowRight: [1, 0.1, 0], ArrowDown: [1, 0, 0.1], ArrowUp: [1, 0, -0.1],
  "+": [0.8, 0, 0], "-": [1.25, 0, 0], 0: [0, 0, 0] };
const [REACH, FINGER] = [8, 20]; // pixels
const REST = 100; // milliseconds on a trial until its layout is fetched

// Returns the options of uPlot for them.
export function gestures(panel) {
  const init = ({ over }) => {
    let tapped = null;
    over.addEventListener("pointerdown", ({ pointerType }) => { panel.touched = pointerType === "touch"; });
    over.addEventListener("click", ({ offsetX: left, offsetY: top }) => {
      const point = nearest(panel, left, top);
      if (point && (!panel.touched || point.trial === tapped)) location.assign(`${location.pathname}/trials/${point.trial}`);
      tapped = point?.trial ?? null;
      showTip(panel, { left, top });
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
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return; // those are the browser's
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
  const reach = (panel.touched ? FINGER : REACH) * devicePixelRatio;
  const [x, y] = [bbox.left + left * devicePixelRatio, bbox.top + top * devicePixelRatio];
  const far = (point) => Math.hypot(...panel.place(point).map((at, i) => at - [x, y][i]));
  const [first] = [...data.front, ...data.references].filter((each) => far(each) < reach).sort((a, b) => far(a) - far(b));
  const trial = xs.findIndex((at, i) => shown[i] && Math.hypot(at - x, ys[i] - y) < reach / 2);
  return first ?? (trial < 0 ? null : { trial });
}

function showTip(panel, { left, top }) {
  const { page: { data, choice }, tip } = panel;
  const point = nearest(panel, left, top);
  const [told, card] = tip.children;
  tip.hidden = !point;
  if (!point) delete card.dataset.trial;
  if (!point) return;
  const { over, bbox } = panel.plot;
  const [across, down] = [left + bbox.left / devicePixelRatio, top + bbox.top / devicePixelRatio];
  // Away from the nearer edges: it neither leaves the panel at a side nor the window below it.
  const place = (at, size, whole) => (at > size / 2 ? ["auto", `${whole - at + 12}px`] : [`${at + 12}px`, "auto"]);
  const [start, end] = place(across, over.clientWidth, panel.box.clientWidth);
  const [above, below] = place(down, over.clientHeight, panel.box.clientHeight);
  Object.assign(tip.style, { left: start, right: end, top: above, bottom: below });
  const { trial, name, on, p_front: chance, ties = [], low = {}, high = {} } = point;
  const figure = (key) => {
    const [value, ends] = showWithin(data.values[key][trial], low[key], high[key]);
    return ends ? `${value} (${ends})` : value;
  };
  told.textContent = [
    `${name ? `${name} reference, ` : ""}trial ${trial}, ${data.statuses[data.status[trial]]}`,
    on !== undefined && `${on ? "on" : "tied with"} the front, P(front) ${show(chance ?? NaN)}`,
    ties.length > 0 && `tied with ${ties.slice(0, 8).join(", ")}${ties.length > 8 ? ", …" : ""}`,
    ...choice.keys.map((key) => `${label(data.axis(key))}: ${figure(key)}`),
  ].filter(Boolean).join("\n");
  if (card.dataset.trial !== `${trial}`) drawLayout(panel.page, card, `${trial}`);
}

// Draws a trial's layout, and says why it ended, once the pointer rests on it.
function drawLayout({ cards }, card, trial) {
  card.dataset.trial = trial;
  card.replaceChildren();
  const draw = async () => {
    if (card.dataset.trial !== trial) return;
    cards[trial] ??= fetchPage(`${location.pathname}/trials/${trial}/card`);
    const { body } = await cards[trial];
    if (card.dataset.trial === trial) card.replaceChildren(...body.cloneNode(true).childNodes);
  };
  setTimeout(() => draw().catch((error) => {
    delete cards[trial]; // it is fetched again when the pointer comes back
    console.info(`not drawn: ${error.message}`);
  }), REST);
}
