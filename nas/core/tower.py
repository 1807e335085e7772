"""Towers: the shape of what reads images or sound in front of a language model, and how many tokens these become.

    images   an encoder of SigLIP2's form sees patches; each square of `factor` x `factor` becomes one token
    sound    an encoder of Parakeet's form sees features of 10 ms; each 8 become one token

which a connector of two linear maps brings to the language model's width (LFM2 report, sections 5.1.1 and 6.1.1). On
one line a tower is its width and layers, then whatever is not the default:

    768x12                                          of LFM2-VL-450M
    1152x27:heads=16:ffn=4304:tokens=128            of LFM2-VL-1.6B, with at most 128 tokens for an image
    sound:512x17                                    of LFM2-Audio-1.5B
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Self

from nas.core.errors import InvalidInput

Media = Literal["images", "sounds"]

POSITIONS = 256
"""Learnt positions of an encoder of images, a square of 16 x 16, which are interpolated to those of an image."""
KERNEL = 9
"""Positions that a convolution in a layer of an encoder of sound sees."""
SUBSAMPLING = 8
"""Features of a sound that become one token."""
FEATURES_PER_SECOND = 100
WAVES = 512
"""Numbers of a position of an encoder of sound, of which narrower ones have a part: its width divides it."""
_LINE = re.compile(r"(sound:)?(\d{1,5})x(\d{1,3})((?::[a-z]+=\d{1,6})*)")


@dataclass(frozen=True, slots=True)
class Tower(ABC):
    """An encoder and its connector. `Tower.parse` reads one, `of` of its class checks it.

    Args:
        width: of the encoder.
        layers: of the encoder.
        heads: of its attention.
        ffn: width of its feed-forwards.

    Example:
        >>> Tower.parse("768x12:tokens=64").tokens_of(512, 512)
        64
        >>> Tower.parse("sound:512x17:heads=8").format()
        'sound:512x17'
    """

    width: int
    layers: int
    heads: int
    ffn: int

    media: ClassVar[Media]
    """What it reads, as workloads name it."""
    prefix: ClassVar[str] = ""
    """Of its line."""
    limits: ClassVar[dict[str, int]]
    """Largest values, from 1 on."""
    connector: int

    @classmethod
    def of(cls, width: int, layers: int, /, **values: int) -> Self:
        """Returns a checked tower; heads are 64 wide and feed-forwards four times the width where left out.

        Raises:
            InvalidInput: an unknown name, or a size out of range.
        """
        names = {field.name for field in fields(cls)[2:]}
        if unknown := sorted(values.keys() - names):
            raise InvalidInput(f"a tower has no {', '.join(unknown)}; it has {', '.join(sorted(names))}")
        tower = cls(width, layers, **{"heads": max(1, width // 64), "ffn": 4 * width} | values)
        for name, most in cls.limits.items():
            if not 1 <= getattr(tower, name) <= most:
                raise InvalidInput(f"{name} of a tower must be 1 to {most}, not {getattr(tower, name)}")
        if tower.width % tower.heads:
            raise InvalidInput(f"{tower.heads} heads do not divide the width of the tower, {tower.width}")
        return tower

    @staticmethod
    def parse(text: str) -> Tower:
        """Reads one line; raises `InvalidInput`."""
        match = _LINE.fullmatch(text)
        if match is None:
            example = "such as 768x12 or sound:512x17"
            raise InvalidInput(f"cannot read tower {text[:80]!r}: expected WIDTHxLAYERS[:NAME=NUMBER], {example}")
        pairs = [part.split("=") for part in match[4].split(":")[1:]]
        if len({name for name, _ in pairs}) < len(pairs):
            raise InvalidInput(f"tower {text!r} names a value twice")
        values = {name: int(value) for name, value in pairs}
        kind: type[Tower] = SoundTower if match[1] else ImageTower
        return kind.of(int(match[2]), int(match[3]), **values)

    def format(self) -> str:
        """Returns the line that `parse` reads; equal towers have equal lines."""
        usual: Tower | None = None
        if self.width % max(1, self.width // 64) == 0:
            usual = type(self).of(self.width, self.layers)
        values = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        unusual = {name: value for name, value in values.items() if usual is None or value != getattr(usual, name)}
        line = f"{self.prefix}{self.width}x{self.layers}"
        return line + "".join(f":{name}={value}" for name, value in unusual.items())

    @property
    @abstractmethod
    def connector_inputs(self) -> int:
        """Numbers of a feature that the connector reads."""

    @property
    @abstractmethod
    def encoder_weights(self) -> int:
        """Weights of the encoder."""

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """What a surrogate sees of it, besides its weights."""

    @abstractmethod
    def tokens_of(self, *size: float) -> int:
        """Returns the tokens of one image of a height and width in pixels, or of a sound of so many seconds."""

    @abstractmethod
    def flops(self, d_model: int, *size: float) -> float:
        """Returns multiply-adds x 2 for one of that size, in front of a language model of that width."""

    @abstractmethod
    def narrow(self, d_model: int, proxy: int) -> Tower:
        """Returns the tower of a proxy of width `proxy`, of which widths shrink with the language model's."""

    def connector_weights(self, d_model: int) -> int:
        """Returns the weights of the connector to a language model of that width."""
        inputs = self.connector_inputs
        return 2 * inputs + (inputs + 1) * self.connector + (self.connector + 1) * d_model

    def weights(self, d_model: int) -> int:
        """Returns all weights in front of a language model of that width."""
        return self.encoder_weights + self.connector_weights(d_model)


