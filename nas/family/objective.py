"""What pre-training minimises: next-token cross-entropy, and the teacher's Top-K (LFM2 report, section 3.3).

The decoupled, tempered Top-K objective per token, with T the teacher's K likeliest tokens, P_T(T) and P_S(T) their
total mass for teacher and student, and p^(tau) a distribution at temperature tau:

    L_DTK = KL(Bern(P_T(T)) || Bern(P_S(T)))                                                      (1)
          + P_T(T) * tau^2 * KL(P_T(. | T)^(tau) || P_S(. | T)^(tau))                             (2)

Logits of all positions at once would not fit: 32,768 positions of 65,536 tokens are 8 GB. So the loss goes over
positions in pieces and computes each piece's logits again in the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nas.nn.model import Model

_LOGITS_AT_ONCE = 1 << 24
"""Numbers: 64 MB of float32, of which a backward pass holds a few copies."""


class TopK(NamedTuple):
    """What is kept of a teacher's prediction: `log_p` [..., K] of the likeliest tokens `ids` [..., K]."""

    log_p: Tensor
    ids: Tensor


class Distilled(NamedTuple):
    """How a teacher takes part: `weight` of its term in the loss, temperature `tau`, `k` tokens."""

    teacher: Model
    weight: float
    tau: float
    k: int


def pretraining_loss(model: Model, inputs: Tensor, labels: Tensor, distilled: Distilled | None = None) -> Tensor:
    """Sum over all tokens of (1 - weight) * cross-entropy + weight * L_DTK, in nats.

    Args:
        model: the student.
        inputs: ids [B, T].
        labels: the ids that follow, [B, T].
        distilled: the teacher, of the same vocabulary; None: cross-entropy alone.
    """
    features = model.features(inputs).flatten(0, 1)
    taught = None
    if distilled is not None:
        with torch.no_grad():
            taught = distilled.teacher.features(inputs).flatten(0, 1)
    piece = max(1, _LOGITS_AT_ONCE // model.layout.vocab)
    total = torch.zeros((), device=features.device)
    for start in range(0, len(features), piece):
        part = slice(start, start + piece)
        theirs = None if taught is None else taught[part]
        total = total + checkpoint(
            _piece_loss, model, features[part], labels.flatten()[part], distilled, theirs, use_reentrant=False
        )
    return total


def _piece_loss(
    model: Model, features: Tensor, labels: Tensor, distilled: Distilled | None, taught: Tensor | None
) -> Tensor:
    logits = model.logits(features).float()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    if distilled is None or taught is None:
        return loss
    with torch.no_grad():
        known = top_k(distilled.teacher.logits(taught).float(), distilled.k)
    return (1 - distilled.weight) * loss + distilled.weight * decoupled_top_k(logits, known, distilled.tau).sum()


def top_k(logits: Tensor, k: int) -> TopK:
    """The `k` likeliest tokens of each position: [..., V] -> [..., k]."""
    values, ids = logits.topk(k, -1)
    return TopK(values - logits.logsumexp(-1, keepdim=True), ids)


def decoupled_top_k(logits: Tensor, teacher: TopK, tau: float) -> Tensor:
    """L_DTK per position.

    Args:
        logits: the student's, [..., V].
        teacher: K < V tokens per position.
        tau: temperature of the conditional term, at least 1.

    Returns:
        Nats, [...]; never negative but for rounding.
    """
    normaliser = logits.logsumexp(-1)
    known = logits.gather(-1, teacher.ids)
    # The mass outside is summed, not taken as 1 - mass: of a sure prediction nothing would be left of it.
    outside = logits.scatter(-1, teacher.ids, -torch.inf).logsumexp(-1) - normaliser
    inside = known.logsumexp(-1) - normaliser
    mass = teacher.log_p.logsumexp(-1)
    rest = torch.special.expm1(mass).neg().clamp_min(0)
    member = mass.exp() * (mass - inside) + torch.special.xlogy(rest, rest) - rest * outside
    theirs, ours = (teacher.log_p / tau).log_softmax(-1), (known / tau).log_softmax(-1)
    conditional = (theirs.exp() * (theirs - ours)).sum(-1)
    loss: Tensor = member + mass.exp() * tau**2 * conditional
    return loss


def reference_decoupled_top_k(student: Tensor, teacher: Tensor, k: int, tau: float) -> Tensor:
    """L_DTK of one position from two whole distributions [V], written as the report's equations stand.

    Args:
        student: probabilities.
        teacher: probabilities.
        k: size of the teacher's Top-K set.
        tau: temperature.
    """
    chosen = teacher.argsort(descending=True)[:k].tolist()
    p_teacher = sum((teacher[x] for x in chosen), torch.zeros((), dtype=teacher.dtype))
    p_student = sum((student[x] for x in chosen), torch.zeros((), dtype=student.dtype))
    bernoulli = p_teacher * (p_teacher / p_student).log()
    if p_teacher < 1:
        bernoulli = bernoulli + (1 - p_teacher) * ((1 - p_teacher) / (1 - p_student)).log()
    theirs = torch.stack([(teacher[x] / p_teacher) ** (1 / tau) for x in chosen])
    ours = torch.stack([(student[x] / p_student) ** (1 / tau) for x in chosen])
    theirs, ours = theirs / theirs.sum(), ours / ours.sum()
    conditional = sum((p * (p / q).log() for p, q in zip(theirs, ours, strict=True)), torch.zeros(()))
    return bernoulli + p_teacher * tau**2 * conditional
