"""Mixes of a trained model, which have other blocks at some places, and their divergence from it.

The divergence at a position is KL(p || q) of next tokens, in nats: p of the trained model, q of the mix. Means are
taken over groups of positions of a text (`ScoredText`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import log
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.core.replacement import Slot, assembled
from nas.model.nn.model import Model

_ROWS = 8
"""Most windows of text that are evaluated together."""
_LOGITS_AT_ONCE = 1 << 25
"""Most logits that are computed together."""
_CACHED_LOGITS = 1 << 20
"""Most logits that a divergence is computed of at a time: intermediate results stay in a processor's cache."""


@dataclass(frozen=True, eq=False)
class ScoredText:
    """Windows of text, and groups of their positions.

    Args:
        ids: [N, T].
        groups: name -> the positions whose predictions of the next token count, bool [N, T].
    """

    ids: Tensor
    groups: Mapping[str, Tensor]

    @property
    def sha256(self) -> str:
        """Hash of ids and groups, 64 hex digits."""
        digest = hashlib.sha256(self.ids.to(torch.int64).numpy().tobytes())
        for name, where in sorted(self.groups.items()):
            digest.update(name.encode() + where.numpy().tobytes())
        return digest.hexdigest()

    def with_windows_of(self, other: ScoredText) -> ScoredText:
        """Returns both texts as one, whose groups differ."""
        ids = torch.cat([self.ids, other.ids])
        groups = {name: F.pad(where, (0, 0, 0, len(other.ids))) for name, where in self.groups.items()}
        other_groups = {name: F.pad(where, (0, 0, len(self.ids), 0)) for name, where in other.groups.items()}
        return ScoredText(ids, groups | other_groups)

    def passes(self, vocab: int) -> Iterator[Tensor]:
        """Yields the ids in order, as many windows together as a model of so large a vocabulary should evaluate."""
        rows = max(1, min(_ROWS, _LOGITS_AT_ONCE // (self.ids.shape[1] * vocab)))
        if len(self.ids):
            yield from torch.split(self.ids, rows)

    def part(self, number: int, of: int) -> ScoredText:
        """Returns every window whose number is `number` modulo `of`."""
        return self.rows(slice(number, None, of))

    def rows(self, which: slice | Tensor) -> ScoredText:
        """Returns the windows that a slice or a tensor of numbers names."""
        return ScoredText(self.ids[which], {name: where[which] for name, where in self.groups.items()})

    def means(self, values: Tensor) -> dict[str, float]:
        """Returns group -> mean of the values [N, T] at its positions, of groups that have any."""
        groups = {name: values[where] for name, where in self.groups.items()}
        return {name: float(group.mean(dtype=torch.float64)) for name, group in groups.items() if group.numel()}


class Predictions(NamedTuple):
    """Predictions of the trained model: computed once for all that is compared with them.

    Args:
        p: probabilities [B, T, V].
        mean: of log p under p, [B, T] on the CPU.
    """

    p: Tensor
    mean: Tensor

    @staticmethod
    def of(logits: Tensor) -> Predictions:
        """Returns the predictions of `logits` [B, T, V]."""
        p = logits.float().softmax(-1)
        return Predictions(p, _mean_log(p, logits))

    def divergence(self, logits: Tensor) -> Tensor:
        """Returns the divergence of the predictions of `logits` [B, T, V] at each position, [B, T] on the CPU."""
        return self.mean - _mean_log(self.p, logits)


class Compared(NamedTuple):
    """Divergences at each position [N, T]: of a mix, and of a model that predicts all tokens alike."""

    kl: Tensor
    uniform: Tensor


@torch.no_grad()
def compared(
    teacher: Model, other: Model, text: ScoredText, yield_hook: Callable[[], object] = lambda: None
) -> Compared:
    """Returns the divergences from `teacher`; the hook is called before each pass and may block."""
    device = next(teacher.parameters()).device
    kl, uniform = [], []
    for window in text.passes(teacher.layout.vocab):
        yield_hook()
        ids = window.to(device)
        expected = Predictions.of(teacher(ids))
        kl.append(expected.divergence(other(ids)))
        uniform.append(log(expected.p.shape[-1]) + expected.mean)
    return Compared(torch.cat(kl), torch.cat(uniform))


def _mean_log(p: Tensor, logits: Tensor) -> Tensor:
    """Returns the mean of log q under `p` [B, T, V], [B, T] on the CPU; `logits` [B, T, V] are those of q."""
    vocab = p.shape[-1]
    rows = max(1, _CACHED_LOGITS // vocab) if p.device.type == "cpu" else p.numel()
    parts = (torch.split(values.reshape(-1, vocab), rows) for values in (p, logits))
    means = [torch.linalg.vecdot(part, z.float()) - z.float().logsumexp(-1) for part, z in zip(*parts, strict=True)]
    return torch.cat(means).view(p.shape[:-1]).cpu()


def mix_of(teacher: Model, choice: Mapping[Slot, Block | None], blocks: Mapping[Slot, Mapping[str, Tensor]]) -> Model:
    """Returns the trained model with the blocks of `choice` (None: no block), whose state dicts are `blocks`."""
    weights = {name: tensor.cpu() for name, tensor in teacher.state_dict().items()}
    layout, state = assembled(teacher.layout, weights, choice, blocks)
    model = Model(layout, None)
    model.load_state_dict(state)
    return model.to(next(teacher.parameters()).device).eval()
