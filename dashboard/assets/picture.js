// The canvases of a page, where they stand, as one picture to keep.
export async function savePng(canvases, name) {
  const boxes = canvases.map((canvas) => canvas.getBoundingClientRect());
  const [left, top] = ["left", "top"].map((side) => Math.min(...boxes.map((box) => box[side])) - 12);
  const [right, bottom] = ["right", "bottom"].map((side) => Math.max(...boxes.map((box) => box[side])) + 12);
  const whole = new OffscreenCanvas((right - left) * devicePixelRatio, (bottom - top) * devicePixelRatio);
  const context = whole.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, right - left, bottom - top);
  boxes.forEach(({ x, y, width, height }, i) => context.drawImage(canvases[i], x - left, y - top, width, height));
  const href = URL.createObjectURL(await whole.convertToBlob());
  Object.assign(document.createElement("a"), { href, download: `${name}.png` }).click();
}
