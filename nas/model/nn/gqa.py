"""Grouped-query attention with QK-norm and RoPE (LFM2 report, section 2.2; Ainslie et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from nas.core.block import Block
from nas.model.nn.attention import (
    Attention,
    reference_cache,
    reference_canon,
    reference_heads,
    reference_output,
    reference_scores,
    visible,
)
from nas.model.nn.base import Padding, State
from nas.model.nn.primitives import bounded


class GroupedQueryAttention(Attention):
    """Causal softmax attention.

    State: (keys, values), each [B, kv_heads, S, head_dim] after QK-norm and RoPE; S tokens seen so far. With `canon`
    also what `Attention.mixed_in` keeps.
    A block with `kv=n` has no keys and values of its own: it is handed layer n's state *after* the chunk.
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model, own_kv=block.get("kv") is None)
        self.owns_cache = block.get("kv") is None

    def one_way(self) -> str:
        return "attention with canon=1" if self.canon is not None else ""

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        x, window = self.mixed_in(x, state, padding)
        keys, values = state[:2]
        if self.owns_cache:
            past, before = keys.shape[2], (keys, values)
            keys, values = self.turned(self.keys(x), past, padding), self.values(x)
            if past:
                keys, values = torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)
        q = self.turned(self.queries(x), keys.shape[2] - x.shape[1], padding)
        mixed = attend(q, keys, values, padding, softcap=self.softcap, causal=not self.both_ways)
        return self.output(mixed, x), (keys, values, *window)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    padding: Padding | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    *,
    causal: bool = True,
) -> Tensor:
    """Computes attention of the last T of S positions: [B, H, T, d] over [B, KV, S, d] -> [B, H, T, v].

    It is causal, or over all that is no padding.

    Scores are multiplied by `scale`, by default 1 / sqrt(d), and bounded by `softcap` unless that is 0; values
    [B, KV, S, v] may be of another size.
    """
    length, total = q.shape[2], keys.shape[2]
    mask = _text(length, total, q.device, padding) if not causal else None
    if softcap:
        mask = visible(length, total, q.device, padding=padding) if mask is None else mask
        return attend_bounded(q, keys, values, mask, softcap)
    masked = padding is not None or 1 < length < total or not causal
    if masked and mask is None:
        mask = visible(length, total, q.device, padding=padding)
    return F.scaled_dot_product_attention(
        q,
        keys,
        values,
        attn_mask=mask,
        is_causal=bool(not masked and length > 1),  # exports have symbols for sizes
        enable_gqa=q.shape[1] != keys.shape[1],
        scale=scale,
    )


def _text(length: int, total: int, device: torch.device, padding: Padding | None) -> Tensor:
    """Returns which of S positions are text, for each of the last T, [1, T, S] or [B, 1, T, S]."""
    if padding is None:
        return torch.ones(1, length, total, dtype=torch.bool, device=device)
    return padding.text[:, None, None, :].expand(-1, 1, length, -1)


def attend_bounded(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, softcap: float) -> Tensor:
    """Computes attention with scores b tanh(score / b), b `softcap`, where `mask` [.., T, S] is true; as `attend`."""
    if has_torch_function((q, keys, values)):  # as PyTorch's own functions do, for the contexts that stand in for them
        mixed: Tensor = handle_torch_function(attend_bounded, (q, keys, values), q, keys, values, mask, softcap)
        return mixed
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
    scores = bounded(q @ keys.mT / math.sqrt(q.shape[-1]), softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values


def reference_gqa(
    block: Block, weights: Mapping[str, Tensor], h: Tensor, cache: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Computes softmax(q k / sqrt(head_dim)) v, one head and one token at a time (Vaswani et al. 2017, equation 1).

    Args:
        block: the block, resolved.
        weights: the module's state dict.
        h: one sequence [T, D].
        cache: keys and values [kv_heads, T, head_dim] of the layer that `kv=n` names; None: the block's own.

    Returns:
        The output [T, D].
    """
    heads, kv_heads, head_dim = block.int("heads"), block.int("kv_heads"), block.int("head_dim")
    h = reference_canon(block, weights, h)
    keys, values = cache if cache is not None else reference_cache(block, weights, h)
    queries = reference_heads(block, weights, h, "q")
    out = torch.zeros(len(h), heads, head_dim, dtype=h.dtype)
    for head in range(heads):
        group = head // (heads // kv_heads)
        for t in range(len(h)):
            scores = reference_scores(block, keys[group, : t + 1] @ queries[head, t] / math.sqrt(head_dim))
            out[t, head] = scores.softmax(-1) @ values[group, : t + 1]
    return reference_output(block, weights, out, h)