_SIZES = {"width": 8192, "layers": 128, "heads": 256, "ffn": 65536, "connector": 65536}


@dataclass(frozen=True, slots=True)
class ImageTower(Tower):
    """A tower of images.

    Args:
        connector: width between the connector's two linear maps.
        patch: pixels of a side of a patch.
        factor: patches of a side of what becomes one token.
        tokens: most tokens of an image: a larger one is scaled down.
        least: fewest tokens of an image: a smaller one is scaled up to them, or to `tokens` where these are fewer.
    """

    connector: int = 2560
    patch: int = 16
    factor: int = 2
    tokens: int = 256
    least: int = 64

    media: ClassVar[Media] = "images"
    limits: ClassVar[dict[str, int]] = {**_SIZES, "patch": 64, "factor": 8, "tokens": 4096, "least": 4096}

    @property
    def square(self) -> int:
        """Pixels of a side of what becomes one token."""
        return self.patch * self.factor

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns rows and columns of tokens of an image of that size in pixels, which is one frame."""
        sides = frame_size(height, width, self.square, min(self.least, self.tokens), self.tokens)
        return sides[0] // self.square, sides[1] // self.square

    @property
    def connector_inputs(self) -> int:
        return self.width * self.factor**2

    @property
    def encoder_weights(self) -> int:
        width, ffn = self.width, self.ffn
        layer = 4 * (width * width + width) + 4 * width + 2 * width * ffn + ffn + width
        return (3 * self.patch**2 + 1 + POSITIONS + 2) * width + self.layers * layer

    @property
    def sizes(self) -> dict[str, int]:
        return {"width": self.width, "layers": self.layers, "factor": self.factor, "limit": self.tokens}

    def tokens_of(self, *size: float) -> int:
        height, width = map(int, size)
        return math.prod(self.grid(height, width))

    def flops(self, d_model: int, *size: float) -> float:
        tokens = self.tokens_of(*size)
        patches = tokens * self.factor**2
        encoder = 2.0 * patches * self.encoder_weights + 4.0 * self.layers * self.width * patches**2
        return encoder + 2.0 * tokens * self.connector_weights(d_model)

    def narrow(self, d_model: int, proxy: int) -> Tower:
        """Returns the tower of a proxy of width `proxy`, for images of a sixteenth of the sides.

        Widths shrink with the language model's, heads are 8 wide, patches have a quarter of the sides and images a
        sixteenth of the tokens; layers and factor stay.
        """
        share = proxy / d_model
        heads = max(1, round(self.width * share / 8))
        return replace(
            self,
            width=8 * heads,
            heads=heads,
            ffn=max(16, round(self.ffn * share)),
            connector=max(16, round(self.connector * share)),
            patch=max(1, self.patch // 4),
            tokens=max(1, self.tokens // 16),
            least=max(1, self.least // 16),
        )


@dataclass(frozen=True, slots=True)
class SoundTower(Tower):
    """A tower of sound, of the shapes that llama.cpp's mtmd computes.

    Args:
        connector: width between the connector's two linear maps.
        channels: of the strided convolutions.
        bands: of a feature.
    """

    connector: int = 2048
    channels: int = 256
    bands: int = 128

    media: ClassVar[Media] = "sounds"
    prefix: ClassVar[str] = "sound:"
    limits: ClassVar[dict[str, int]] = {**_SIZES, "width": WAVES, "channels": 4096, "bands": 512}

    @classmethod
    def of(cls, width: int, layers: int, /, **values: int) -> Self:
        tower = super(SoundTower, cls).of(width, layers, **values)
        if WAVES % tower.width or tower.width % 2:
            raise InvalidInput(f"width of a tower of sound must be {WAVES} or an even divisor, not {tower.width}")
        if tower.bands % SUBSAMPLING:
            raise InvalidInput(f"bands of a tower of sound must be a multiple of {SUBSAMPLING}, not {tower.bands}")
        return tower

    @property
    def connector_inputs(self) -> int:
        return self.width

    @property
    def _convolutions(self) -> int:
        """Weights of the strided convolutions."""
        return 10 * self.channels + 2 * (10 + self.channels + 1) * self.channels

    @property
    def _joined(self) -> int:
        """Numbers of eight features behind the convolutions."""
        return self.channels * self.bands // SUBSAMPLING

    @property
    def encoder_weights(self) -> int:
        width, ffn = self.width, self.ffn
        attention = 4 * (width + 1) * width + width * width + 2 * width
        convolution = (width + 1) * 2 * width + (KERNEL + 1) * width + 2 * width + (width + 1) * width
        feed_forwards = 2 * ((width + 1) * ffn + (ffn + 1) * width)
        layer = attention + convolution + feed_forwards + 5 * 2 * width
        return self._convolutions + (self._joined + 1) * width + self.layers * layer

    @property
    def sizes(self) -> dict[str, int]:
        return {"width": self.width, "layers": self.layers, "channels": self.channels, "ffn": self.ffn}

    def tokens_of(self, *size: float) -> int:
        (seconds,) = size
        return math.ceil((math.floor(seconds * FEATURES_PER_SECOND + 1e-9) + 1) / SUBSAMPLING)

    def flops(self, d_model: int, *size: float) -> float:
        tokens = self.tokens_of(*size)
        layers = self.encoder_weights - self._convolutions
        # The first convolution has a fourth of the features' places, the others a sixteenth and a sixty-fourth.
        places, channels = tokens * SUBSAMPLING * self.bands, self.channels
        strided = places * channels * (9 / 4 + (9 + channels) / 16 + (9 + channels) / 64)
        attention = 2.0 * self.layers * self.width * tokens * (4 * tokens + 2)
        return 2.0 * (strided + tokens * (layers + self.connector_weights(d_model))) + attention

    def narrow(self, d_model: int, proxy: int) -> Tower:
        """Returns the tower of a proxy of width `proxy`, for sounds of 16 bands.

        Widths shrink with the language model's, the encoder's to a power of 2, and heads are 8 wide; layers stay.
        """
        share = proxy / d_model
        width = min(WAVES, max(8, 2 ** round(math.log2(self.width * share))))
        return replace(
            self,
            width=width,
            heads=width // 8,
            ffn=max(16, round(self.ffn * share)),
            connector=max(16, round(self.connector * share)),
            channels=max(4, round(self.channels * share)),
            bands=PROXY_BANDS,
        )


PROXY_BANDS = 16
"""Of the sounds that proxies hear."""


def frame_size(height: int, width: int, square: int, least: int, most: int) -> tuple[int, int]:
    """Returns height and width in pixels to which an image is scaled, as LFM2-VL's processor does it.

    Sides are multiples of `square`; their product is within `least` and `most` squares, unless the image is so narrow
    that rounding exceeds them.
    """
    sides = [max(square, round(side / square) * square) for side in (height, width)]
    if math.prod(sides) > most * square**2:
        shrink = math.sqrt((height * width) / (most * square**2))
        sides = [max(square, math.floor(side / shrink / square) * square) for side in (height, width)]
    elif math.prod(sides) < least * square**2:
        stretch = math.sqrt(least * square**2 / (height * width))
        sides = [math.ceil(side * stretch / square) * square for side in (height, width)]
    return sides[0], sides[1]
