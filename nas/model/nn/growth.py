"""Weights of a block from those of a smaller block of the same kind.

Index maps go from the units of the larger model to those of the smaller one. Net2Net (Chen et al. 2016, section 2.2): a
unit that is copied has its outgoing weights split among the copies. The split is uneven, by random shares that add up
to one: the function stays, and copies get different gradients, while even ones would stay copies for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nas.core.block import Block

Tensors = Mapping[str, Tensor]
_SHARES = (0.5, 1.5)


class CannotGrow(Exception):
    """The block cannot be carried over, and why: it starts from new weights."""


@dataclass(frozen=True, slots=True)
class BlockGrowth:
    """A block that grows.

    Args:
        a: the smaller block, resolved.
        b: the larger one, resolved.
        small: tensors of the smaller one.
        start: start values of the larger one.
        width: map of the residual stream.
        rng: of splits.
    """

    a: Block
    b: Block
    small: Tensors
    start: Tensors
    width: Tensor
    rng: torch.Generator

    def widened(self, name: str, *, outputs: Tensor, inputs: Tensor) -> Tensor:
        """Returns a tensor of the smaller block between copied units; see the function of that name."""
        return widened(self.small[name], self.rng, outputs=outputs, inputs=inputs)

    def hidden(self) -> Tensor:
        """Returns the map of hidden units of a feed-forward.

        Raises:
            CannotGrow: there are fewer of them.
        """
        old, new = self.a.int("width"), self.b.int("width")
        if new < old:
            raise CannotGrow(f"{new} hidden units have no room for {old}")
        return tiled(old, new)


def tiled(small: int, large: int) -> Tensor:
    """Returns the map in which unit j of the larger model is a copy of unit j mod `small`."""
    return torch.arange(large) % small


def shares(index: Tensor, rng: torch.Generator) -> Tensor:
    """Returns one positive number per copy in `index`, which add up to 1 over the copies of each unit."""
    drawn = torch.empty(len(index)).uniform_(*_SHARES, generator=rng)
    total = torch.zeros(int(index.max()) + 1).index_add(0, index, drawn)
    return drawn / total[index]


def widened(weight: Tensor, rng: torch.Generator, *, outputs: Tensor, inputs: Tensor) -> Tensor:
    """Returns [..., outputs, inputs] by the units' maps: rows of `weight` copied, columns copied and split by `rng`."""
    return weight.index_select(-2, outputs).index_select(-1, inputs) * shares(inputs, rng)


def units(heads: Tensor, inner: Tensor, size: int) -> Tensor:
    """Combines a map over heads with a map over the numbers of each: [len(heads) * len(inner)]."""
    return (heads[:, None] * size + inner).flatten()


def even(small: int, large: int) -> bool:
    """Returns whether every unit gets equally many copies, which keeps the mean square of a vector."""
    return large % small == 0
