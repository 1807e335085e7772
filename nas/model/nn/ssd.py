"""State-space duality: a linear recurrence with one decay per head, in chunks (Dao and Gu 2024, section 6).

    memory_t = exp(log_decay_t) memory_{t-1} + u_t b_t^T          y_t = memory_t c_t

Within a chunk this is masked attention, which is matrix products; from chunk to chunk only the memory is handed on. So
the work grows with the length, not with its square.

Decays, whose products over a chunk are exponentials of sums, and memories, which add up small numbers over a whole
sequence, are float32 at least, whatever the inputs are: here and in the recurrences of `nas.model.nn.gdn` and
`nas.model.nn.gla`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64
"""Tokens: work within a chunk grows with it, the number of steps from chunk to chunk shrinks."""


def ssd(u: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Runs the recurrence over a sequence; heads are ordered group after group.

    Under autocast its matrix products have autocast's precision, as in the published kernels.

    Args:
        u: what enters the memory [B, T, H, P].
        log_decay: at most 0 [B, T, H].
        b: where it is written [B, T, G, N].
        c: where it is read [B, T, G, N].
        memory: before the first token [B, H, P, N].

    Returns:
        y [B, T, H, P], of u's type, and the memory after the last token, float32 at least.
    """
    kind = u.dtype
    u, log_decay, b, c, memory = float32_at_least(u, log_decay, b, c, memory)
    batch, length, heads, size = u.shape
    groups, state = b.shape[2:]
    chunk = min(_CHUNK, length)
    u, log_decay, b, c = (in_chunks(tensor, chunk) for tensor in (u, log_decay, b, c))
    u = torch.unflatten(u, 3, (groups, -1)).transpose(2, 3)  # [B, chunks, G, Q, R, P], R heads in a group
    b, c = b.transpose(2, 3), c.transpose(2, 3)  # [B, chunks, G, Q, N]
    total = torch.unflatten(log_decay.cumsum(2), 3, (groups, -1)).transpose(2, 3)  # [B, chunks, G, Q, R]

    within = _attend(u, total, c @ b.mT)
    remaining = (total[:, :, :, -1:] - total).exp()[..., None]
    added = b.mT @ (u * remaining).flatten(-2)  # [B, chunks, G, N, R P]
    decays = total[:, :, :, -1].exp().repeat_interleave(size, -1)[..., None, :]
    carried = memory.reshape(batch, groups, -1, state).mT  # [B, G, N, R P]
    before = []
    for step in range(u.shape[1]):
        before.append(carried)
        carried = decays[:, step] * carried + added[:, step]
    across = torch.unflatten(c @ torch.stack(before, 1), -1, (-1, size)) * total.exp()[..., None]

    y = (within + across).transpose(2, 3).reshape(batch, -1, heads, size)
    return y[:, :length].to(kind), carried.mT.reshape(batch, heads, size, state)


def float32_at_least(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors in float32, or in their own type if it is wider."""
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """Maps [B, T, ...] -> [B, chunks, chunk, ...]; zeros after the end neither add to the memory nor decay it."""
    missing = -x.shape[1] % chunk
    padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) if missing else x
    return torch.unflatten(padded, 1, (-1, chunk))


def _attend(u: Tensor, total: Tensor, scores: Tensor) -> Tensor:
    """Computes masked attention within a chunk: [..., Q, R, P] with scores [..., Q, Q] and decays from j to i."""
    total, u = total.mT, u.transpose(-3, -2)  # [..., R, Q] and [..., R, Q, P]
    spans = total[..., :, None] - total[..., None, :]
    later = torch.ones(spans.shape[-2:], dtype=torch.bool, device=u.device).triu(1)
    weights = scores[..., None, :, :] * spans.masked_fill(later, -torch.inf).exp()
    return (weights @ u).transpose(-3, -2)
