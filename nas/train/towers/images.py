"""Images: read by Pillow within limits, and cut into frames as transformers' Lfm2VlImageProcessor cuts them.

An image is one frame, scaled so that it becomes `min_image_tokens` to `max_image_tokens` tokens and its sides are
divisible by patch x factor. One with more pixels than `max_pixels_tolerance` times that is scaled to a grid of 2 to 10
tiles of the closest aspect, and a frame of the whole image, the thumbnail, follows them (LFM2 report, section 5.1.2).

    one frame   <|image_start|> <image>... <|image_end|>
    tiles       <|image_start|> <|img_row_1_col_1|> <image>... <|img_row_1_col_2|> <image>... ...
                <|img_thumbnail|> <image>... <|image_end|>
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nas.core.errors import InvalidInput, Unsupported
from nas.train.towers.modality import MediaFile, Processor, checked, require_file

IMAGE = "<image>"
"""Stands for one embedding of an image, and for a whole image in the text of a message."""
START, END, THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
MOST_TILES = 10
"""Rows or columns of tiles that have tokens."""
TOKENS = (
    IMAGE,
    START,
    END,
    THUMBNAIL,
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, MOST_TILES + 1) for column in range(1, MOST_TILES + 1)),
)
"""Special tokens of images, as LFM2-VL's tokenizer has them."""

Image.init()  # registers WebP, which Pillow does not before it meets a file of an unknown kind
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_BYTES = 64 << 20
MOST_PIXELS = 64_000_000
_MOST_FRAME = 1 << 24
_MODES = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"}
_WIDE_MODES = {"I;16", "I;16L", "I;16B", "I;16N"}


class FrameSettings(Processor):
    """How images are cut; names and defaults are those of transformers' Lfm2VlImageProcessor."""

    encoder_patch_size: int = Field(16, ge=1, le=64, description="pixels of a side of a patch")
    downsample_factor: int = Field(2, ge=1, le=8, description="patches of a side of what becomes one token")
    min_image_tokens: int = Field(64, ge=1, le=4096, description="of a frame")
    max_image_tokens: int = Field(256, ge=1, le=4096, description="of a frame")
    do_image_splitting: bool = Field(True, description="whether large images are cut into tiles")
    min_tiles: int = Field(2, ge=1, le=MOST_TILES)
    max_tiles: int = Field(10, ge=1, le=MOST_TILES)
    use_thumbnail: bool = Field(True, description="whether a frame of the whole image follows its tiles")
    tile_size: int = Field(512, ge=1, le=2048, description="pixels of a side of a tile")
    max_pixels_tolerance: float = Field(2.0, ge=0, le=100)
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @model_validator(mode="after")
    def _fits(self) -> FrameSettings:
        if self.min_image_tokens > self.max_image_tokens or self.min_tiles > self.max_tiles:
            raise ValueError("min_image_tokens and min_tiles must not exceed max_image_tokens and max_tiles")
        if self.most_pixels > _MOST_FRAME:
            raise ValueError(f"a frame of max_image_tokens has more than {_MOST_FRAME:,} pixels")
        if self.tile_size % self.square:
            raise ValueError(f"tile_size must be divisible by {self.square}, patch times factor")
        if not all(math.isfinite(value) for value in self.image_mean) or min(self.image_std) <= 0:
            raise ValueError("image_mean must be finite, and image_std above 0")
        return self

    @property
    def square(self) -> int:
        """Pixels of a side of what becomes one token."""
        return self.encoder_patch_size * self.downsample_factor

    @property
    def most_pixels(self) -> int:
        """Pixels of a frame."""
        return self.max_image_tokens * self.square**2

    @staticmethod
    def size_of(path: Path, place: str) -> tuple[int, ...]:
        return tuple(read_pixels(path, place).shape[1:])

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> Self:
        settings = config.get("image_processor", config)
        if not isinstance(settings, dict) or settings.get("resample", 2) != 2:
            raise Unsupported("images are scaled in another way than bilinear", where=where)
        if settings.get("rescale_factor", 1 / 255) != 1 / 255 or not settings.get("do_normalize", True):
            raise Unsupported("pixels are scaled in another way", where=where)
        return checked(cls, settings, where)

    def config(self) -> dict[str, Any]:
        return {
            "processor_class": "Lfm2VlProcessor",
            "image_processor": {
                "image_processor_type": "Lfm2VlImageProcessor",
                "do_convert_rgb": True,
                "do_normalize": True,
                "do_pad": True,
                "do_rescale": True,
                "do_resize": True,
                "resample": 2,
                "rescale_factor": 1 / 255,
                "return_row_col_info": True,
                **self.model_dump(),
            },
        }

    def limited(self, tokens: int) -> FrameSettings:
        """Returns the same with at most that many tokens of a frame.

        Raises:
            InvalidInput: frames of so many tokens are too large.
        """
        changes = {"min_image_tokens": min(self.min_image_tokens, tokens), "max_image_tokens": tokens}
        return checked(FrameSettings, self.model_dump() | changes, "--image-tokens")

    def cut(self, image: MediaFile) -> Cut:
        """Returns how an image is cut, see `cut_of`."""
        height, width = image.size
        return cut_of(height, width, self, image.place)

    def text(self, file: MediaFile) -> str:
        return self.cut(file).text()

    def inputs(self, files: Sequence[MediaFile]) -> tuple[Tensor, ...]:
        """Returns the patches of all frames [N, P, patch patch 3], padded with zeros, and heights and widths [N, 2]."""
        frames = [frame for file in files for frame in self._frames(file)]
        if not frames:
            return torch.zeros(0, 1, self.encoder_patch_size**2 * 3), torch.zeros(0, 2, dtype=torch.int64)
        return pad_sequence([patches for patches, _ in frames], True), torch.tensor([size for _, size in frames])

    def _frames(self, image: MediaFile) -> list[tuple[Tensor, tuple[int, int]]]:
        pixels = read_pixels(image.path, image.place)
        if tuple(pixels.shape[1:]) != image.size:
            raise InvalidInput(f"{image.path} has changed", where=image.place)
        return frames_of(pixels, self.cut(image))


