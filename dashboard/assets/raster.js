// Points set into an image pixel by pixel: a hundred thousand take some milliseconds, with or without a graphics card.
export class Raster {
  constructor({ width, height }) {
    this.canvas = new OffscreenCanvas(width, height);
    this.image = new ImageData(width, height);
  }

  // Sets squares, or crosses, at the places [x, y] of the points that are `wanted`, in a colour #rrggbb.
  add([xs, ys], wanted, colour, crossed) {
    const [{ width, height, data }, reach] = [this.image, crossed ? 2 : 1];
    const [pixels, [red, green, blue]] = [new Uint32Array(data.buffer), colour.match(/\w\w/g).map((part) => Number.parseInt(part, 16))];
    const pixel = ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
    for (let i = 0; i < xs.length; i++) {
      const [x, y] = [Math.round(xs[i]), Math.round(ys[i])];
      if (!(x >= reach && x < width - reach && y >= reach && y < height - reach) || !wanted(i)) continue;
      for (let down = -reach; down <= reach; down++) for (let right = -reach; right <= reach; right++) {
        if (!crossed || right === down || right === -down) pixels[(y + down) * width + x + right] = pixel;
      }
    }
  }

  onto(context, { left, top }) {
    this.canvas.getContext("2d").putImageData(this.image, 0, 0);
    context.drawImage(this.canvas, left, top);
  }
}
