"""Recipes of artifacts: `nas.runtimes.recipe`, with these pools.

The header is the artifact's own header and its programs, a few KB each; recipe.h makes the same bytes.

    bytes 0 COUNT        random bytes: weights in 4 and 8 bits
    f32 SHIFT COUNT      uniform numbers: random integers of 24 bits over 2^SHIFT
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nas.runtimes.recipe import Bytes, uniform_floats


@dataclass(frozen=True, slots=True)
class Pool:
    """Random numbers that parts are cut from.

    Args:
        kind: of numbers.
        shift: of floats, how many bits the integers are shifted down.
        count: of numbers.
    """

    kind: Literal["bytes", "f32"]
    shift: int
    count: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * (1 if self.kind == "bytes" else 4)

    def describe(self) -> str:
        """See the module."""
        return f"{self.kind} {self.shift} {self.count}"

    def shape(self, raw: Bytes) -> Bytes:
        """See `nas.runtimes.recipe.Pool`."""
        return raw if self.kind == "bytes" else uniform_floats(raw, self.shift)
