"""Small models of images and text, and images for them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from retrieval_lab import write_lines

from nas.core.layout import Layout
from nas.model.nn.model import Model
from nas.train.release.tokenizer import byte_tokenizer
from nas.train.towers.images import IMAGE, FrameSettings, read_picture, with_images
from nas.train.towers.release import VisionModel, image_tokenizer, with_tower, write_vision_model
from nas.train.towers.vision import VisionShape, VisionTower

LAYOUT = Layout.parse("d64 v320 ffn=swiglu:96 [C3 A4/2*2]")
SHAPE = VisionShape(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, patch_size=4, num_patches=16,
    projector_hidden_size=40,
)  # fmt: skip
FRAMES = FrameSettings(encoder_patch_size=4, min_image_tokens=4, max_image_tokens=16, tile_size=32)
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (20, 40, 230)}


def vision_model(layout: Layout = LAYOUT, shape: VisionShape = SHAPE, frames: FrameSettings = FRAMES) -> VisionModel:
    """A random model of byte tokens."""
    tokenizer = image_tokenizer(byte_tokenizer(layout.vocab), 4096)
    model = with_tower(Model(layout, 1).state_dict(), layout, tokenizer, VisionTower(shape, layout.d_model, 2), 3)
    return VisionModel(model.eval().requires_grad_(False), tokenizer, frames, 4096)


def write_model(folder: Path, **more: Any) -> VisionModel:
    """The same with its folder."""
    vision = vision_model(**more)
    write_vision_model(folder, vision)
    return vision


def pattern(width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Pixels [H, W, 3] that are equal on every machine."""
    y, x, c = np.mgrid[:height, :width, :3]
    return (((x * 7 + y * 13) ^ (x * y // 31)) + c * 50).astype(np.uint8)


def write_image(path: Path, width: int, height: int) -> Path:
    Image.fromarray(pattern(width, height)).save(path)
    return path


def write_colours(folder: Path, count: int = 12) -> Path:
    """Questions after the colour of an image, with answers."""
    lines = []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        name, colour = list(COLOURS.items())[number % 3]
        shade = tuple(max(0, value - 3 * (number // 3)) for value in colour)
        Image.new("RGB", (16 + number, 16), shade).save(folder / f"{number}.png")
        lines.append({"image": f"{number}.png", "question": "Colour?", "answer": name})
    return write_lines(folder / "data.jsonl", lines)


def question(vision: VisionModel, images: Iterable[Path], text: str) -> tuple[list[int], list[Any]]:
    """Ids of a text with `<image>` for each image, and the images' frames."""
    pictures = [read_picture(path) for path in images]
    whole = with_images(text, [picture.cut(vision.frames) for picture in pictures])
    frames = [frame for picture in pictures for frame in picture.frames(vision.frames)]
    assert text.count(IMAGE) == len(pictures)
    return vision.tokenizer.tokenizer.encode(whole).ids, frames
