"""Training batches and evaluation groups of proxies.

The batch of a step depends on seed and step alone: layouts that are compared see the same data in the same order
(common random numbers), and a resumed training has no position in the data to restore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from nas.core.task import IGNORE, Task, make_task
from nas.proxy.corpus import Corpus, open_corpus
from nas.proxy.job import LmRun, TaskRun, TrainJob

_EVAL_SEED = 2**32 - 1
_EVAL_EXAMPLES = 256
_EVAL_BATCH = 32

Pair = tuple[Tensor, Tensor]


class Data(Protocol):
    """Training batches and evaluation groups of a run."""

    def batch(self, step: int) -> Pair:
        """Returns inputs and labels of a step (from 0), int64 [B, T]."""
        ...

    def groups(self) -> dict[str, Group]:
        """Returns the evaluation groups by name."""
        ...


@dataclass(frozen=True, eq=False)
class Group:
    """An evaluation group: a fixed set of examples, the same for every seed.

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
        """Yields the examples in order, a few at a time."""
        yield from zip(torch.split(self.inputs, _EVAL_BATCH), torch.split(self.labels, _EVAL_BATCH), strict=True)


class Score(NamedTuple):
    """`loss` in the group's unit, `accuracy` as a share, both per label."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(model: nn.Module, group: Group, device: torch.device) -> Score:
    """Returns the means over all labels of `group`; `model` maps ids [B, T] to logits [B, T, V]."""
    loss, right, labelled = 0.0, 0, 0
    for inputs, labels in group.batches():
        logits, wanted = model(inputs.to(device)).flatten(0, 1).float(), labels.to(device).flatten()
        loss += F.cross_entropy(logits, wanted, ignore_index=IGNORE, reduction="sum").item()
        right += int((logits.argmax(-1) == wanted).sum())
        labelled += int((wanted != IGNORE).sum())
    return Score(loss / labelled / group.unit, right / labelled)


def open_data(job: TrainJob) -> Data:
    """Opens the data of `job`.

    Raises:
        InfrastructureFailed: this host has another corpus than the job names.
    """
    match job.run:
        case LmRun() as run:
            return LmData(open_corpus(run.corpus), job.batch, run.length, run.eval_bytes, job.seed)
        case TaskRun() as run:
            return TaskData(run.task, make_task(run.task, run.settings), job.batch, job.seed)


class LmData:
    """Random windows of the training part; all domains are equally likely, whatever their size."""

    def __init__(self, corpus: Corpus, batch: int, length: int, eval_bytes: int, seed: int) -> None:
        self._corpus, self._batch, self._length, self._eval_bytes, self._seed = corpus, batch, length, eval_bytes, seed

    def batch(self, step: int) -> Pair:
        """See `Data`."""
        generator = np.random.default_rng([self._seed, step])
        domains = list(self._corpus.domains.values())
        chosen = generator.integers(len(domains), size=self._batch)
        position = generator.random(self._batch)
        windows = []
        for index, share in zip(chosen, position, strict=True):
            text = domains[index].train
            start = int(share * (text.size - self._length))
            windows.append(text[start : start + self._length + 1])
        return _next_byte(np.stack(windows))

    def groups(self) -> dict[str, Group]:
        """See `Data`."""
        return {f"lm/{name}": self._group(name) for name in self._corpus.domains}

    def _group(self, name: str) -> Group:
        """Returns windows that are spread evenly over the held-out part."""
        domain = self._corpus.domains[name]
        count = max(1, min(self._eval_bytes, domain.heldout.size - 1) // self._length)
        starts = np.linspace(0, domain.heldout.size - self._length - 1, count).astype(int)
        windows = np.stack([domain.heldout[start : start + self._length + 1] for start in starts])
        return Group(*_next_byte(windows), chance=domain.unigram_entropy, unit=float(np.log(2)))


class TaskData:
    """New examples at every step; the evaluation set has its own seed."""

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
    """Splits windows [N, T + 1] into inputs and next bytes, [N, T] each."""
    text = torch.from_numpy(windows.astype(np.int64))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
