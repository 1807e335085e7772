"""Images: read within limits, and cut as transformers' own processor cuts them."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from vision_lab import pattern, write_image

from nas.core.errors import InvalidInput
from nas.train.towers import images
from nas.train.towers.images import FrameSettings, cut_of, frames_of, read_pixels
from nas.train.towers.vision import VISION

REFERENCE = json.loads((Path(__file__).parent.parent / "data" / "lfm2_vl_images.json").read_text())
RED, GREEN, WHITE = (250, 10, 10), (10, 250, 10), (255, 255, 255)


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: f"{case['width']}x{case['height']}")
def test_frames_are_those_of_transformers_bit_for_bit(case: dict[str, Any]) -> None:
    settings = FrameSettings(**case["settings"])
    cut = cut_of(case["height"], case["width"], settings)
    assert hashlib.sha256(cut.text().encode()).hexdigest() == case["text"]
    frames = frames_of(torch.from_numpy(pattern(case["width"], case["height"])).permute(2, 0, 1).contiguous(), cut)
    assert [list(size) for _, size in frames] == case["sizes"]
    digest = hashlib.sha256()
    for patches, _ in frames:
        digest.update(patches.numpy().tobytes())
    assert digest.hexdigest() == case["patches"]


def test_fewer_tokens_are_a_smaller_frame() -> None:
    whole = [
        cut_of(512, 512, FrameSettings(max_image_tokens=most, do_image_splitting=False)) for most in (64, 128, 256)
    ]
    counts = [cut.text().count("<image>") for cut in whole]
    assert counts == [64, 121, 256]
    assert VISION.expanded("a<image>b", [whole[0].text()]) == f"a{whole[0].text()}b"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"min_image_tokens": 9, "max_image_tokens": 8}, "must not exceed"),
        ({"tile_size": 500}, "divisible by 32"),
        ({"encoder_patch_size": 64, "downsample_factor": 8}, "more than 16,777,216 pixels"),
        ({"image_std": (0.5, 0.5, 0)}, "above 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        FrameSettings(**settings)


def colour_at(path: Path, y: int, x: int) -> tuple[int, ...]:
    return tuple(read_pixels(path, str(path))[:, y, x].tolist())


def two_colours(mode: str = "RGB") -> Image.Image:
    """Red on the left, green on the right, 20 x 10."""
    image = Image.new("RGB", (20, 10), RED)
    image.paste(GREEN, (10, 0, 20, 10))
    return image.convert(mode)


def test_exif_turns_an_image(tmp_path: Path) -> None:
    image, path = two_colours(), tmp_path / "a.png"
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees to the right for viewing
    image.save(path, exif=exif)
    assert FrameSettings.read(path).size == (20, 10)
    assert colour_at(path, 2, 5) == RED and colour_at(path, 17, 5) == GREEN


def test_transparent_pixels_are_white(tmp_path: Path) -> None:
    image, path = two_colours("RGBA"), tmp_path / "a.png"
    image.paste((0, 0, 0, 0), (0, 0, 10, 10))
    image.save(path)
    assert colour_at(path, 5, 5) == WHITE and colour_at(path, 5, 15) == GREEN
    palette = two_colours().quantize(4)
    palette.info["transparency"] = palette.getpixel((0, 0))
    palette.save(path)
    assert colour_at(path, 5, 5) == WHITE and colour_at(path, 5, 15) == GREEN


@pytest.mark.parametrize(
    ("mode", "name"), [("CMYK", "a.jpg"), ("L", "a.png"), ("1", "a.bmp"), ("P", "a.gif"), ("RGB", "a.webp")]
)
def test_other_modes_become_rgb(tmp_path: Path, mode: str, name: str) -> None:
    path, image = tmp_path / name, two_colours(mode)
    image.save(path)
    expected = image.convert("RGB")
    for place in ((5, 2), (15, 2)):
        np.testing.assert_allclose(colour_at(path, *reversed(place)), expected.getpixel(place), atol=12)


def test_the_first_picture_of_a_camera_is_read(tmp_path: Path) -> None:
    two_colours().save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[Image.new("RGB", (5, 5))])
    assert FrameSettings.read(tmp_path / "a.jpg").size == (10, 20)


def test_sixteen_bits_are_scaled(tmp_path: Path) -> None:
    values = np.full((4, 4), 300 * 100, np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    assert colour_at(tmp_path / "a.png", 0, 0) == (117, 117, 117)


def test_narrow_images_are_read_or_refused(tmp_path: Path) -> None:
    cut = FrameSettings().cut(FrameSettings.read(write_image(tmp_path / "line.png", 1, 4000)))
    assert cut.whole == (4000, 32) and not cut.tiled
    with pytest.raises(InvalidInput, match="60000 x 1 pixels is too narrow"):
        cut_of(1, 60000, FrameSettings())


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims to be large."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data)) for tag, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def animated() -> bytes:
    content = BytesIO()
    frames = [two_colours("P"), Image.new("P", (20, 10))]
    frames[0].save(content, "GIF", save_all=True, append_images=frames[1:])
    return content.getvalue()


def truncated() -> bytes:
    content = BytesIO()
    Image.fromarray(pattern(64, 64)).save(content, "JPEG")
    return content.getvalue()[:-300]


def inflated() -> bytes:
    """A PNG whose text is a megabyte when it is inflated, four times as much as Pillow reads."""
    content, text = BytesIO(), PngImagePlugin.PngInfo()
    text.add_text("a", "a" * (4 << 20), zip=True)
    two_colours().save(content, "PNG", pnginfo=text)
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (bomb(100_000, 100_000), "a.png has more than 64,000,000 pixels"),
        (bomb(9_000, 9_000), "a.png has more than 64,000,000 pixels"),
        (bomb(1_000, 1_000), "a.png is damaged"),
        (animated(), "a.png is animated"),
        (truncated(), "a.png is damaged"),
        (inflated(), "a.png is damaged"),
        (b"no image at all", "a.png is no image in PNG"),
        (b"%PDF-1.4", "a.png is no image in PNG"),
        (b"", "a.png is no image in PNG"),
    ],
    ids=["bomb", "large", "hollow", "animated", "truncated", "inflated", "text", "pdf", "empty"],
)
def test_files_that_cannot_be_read_are_named_in_one_line(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=problem) as raised:
        read_pixels(path, "data.jsonl:7")
    assert str(raised.value).startswith("data.jsonl:7: ") and "\n" not in str(raised.value)


def test_large_files_pipes_and_folders_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MOST_BYTES", 1 << 20)
    (tmp_path / "large.png").write_bytes(bytes(1 << 21))
    os.mkfifo(tmp_path / "pipe.png")
    for name, problem in (
        ("large.png", "larger than 1 MB"),
        ("pipe.png", "no file"),
        (".", "no file"),
        ("x", "no file"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            read_pixels(tmp_path / name, name)


def test_an_image_that_changes_is_refused(tmp_path: Path) -> None:
    picture = FrameSettings.read(write_image(tmp_path / "a.png", 20, 10))
    write_image(tmp_path / "a.png", 10, 20)
    with pytest.raises(InvalidInput, match="has changed"):
        FrameSettings().inputs([picture])