@dataclass(frozen=True)
class Cut:
    """How an image is cut.

    Args:
        whole: height and width in pixels of the frame of the whole image.
        rows: of tiles; 1 and 1 column: there are none.
        columns: of tiles.
        settings: by which it was decided.
    """

    whole: tuple[int, int]
    rows: int
    columns: int
    settings: FrameSettings

    @property
    def tiled(self) -> bool:
        """Whether there are tiles."""
        return self.rows * self.columns > 1

    def text(self) -> str:
        """Returns the tokens that stand for the image."""
        height, width = (side // self.settings.square for side in self.whole)
        whole = IMAGE * (height * width)
        if not self.tiled:
            return f"{START}{whole}{END}"
        tile = IMAGE * (self.settings.tile_size // self.settings.square) ** 2
        places = ((row, column) for row in range(1, self.rows + 1) for column in range(1, self.columns + 1))
        tiles = "".join(f"<|img_row_{row}_col_{column}|>{tile}" for row, column in places)
        return f"{START}{tiles}{THUMBNAIL + whole if self.settings.use_thumbnail else ''}{END}"


def read_pixels(path: Path, place: str) -> Tensor:
    """Reads an image as it is meant to be seen: turned as its EXIF data says, on white where it is transparent.

    Returns:
        Pixels in RGB, uint8 [3, H, W].

    Raises:
        InvalidInput: the file is none of the formats, damaged, animated, or too large.
    """
    try:
        require_file(path, place, MOST_BYTES)
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {path.name}: {error.strerror}", where=place) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, on sizes that are refused and metadata that is not used
            return _decoded(content, path.name, place)
    except InvalidInput:
        raise
    except Image.DecompressionBombError:
        raise InvalidInput(f"{path.name} has more than {MOST_PIXELS:,} pixels", where=place) from None
    except UnidentifiedImageError:
        raise InvalidInput(f"{path.name} is no image in {', '.join(FORMATS)}", where=place) from None
    except Exception as error:  # Pillow raises nothing narrower for a damaged file
        raise InvalidInput(f"{path.name} is damaged: {error}", where=place) from error


def _decoded(content: bytes, name: str, place: str) -> Tensor:
    with Image.open(BytesIO(content), formats=FORMATS) as image:
        if image.width * image.height > MOST_PIXELS:
            raise InvalidInput(f"{name} has more than {MOST_PIXELS:,} pixels", where=place)
        # Cameras put a second picture behind the first one of a JPEG file.
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise InvalidInput(f"{name} is animated: save one of its frames", where=place)
        if image.mode not in _MODES | _WIDE_MODES:
            raise InvalidInput(f"{name} has pixels of mode {image.mode}, which is not read", where=place)
        image.load()
        turned = ImageOps.exif_transpose(image)
        if turned.mode in _WIDE_MODES:
            turned = Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
        if "A" in turned.mode.upper() or turned.info.get("transparency") is not None:
            turned = turned.convert("RGBA")
            turned = Image.alpha_composite(Image.new("RGBA", turned.size, "white"), turned)
        return torch.from_numpy(np.array(turned.convert("RGB"))).permute(2, 0, 1).contiguous()


def cut_of(height: int, width: int, settings: FrameSettings, place: str = "") -> Cut:
    """Returns how an image of that size is cut.

    Args:
        height: in pixels.
        width: in pixels.
        settings: of the cut.
        place: of the image, for messages.

    Raises:
        InvalidInput: it is so narrow that no frame holds it.
    """
    square = settings.square
    shape = [max(square, _rounded(side, square)) for side in (height, width)]
    least = settings.min_image_tokens * square**2
    if math.prod(shape) > settings.most_pixels:
        shrink = math.sqrt((height * width) / settings.most_pixels)
        shape = [max(square, math.floor(side / shrink / square) * square) for side in (height, width)]
    elif math.prod(shape) < least:
        stretch = math.sqrt(least / (height * width))
        shape = [math.ceil(side * stretch / square) * square for side in (height, width)]
    patches = [settings.max_image_tokens * settings.downsample_factor**2]
    if settings.do_image_splitting:
        patches.append((settings.tile_size // settings.encoder_patch_size) ** 2)
    if math.prod(shape) // settings.encoder_patch_size**2 > max(patches):
        raise InvalidInput(f"an image of {width} x {height} pixels is too narrow", where=place)
    cells = math.prod(max(settings.encoder_patch_size, _rounded(side, square)) for side in (height, width))
    large = cells > settings.most_pixels * settings.max_pixels_tolerance
    split = settings.do_image_splitting and not settings.min_tiles == settings.max_tiles == 1
    rows, columns = _grid(height, width, settings) if large and split else (1, 1)
    return Cut((shape[0], shape[1]), rows, columns, settings)


def _rounded(side: int, square: int) -> int:
    return round(side / square) * square


def _grid(height: int, width: int, settings: FrameSettings) -> tuple[int, int]:
    """Returns rows and columns of the grid of the closest aspect; of two equally close, the larger if it is filled."""
    best, least = (1, 1), math.inf
    for columns, rows in _grids(settings.min_tiles, settings.max_tiles):
        difference = abs(width / height - columns / rows)
        fills = width * height > 0.5 * settings.tile_size**2 * columns * rows
        if difference < least or (difference == least and fills):
            best, least = (rows, columns), difference
    return best


@lru_cache(maxsize=64)
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """Returns (columns, rows), fewest tiles first; those of one number in the order of transformers' set."""
    grids = {
        (columns, rows)
        for number in range(least, most + 1)
        for columns in range(1, number + 1)
        for rows in range(1, number + 1)
        if least <= columns * rows <= most
    }
    return sorted(grids, key=math.prod)


def frames_of(pixels: Tensor, cut: Cut) -> list[tuple[Tensor, tuple[int, int]]]:
    """Returns the frames of an image: patches [H W, patch patch 3], normalised, with H and W in patches.

    Args:
        pixels: uint8 [3, H, W].
        cut: how it is cut.
    """
    settings, tile = cut.settings, cut.settings.tile_size
    frames: list[Tensor] = []
    if cut.tiled:
        grid = _resized(pixels, (tile * cut.rows, tile * cut.columns))
        frames += [part for row in torch.split(grid, tile, 1) for part in torch.split(row, tile, 2)]
    if not cut.tiled or settings.use_thumbnail:
        frames.append(_resized(pixels, cut.whole))
    mean, std = (torch.tensor(values)[:, None, None] * 255.0 for values in (settings.image_mean, settings.image_std))
    return [_patches((frame.float() - mean) / std, settings.encoder_patch_size) for frame in frames]


def _patches(frame: Tensor, patch: int) -> tuple[Tensor, tuple[int, int]]:
    channels, height, width = frame.shape
    rows, columns = height // patch, width // patch
    patches = frame.reshape(channels, rows, patch, columns, patch).permute(1, 3, 2, 4, 0)
    return patches.reshape(rows * columns, patch * patch * channels), (rows, columns)


def _resized(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Scales pixels with antialiasing, as torchvision does it on the CPU: integers, the same on every machine."""
    if tuple(pixels.shape[1:]) == size:
        return pixels
    return F.interpolate(pixels[None], size, mode="bilinear", align_corners=False, antialias=True)[0]
