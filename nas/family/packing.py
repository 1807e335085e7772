"""Training sequences: windows over all documents one after another, and batches by step number.

There are no document masks. A short convolution and a state-space mixer carry their state over a document's end, and no
runtime's kernel resets it there, so attention is not masked either: the marks around each document are what tells a
model that a new one begins. What a step trains on follows from seed and step alone: a training that is resumed has no
position in the data to restore, and so do trainings of other layouts see the same sequences in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nas.core.errors import InvalidInput
from nas.family.tokens import Stored, Tokens

Pair = tuple[Tensor, Tensor]


class Packed:
    """The batches of a stage. Each epoch takes every window once, in an order and from an offset of its own.

    Args:
        name: of the stage, for messages.
        sources: whose training parts it reads.
        length: inputs per sequence, T.
        sequences: of a step, B.
        seed: of orders and offsets.

    Raises:
        InvalidInput: all sources together do not fill a sequence.
    """

    def __init__(self, name: str, sources: Sequence[Tokens], length: int, sequences: int, seed: int) -> None:
        self._parts = [source.train for source in sources]
        self._starts = np.concatenate([[0], np.cumsum([len(part) for part in self._parts])])
        self.length, self.sequences, self._seed = length, sequences, seed
        self.tokens = int(self._starts[-1])
        self.windows = (self.tokens - 1) // length
        if self.windows < 1:
            raise InvalidInput(
                f"{', '.join(source.name for source in sources)}: {self.tokens:,} tokens to train on, but a sequence of"
                f" stage {name!r} takes {length + 1:,}; give more text, or a smaller length in the configuration",
                where="--corpus",
            )
        self._epoch, self._order, self._offset = -1, np.zeros(0, np.int64), 0

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Pair:
        """Inputs and labels of a step (counted from 0) for worker `rank` of `world`, int64 [<= B / world, T]."""
        first = step * self.sequences
        windows = [self._window(number) for number in range(first + rank, first + self.sequences, world)]
        tokens = torch.from_numpy(np.stack(windows).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _window(self, number: int) -> NDArray[np.integer]:
        epoch, index = divmod(number, self.windows)
        if epoch != self._epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._order = generator.permutation(self.windows)
            self._offset = int(generator.integers(self.tokens - self.windows * self.length))
            self._epoch = epoch
        return self._read(self._offset + int(self._order[index]) * self.length)

    def _read(self, start: int) -> NDArray[np.integer]:
        """`length` + 1 ids from `start` on, across the ends of sources."""
        end = start + self.length + 1
        found = []
        for part, base in zip(self._parts, self._starts, strict=False):
            piece = part[max(0, start - base) : max(0, end - base)]
            if len(piece):
                found.append(piece)
        return np.concatenate(found)


def held_out_windows(tokens: Stored, length: int) -> Iterator[Pair]:
    """Inputs and labels [1, <= length] that cover `tokens` once: every id but the first is a label exactly once."""
    for start in range(0, len(tokens) - 1, length):
        window = torch.from_numpy(np.asarray(tokens[start : start + length + 1], np.int64))[None]
        yield window[:, :-1], window[:, 1:]
