"""The loss of pre-training: next-token cross-entropy, and distillation from a teacher's Top-K.

Logits of all positions would not fit into memory: 32,768 positions of 65,536 tokens are 8 GB. The loss is computed on
chunks of positions, whose logits are recomputed in the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nas.model.nn.distillation import Direction, decoupled_top_k, top_k
from nas.model.nn.model import Model

_LOGITS_AT_ONCE = 1 << 24
"""Most logits of a chunk: 64 MB of float32, of which a backward pass holds a few copies."""
_CPU_LOGITS_AT_ONCE = 1 << 23
"""The same on a CPU, where chunks of half that size take two thirds of the time."""


class Distilled(NamedTuple):
    """Distillation from a teacher.

    Args:
        teacher: of the student's vocabulary.
        weight: of its term in the loss.
        tau: temperature.
        k: tokens.
        direction: of the divergence.
    """

    teacher: Model
    weight: float
    tau: float
    k: int
    direction: Direction = "forward"


def pretraining_loss(model: Model, inputs: Tensor, labels: Tensor, distilled: Distilled | None = None) -> Tensor:
    """Returns the sum over all tokens of (1 - weight) * cross-entropy + weight * L_DTK, in nats.

    Args:
        model: the student.
        inputs: ids [B, T].
        labels: next ids, [B, T].
        distilled: the teacher, of the same vocabulary; None: cross-entropy alone.
    """
    features = model.features(inputs).flatten(0, 1)
    taught = None
    if distilled is not None:
        with torch.no_grad():
            taught = distilled.teacher.features(inputs).flatten(0, 1)
    most = _CPU_LOGITS_AT_ONCE if features.device.type == "cpu" else _LOGITS_AT_ONCE
    rows = max(1, most // model.layout.vocab)
    total = torch.zeros((), device=features.device)
    for start in range(0, len(features), rows):
        chunk = slice(start, start + rows)
        teacher_chunk = None if taught is None else taught[chunk]
        total = total + checkpoint(
            _chunk_loss, model, features[chunk], labels.flatten()[chunk], distilled, teacher_chunk, use_reentrant=False
        )
    return total


def _chunk_loss(
    model: Model, features: Tensor, labels: Tensor, distilled: Distilled | None, taught: Tensor | None
) -> Tensor:
    logits = model.logits(features).float()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    if distilled is None or taught is None:
        return loss
    with torch.no_grad():
        likeliest = top_k(distilled.teacher.logits(taught).float(), distilled.k)
    divergence = decoupled_top_k(logits, likeliest, distilled.tau, distilled.direction).sum()
    return (1 - distilled.weight) * loss + distilled.weight * divergence
