// The course of a study's hypervolume: its steps, and where things stand now.
import uPlot from "./uplot.esm.js";
import { axis, colour } from "./plotting.js";

export class Course {
  // `places` gives the steps' places on the horizontal axis, and where the study has come to.
  constructor(box, title, places) {
    const size = () => ({ width: box.clientWidth, height: box.clientHeight });
    const line = { stroke: () => colour("hue-0"), width: 2, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } };
    const plot = new uPlot({
      ...size(), legend: { show: false }, cursor: { show: false }, scales: { x: { time: false } },
      axes: [axis("x", title), axis("y", "hypervolume")], series: [{}, line],
    }, [[0, 1], [null, null]], box);
    this.update = (data) => {
      const steps = data.course.hypervolume;
      plot.setData(steps.length ? [places(data), [...steps, steps.at(-1)]] : [[0, 1], [null, null]]);
    };
    new ResizeObserver(() => plot.setSize(size())).observe(box);
  }
}
