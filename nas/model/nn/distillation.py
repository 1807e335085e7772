"""Distillation from a teacher's likeliest tokens: the decoupled, tempered Top-K objective (LFM2 report, 3.3).

Per token, with T the teacher's K likeliest tokens, P_T(T) and P_S(T) their total mass for teacher and student, and
p^(tau) a distribution at temperature tau:

    L_DTK = KL(Bern(P_T(T)) || Bern(P_S(T)))                                                      (1)
          + P_T(T) * tau^2 * KL(P_T(. | T)^(tau) || P_S(. | T)^(tau))                             (2)

The reverse divergence exchanges both arguments of each KL and keeps the weight P_T(T) (appendix A.2, equation 17), so
that a student gains nothing by taking mass away from T.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Direction = Literal["forward", "reverse"]


class TopK(NamedTuple):
    """A teacher's likeliest tokens: their log-probabilities `log_p` [..., K] and `ids` [..., K]."""

    log_p: Tensor
    ids: Tensor


def top_k(logits: Tensor, k: int) -> TopK:
    """Returns the `k` likeliest tokens of each position: [..., V] -> [..., k]."""
    values, ids = logits.topk(k, -1)
    return TopK(values - logits.logsumexp(-1, keepdim=True), ids)


def decoupled_top_k(logits: Tensor, teacher: TopK, tau: float, direction: Direction = "forward") -> Tensor:
    """Returns L_DTK per position.

    Args:
        logits: the student's, [..., V].
        teacher: K <= V tokens per position.
        tau: temperature of the conditional term, at least 1.
        direction: forward: KL(teacher || student), which spreads the student over all that the teacher says; reverse:
            KL(student || teacher), which keeps it from what the teacher does not say.

    Returns:
        Nats, [...]; never negative but for rounding.
    """
    top = logits.gather(-1, teacher.ids)
    teacher_log_p, student_log_p = (teacher.log_p / tau).log_softmax(-1), (top / tau).log_softmax(-1)
    p, q = (teacher_log_p, student_log_p) if direction == "forward" else (student_log_p, teacher_log_p)
    conditional = (p.exp() * (p - q)).sum(-1)
    if top.shape == logits.shape:  # nothing is outside: ordinary distillation at temperature tau
        return tau**2 * conditional
    normaliser = logits.logsumexp(-1)
    # The mass outside is summed: 1 - mass would be rounded to nothing where the prediction is certain.
    outside = logits.scatter(-1, teacher.ids, -torch.inf).logsumexp(-1) - normaliser
    inside = top.logsumexp(-1) - normaliser
    mass = teacher.log_p.logsumexp(-1)
    rest = torch.special.expm1(mass).neg().clamp_min(0)
    if direction == "forward":
        member = mass.exp() * (mass - inside) + torch.special.xlogy(rest, rest) - rest * outside
    else:
        least = torch.finfo(rest.dtype).tiny
        member = inside.exp() * (inside - mass) + outside.exp() * (outside - rest.clamp_min(least).log())
    loss: Tensor = member + mass.exp() * tau**2 * conditional
    return loss
