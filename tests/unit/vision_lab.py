"""Small models of images and text, and images for them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from retrieval_lab import write_lines
from torch import Tensor

from nas.core.layout import Layout
from nas.model.nn.model import Model
from nas.train.release.tokenizer import byte_tokenizer
from nas.train.towers.images import FrameSettings
from nas.train.towers.release import MultimodalModel, tower_tokenizer, with_tower, write_multimodal_model
from nas.train.towers.vision import VISION, VisionShape

LAYOUT = Layout.parse("d64 v320 ffn=swiglu:96 [C3 A4/2*2]")
SHAPE = VisionShape(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, patch_size=4, num_patches=16,
    projector_hidden_size=40,
)  # fmt: skip
FRAMES = FrameSettings(encoder_patch_size=4, min_image_tokens=4, max_image_tokens=16, tile_size=32)
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (20, 40, 230)}


def vision_model(
    layout: Layout = LAYOUT, shape: VisionShape = SHAPE, frames: FrameSettings = FRAMES
) -> MultimodalModel:
    """A random model of byte tokens."""
    tokenizer = tower_tokenizer(byte_tokenizer(layout.vocab), 4096, VISION)
    tower = shape.tower(layout.d_model, 2)
    model = with_tower(Model(layout, 1).state_dict(), layout, tokenizer, tower, VISION.marker, 3)
    return MultimodalModel(VISION, model.eval().requires_grad_(False), shape, tokenizer, frames, 4096)


def write_model(folder: Path, **more: Any) -> MultimodalModel:
    """The same with its folder."""
    vision = vision_model(**more)
    write_multimodal_model(folder, vision)
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


def question(vision: MultimodalModel, images: Iterable[Path], text: str) -> tuple[list[int], tuple[Tensor, ...]]:
    """Ids of a text with `<image>` for each image, and the tower's inputs."""
    files = [FrameSettings.read(path) for path in images]
    whole = VISION.expanded(text, [vision.processor.text(file) for file in files])
    return vision.tokenizer.tokenizer.encode(whole).ids, vision.processor.inputs(files)
