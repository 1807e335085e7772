"""Index maps from the units of a larger model to those of a smaller one, and weights taken through them.

Net2Net (Chen et al. 2016, section 2.2): a unit that is copied has its outgoing weights split among the copies. The
split is uneven, by random shares that add up to one: the function stays, and copies get different gradients, while even
ones would stay copies for ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SHARES = (0.5, 1.5)


def tiled(small: int, large: int) -> Tensor:
    """Unit j of the larger model is a copy of unit j mod `small`."""
    return torch.arange(large) % small


def shares(index: Tensor, rng: torch.Generator) -> Tensor:
    """One positive number per copy in `index`, which add up to 1 over the copies of each unit."""
    drawn = torch.empty(len(index)).uniform_(*_SHARES, generator=rng)
    total = torch.zeros(int(index.max()) + 1).index_add(0, index, drawn)
    return drawn / total[index]


def widened(
    weight: Tensor, rng: torch.Generator, *, outputs: Tensor | None = None, inputs: Tensor | None = None
) -> Tensor:
    """A weight [..., outputs, inputs] between copied units: rows copied, columns copied and split.

    Args:
        weight: of the smaller model.
        rng: of the split.
        outputs: map of the rows; None: as they are.
        inputs: map of the columns; None: as they are.
    """
    if outputs is not None:
        weight = weight.index_select(-2, outputs)
    if inputs is not None:
        weight = weight.index_select(-1, inputs) * shares(inputs, rng)
    return weight


def even(small: int, large: int) -> bool:
    """Whether every unit gets equally many copies: then the mean square of a copied vector is that of the vector."""
    return large % small == 0
