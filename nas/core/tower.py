"""Towers: the shape of what reads images in front of a language model, and how many tokens an image becomes.

An encoder of SigLIP2's form sees patches; each square of `factor` x `factor` patches becomes one token, which a
connector of two linear maps brings to the language model's width (LFM2 report, section 5.1.1). On one line a tower is
its width and layers, then whatever is not the default:

    768x12                                          of LFM2-VL-450M
    1152x27:heads=16:ffn=4304:tokens=128            of LFM2-VL-1.6B, with at most 128 tokens for an image
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace

from nas.core.errors import InvalidInput

POSITIONS = 256
"""Learnt positions, a square of 16 x 16, which are interpolated to those of an image."""
_LINE = re.compile(r"(\d{1,5})x(\d{1,3})((?::[a-z]+=\d{1,6})*)")
_MOST = {"width": 8192, "layers": 128, "heads": 256, "ffn": 65536, "connector": 65536, "patch": 64, "factor": 8}


@dataclass(frozen=True, slots=True)
class Tower:
    """An encoder of images and its connector. `Tower.of` and `Tower.parse` check it.

    Args:
        width: of the encoder.
        layers: of the encoder.
        heads: of its attention.
        ffn: width of its feed-forwards.
        connector: width between the connector's two linear maps.
        patch: pixels of a side of a patch.
        factor: patches of a side of what becomes one token.
        tokens: most of an image: a larger one is scaled down.
        least: to so many tokens a smaller image is scaled up, or to `tokens` where these are fewer.

    Example:
        >>> Tower.parse("768x12:tokens=64").grid(512, 512)
        (8, 8)
        >>> Tower.parse("768x12:heads=12").format()
        '768x12'
    """

    width: int
    layers: int
    heads: int
    ffn: int
    connector: int = 2560
    patch: int = 16
    factor: int = 2
    tokens: int = 256
    least: int = 64

    @staticmethod
    def of(width: int, layers: int, /, **values: int) -> Tower:
        """Returns a checked tower; heads are 64 wide and feed-forwards four times the width where left out.

        Raises:
            InvalidInput: an unknown name, or a size out of range.
        """
        names = {field.name for field in fields(Tower)[2:]}
        if unknown := sorted(values.keys() - names):
            raise InvalidInput(f"a tower has no {', '.join(unknown)}; it has {', '.join(sorted(names))}")
        tower = Tower(width, layers, **{"heads": max(1, width // 64), "ffn": 4 * width} | values)
        for name, most in _MOST.items():
            if not 1 <= getattr(tower, name) <= most:
                raise InvalidInput(f"{name} of a tower must be 1 to {most}, not {getattr(tower, name)}")
        if not (1 <= tower.tokens <= 4096 and 1 <= tower.least <= 4096):
            raise InvalidInput(f"an image has 1 to 4096 tokens, not {tower.tokens} (at least {tower.least})")
        if tower.width % tower.heads:
            raise InvalidInput(f"{tower.heads} heads do not divide the width of the tower, {tower.width}")
        return tower

    @staticmethod
    def parse(text: str) -> Tower:
        """Reads one line; raises `InvalidInput`."""
        match = _LINE.fullmatch(text)
        if match is None:
            raise InvalidInput(f"cannot read tower {text[:80]!r}: expected WIDTHxLAYERS[:NAME=NUMBER], such as 768x12")
        pairs = [part.split("=") for part in match[3].split(":")[1:]]
        if len({name for name, _ in pairs}) < len(pairs):
            raise InvalidInput(f"tower {text!r} names a value twice")
        return Tower.of(int(match[1]), int(match[2]), **{name: int(value) for name, value in pairs})

    def format(self) -> str:
        """Returns the line that `parse` reads; equal towers have equal lines."""
        usual = Tower.of(self.width, self.layers) if self.width % max(1, self.width // 64) == 0 else None
        values = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        unusual = {name: value for name, value in values.items() if usual is None or value != getattr(usual, name)}
        return f"{self.width}x{self.layers}" + "".join(f":{name}={value}" for name, value in unusual.items())

    @property
    def square(self) -> int:
        """Pixels of a side of what becomes one token."""
        return self.patch * self.factor

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns rows and columns of tokens of an image of that size in pixels, which is one frame."""
        sides = frame_size(height, width, self.square, min(self.least, self.tokens), self.tokens)
        return sides[0] // self.square, sides[1] // self.square

    @property
    def encoder_weights(self) -> int:
        """Weights of the encoder."""
        width, ffn = self.width, self.ffn
        layer = 4 * (width * width + width) + 4 * width + 2 * width * ffn + ffn + width
        return (3 * self.patch**2 + 1 + POSITIONS + 2) * width + self.layers * layer

    def connector_weights(self, d_model: int) -> int:
        """Returns the weights of the connector to a language model of that width."""
        inputs = self.width * self.factor**2
        return 2 * inputs + (inputs + 1) * self.connector + (self.connector + 1) * d_model

    def weights(self, d_model: int) -> int:
        """Returns all weights in front of a language model of that width."""
        return self.encoder_weights + self.connector_weights(d_model)

    def flops(self, d_model: int, height: int, width: int) -> float:
        """Returns multiply-adds x 2 for one image of that size in pixels."""
        rows, columns = self.grid(height, width)
        tokens = rows * columns
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
