// Points set into an image pixel by pixel: a hundred thousand take some milliseconds, with or without a graphics card.
const SQUARE = [[-1, -1], [0, -1], [1, -1], [-1, 0], [0, 0], [1, 0], [-1, 1], [0, 1], [1, 1]];
const CROSS = [[-2, -2], [-1, -1], [0, 0], [1, 1], [2, 2], [-2, 2], [-1, 1], [1, -1], [2, -2]];
const MARGIN = 2;

export class Raster {
  constructor(width, height) {
    this.canvas = new OffscreenCanvas(width, height);
    this.context = this.canvas.getContext("2d");
    this.image = this.context.createImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  // Sets the points that `wanted` lets through in a colour #rrggbb; a place that is not in the image is left out.
  add(xs, ys, wanted, colour, crossed = false) {
    const { width, height } = this.image;
    const shape = (crossed ? CROSS : SQUARE).map(([dx, dy]) => dy * width + dx);
    const [red, green, blue] = colour.match(/\w\w/g).map((digits) => Number.parseInt(digits, 16));
    const pixel = ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
    for (let i = 0; i < xs.length; i++) {
      const [x, y] = [Math.round(xs[i]), Math.round(ys[i])];
      if (!(x >= MARGIN && x < width - MARGIN && y >= MARGIN && y < height - MARGIN) || !wanted(i)) continue;
      for (let k = 0; k < shape.length; k++) this.pixels[y * width + x + shape[k]] = pixel;
    }
  }

  onto(context, left, top) {
    this.context.putImageData(this.image, 0, 0);
    context.drawImage(this.canvas, left, top);
    this.pixels.fill(0);
  }
}
