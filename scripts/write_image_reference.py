"""Writes tests/data/lfm2_vl_images.json: how transformers' processor of Lfm2Vl cuts images, as hashes.

It is opened by AutoProcessor from a folder that hilnas wrote, and must give the ids that hilnas gives for a text with
two images. It needs torchvision, which is no dependency; any build does, as operators of its own are not used:

    PYTHONPATH=. python scripts/write_image_reference.py
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "unit"))
SIZES = [
    (512, 512), (100, 100), (20, 30), (380, 680), (1024, 256), (640, 480), (729, 725), (1000, 1500), (1300, 800),
    (2000, 700), (1, 4000), (4000, 1), (3000, 400), (513, 1025),
]  # fmt: skip
"""Widths and heights in pixels."""
OTHERS: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((900, 900), {"max_tiles": 4}),
    ((900, 900), {"use_thumbnail": False}),
    ((900, 900), {"do_image_splitting": False}),
    ((300, 200), {"min_image_tokens": 16, "max_image_tokens": 64}),
]


def main() -> None:
    """Writes the file."""
    torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    from transformers import AutoProcessor

    lab = importlib.import_module("vision_lab")
    from nas.train.towers.images import FrameSettings
    from nas.train.towers.vision import VisionShape

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tower = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        vision = lab.write_model(folder / "model", shape=VisionShape(**tower), frames=FrameSettings())
        processor = AutoProcessor.from_pretrained(folder / "model", local_files_only=True)
        paths = [lab.write_image(folder / f"{i}.png", *size) for i, size in enumerate(((200, 300), (900, 1400)))]
        text = "A <image> and <image>?"
        ids, inputs = lab.question(vision, paths, text)
        expected = processor(images=[[Image.open(path) for path in paths]], text=[text], return_tensors="pt")
        assert ids[-len(expected.input_ids[0]) :] == expected.input_ids[0].tolist(), "ids differ"
        assert len(inputs[0]) == len(expected.pixel_values)
    cases = []
    for (width, height), settings in [*((size, {}) for size in SIZES), *OTHERS]:
        image = Image.fromarray(lab.pattern(width, height))
        read = processor(images=[[image]], text=["<image>"], return_tensors="pt", **settings)
        digest = hashlib.sha256()
        for patches, mask in zip(read.pixel_values, read.pixel_attention_mask, strict=True):
            digest.update(patches[: int(mask.sum())].numpy().tobytes())
        tokens = processor.tokenizer.decode(read.input_ids[0], skip_special_tokens=False)
        cases.append(
            {
                "width": width,
                "height": height,
                "settings": settings,
                "sizes": read.spatial_shapes.tolist(),
                "text": hashlib.sha256(tokens.encode()).hexdigest(),
                "patches": digest.hexdigest(),
            }
        )
    versions = {name: version(name) for name in ("transformers", "torchvision")}
    path = ROOT / "tests" / "data" / "lfm2_vl_images.json"
    path.write_text(json.dumps({"versions": versions, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
