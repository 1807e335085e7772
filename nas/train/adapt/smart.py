"""Which layers keep attention: SMART (Yang et al. 2025, Zebra-Llama, section 3.1.2 and appendix B), a baseline.

`nas adapt` selects by sums of scores and costs of any alternatives. SMART knows one cheap mixer and a number of layers
that keep theirs. Scores there are taken from the other end: what a layer that is kept gains where all others are cheap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from nas.core.block import Block
from nas.core.replacement import Slot
from nas.train.adapt.library import Library


def sensitivities(library: Library, cheap: Mapping[Slot, Block | None]) -> list[float]:
    """Returns by how much the divergence falls if one place alone keeps its block (equation 12), nats per token.

    Args:
        library: holds the cheap blocks.
        cheap: places and their blocks, by depth.
    """
    all_cheap = library.divergence(library.mix(cheap))
    others = ({slot: block for slot, block in cheap.items() if slot != kept} for kept in cheap)
    return [all_cheap - library.divergence(library.mix(each)) for each in others]


def smart_layers(sensitivity: Sequence[float], count: int) -> tuple[int, ...]:
    """Returns the layers that keep their mixer.

    The first and the last are the most sensitive ones of the first and last floor(L / count) layers. The others are
    spread between them with gaps that differ by at most one layer, so that their sensitivities add up to the most.

    Args:
        sensitivity: of each layer, L numbers.
        count: of layers that keep their mixer, 0 to L.
    """
    layers = len(sensitivity)
    assert 0 <= count <= layers
    if count < 2:  # one partition, whose ends are the same layer
        return tuple(sorted(range(layers), key=lambda i: -sensitivity[i])[:count])
    size = layers // count
    first = max(range(size), key=lambda i: sensitivity[i])
    last = max(range(layers - size, layers), key=lambda i: sensitivity[i])
    narrow, wider = divmod(last - first - count + 1, count - 1)

    @lru_cache(None)
    def rest(at: int, left: int, wide: int) -> tuple[float, tuple[int, ...]]:
        """Returns the best sum and layers behind `at`, which keeps its own; so many gaps are left, `wide` of them."""
        if left == 1:  # the last gap ends in front of `last`
            return 0.0, ()
        found = []
        for extra in {min(1, wide), 0 if wide < left else 1}:
            here = at + narrow + 1 + extra
            total, behind = rest(here, left - 1, wide - extra)
            found.append((sensitivity[here] + total, (here, *behind)))
        return max(found)

    return (first, *rest(first, count - 1, wider)[1], last)
