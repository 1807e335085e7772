"""Fill-in-the-middle (Bavarian et al. 2022, "Efficient training of language models to fill in the middle")."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Filled(NamedTuple):
    """A document cut at two places; `suffix_first` says in which order a model reads it (section 3: PSM or SPM)."""

    prefix: str
    middle: str
    suffix: str
    suffix_first: bool


def cut(text: str, generator: np.random.Generator) -> Filled:
    """Cuts `text` at two random characters, either order half of the time (section 3.1: character level, context free).

    Args:
        text: the document.
        generator: decides places and order.
    """
    first, last = sorted(int(place) for place in generator.integers(len(text) + 1, size=2))
    return Filled(text[:first], text[first:last], text[last:], bool(generator.random() < 0.5))
