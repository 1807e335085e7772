// Points set into an image pixel by pixel: a hundred thousand take some milliseconds, with or without a graphics card.

// Draws into an area the points at [xs, ys]: in each layer those that are wanted, as squares or crosses in #rrggbb.
export function drawCloud(context, { left, top, width, height }, [xs, ys], layers) {
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  for (const { wanted, colour, crossed } of layers) {
    const [red, green, blue] = colour.match(/\w\w/g).map((digits) => Number.parseInt(digits, 16));
    const [pixel, reach] = [((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0, crossed ? 2 : 1];
    for (let i = 0; i < xs.length; i++) {
      const [x, y] = [Math.round(xs[i]), Math.round(ys[i])];
      if (!(x >= reach && x < width - reach && y >= reach && y < height - reach) || !wanted(i)) continue;
      for (let down = -reach; down <= reach; down++) for (let right = -reach; right <= reach; right++) {
        if (!crossed || right === down || right === -down) pixels[(y + down) * width + x + right] = pixel;
      }
    }
  }
  const canvas = new OffscreenCanvas(width, height);
  canvas.getContext("2d").putImageData(image, 0, 0);
  context.drawImage(canvas, left, top);
}
