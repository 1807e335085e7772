"""Batches by step number: common random numbers for all layouts, and no data position to save.

The batch of a step depends on seed and step alone, so layouts that are compared see the same data in the same order,
and a resumed or continued training goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nas.core.task import Task, make_task
from nas.proxy.corpus import Corpus, open_corpus
from nas.proxy.job import LmRun, TrainJob

_EVAL_SEED = 2**32 - 1
_EVAL_EXAMPLES = 256
_EVAL_BATCH = 32

Pair = tuple[Tensor, Tensor]


class Data(Protocol):
    """Training batches and evaluation groups of a run."""

    def batch(self, step: int) -> Pair:
        """Inputs and labels of a step (counted from 0), int64 [B, T]."""
        ...

    def groups(self) -> dict[str, Group]:
        """The evaluation groups by name."""
        ...


@dataclass(frozen=True, eq=False)
class Group:
    """One evaluation group: a fixed set of examples, the same for every seed.

    Args:
        inputs: int64 [N, T].
        labels: int64 [N, T], `nas.core.task.IGNORE` where none.
        chance: loss of a guess, in `unit`s.
        unit: nats per unit of loss (ln 2 for bits).
    """

    inputs: Tensor
    labels: Tensor
    chance: float
    unit: float

    def batches(self) -> Iterator[Pair]:
        """The examples in order, a few at a time."""
        for start in range(0, len(self.inputs), _EVAL_BATCH):
            part = slice(start, start + _EVAL_BATCH)
            yield self.inputs[part], self.labels[part]


def open_data(job: TrainJob) -> Data:
    """The data of `job`.

    Raises:
        InfrastructureFailed: this host has another corpus than the job names.
    """
    if isinstance(job.run, LmRun):
        return LmData(open_corpus(job.run.corpus), job.batch, job.run.length, job.run.eval_bytes, job.seed)
    return TaskData(job.run.task, make_task(job.run.task, job.run.settings), job.batch, job.seed)


class LmData:
    """Random windows of the training part: each domain equally often, whatever its size."""

    def __init__(self, corpus: Corpus, batch: int, length: int, eval_bytes: int, seed: int) -> None:
        self._corpus, self._batch, self._length, self._eval_bytes, self._seed = corpus, batch, length, eval_bytes, seed

    def batch(self, step: int) -> Pair:
        """See `Data`."""
        generator = np.random.default_rng([self._seed, step])
        domains = list(self._corpus.domains.values())
        chosen = generator.integers(len(domains), size=self._batch)
        place = generator.random(self._batch)
        windows = []
        for index, share in zip(chosen, place, strict=True):
            text = domains[index].train
            start = int(share * (text.size - self._length))
            windows.append(text[start : start + self._length + 1])
        return _next_byte(np.stack(windows))

    def groups(self) -> dict[str, Group]:
        """See `Data`."""
        return {f"lm/{name}": self._group(name) for name in self._corpus.domains}

    def _group(self, name: str) -> Group:
        """Windows spread evenly over the held-out part."""
        domain = self._corpus.domains[name]
        count = max(1, min(self._eval_bytes, domain.heldout.size - 1) // self._length)
        starts = np.linspace(0, domain.heldout.size - self._length - 1, count).astype(int)
        windows = np.stack([domain.heldout[start : start + self._length + 1] for start in starts])
        return Group(*_next_byte(windows), chance=domain.unigram_entropy, unit=float(np.log(2)))


class TaskData:
    """Fresh examples at every step; the evaluation set has a seed of its own."""

    def __init__(self, name: str, task: Task, batch: int, seed: int) -> None:
        self._name, self._task, self._batch, self._seed = name, task, batch, seed

    def batch(self, step: int) -> Pair:
        """See `Data`."""
        return self._draw(np.random.default_rng([self._seed, step]), self._batch)

    def groups(self) -> dict[str, Group]:
        """See `Data`."""
        inputs, labels = self._draw(np.random.default_rng(_EVAL_SEED), _EVAL_EXAMPLES)
        return {f"task/{self._name}": Group(inputs, labels, chance=self._task.chance_nats, unit=1.0)}

    def _draw(self, generator: np.random.Generator, size: int) -> Pair:
        inputs, labels = self._task.batch(generator, size)
        return torch.from_numpy(inputs), torch.from_numpy(labels)


def _next_byte(windows: NDArray[np.uint8]) -> Pair:
    """Windows [N, T + 1] as inputs and next bytes, [N, T] each."""
    text = torch.from_numpy(windows.astype(np.int64))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
