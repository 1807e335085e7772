// The canvases of a part of the page, where they stand, as one picture to keep.
export async function savePng(part, name) {
  const { left, top, width, height } = part.getBoundingClientRect();
  const whole = new OffscreenCanvas(width * devicePixelRatio, height * devicePixelRatio);
  const context = whole.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, width, height);
  for (const canvas of part.querySelectorAll("canvas")) {
    const box = canvas.getBoundingClientRect();
    context.drawImage(canvas, box.left - left, box.top - top, box.width, box.height);
  }
  const link = { href: URL.createObjectURL(await whole.convertToBlob()), download: `${name}.png` };
  Object.assign(document.createElement("a"), link).click();
}
