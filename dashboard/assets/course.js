// The course of a study's hypervolume: its steps, and where things stand now.
import uPlot from "./uplot.esm.js";
import { axis, colour, sizeOf } from "./plotting.js";

// The function that shows a study's data; `places`: the steps' places on the horizontal axis, and what came since.
export function course(box, title, places) {
  const [paths, points] = [uPlot.paths.stepped({ align: 1 }), { show: false }];
  const plot = new uPlot({
    ...sizeOf(box), legend: { show: false }, cursor: { show: false }, scales: { x: { time: false } },
    axes: [axis("x", title), axis("y", "hypervolume")], series: [{}, { stroke: () => colour("hue-0"), width: 2, paths, points }],
  }, [[0, 1], [null, null]], box);
  new ResizeObserver(() => plot.setSize(sizeOf(box))).observe(box);
  const line = (data, steps) => (steps.length ? [places(data), [...steps, steps.at(-1)]] : [[0, 1], [null, null]]);
  return (data) => plot.setData(line(data, data.course.hypervolume));
}
