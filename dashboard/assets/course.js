// The course of a study's hypervolume: its steps, and where things stand now.
import uPlot from "./uplot.esm.js";
import { axis, colour } from "./plotting.js";

export class Course {
  // `places` gives the steps' places on the horizontal axis, `now` where the study has come to.
  constructor(box, title, places, now) {
    const columns = ({ course, ...data }) => {
      const steps = course?.hypervolume ?? [];
      return steps.length ? [[...places(course), now(data)], [...steps, steps.at(-1)]] : [[0, 1], [null, null]];
    };
    const size = () => ({ width: box.clientWidth, height: box.clientHeight });
    const line = { stroke: () => colour("hue-0"), width: 2, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } };
    const plot = new uPlot({
      ...size(), legend: { show: false }, cursor: { show: false }, scales: { x: { time: false } },
      axes: [axis("x", title), axis("y", "hypervolume")], series: [{}, line],
    }, [[0, 1], [null, null]], box);
    this.update = (data) => plot.setData(columns(data));
    new ResizeObserver(() => plot.setSize(size())).observe(box);
  }
}
