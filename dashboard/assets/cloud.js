// Points set into an image pixel by pixel: a hundred thousand take some milliseconds, with or without a graphics card.

import { colour } from "./plotting.js";

// Draws into an area the points at [xs, ys]: layer by layer those of its trials, as squares or crosses.
export function drawCloud(context, { left, top, width, height }, [xs, ys], layers) {
  const image = new ImageData(width, height), pixels = new Uint32Array(image.data.buffer);
  for (const [name, trials] of layers) {
    const pixel = Number.parseInt(["ff", ...colour(name).match(/\w\w/g).reverse()].join(""), 16); // of #rrggbb
    const [reach, shape] = [name === "bad" ? 2 : 1, []];
    for (let down = -reach; down <= reach; down++) for (let right = -reach; right <= reach; right++) {
      if (reach === 1 || right === down || right === -down) shape.push(down * width + right);
    }
    for (const trial of trials) {
      const x = Math.round(xs[trial]), y = Math.round(ys[trial]);
      const inside = x >= reach && x < width - reach && y >= reach && y < height - reach;
      if (inside) for (const offset of shape) pixels[y * width + x + offset] = pixel;
    }
  }
  const canvas = new OffscreenCanvas(width, height);
  canvas.getContext("2d").putImageData(image, 0, 0);
  context.drawImage(canvas, left, top);
}
