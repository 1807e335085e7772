"""Grouped-query attention with QK-norm and RoPE (LFM2 report, section 2.2; Ainslie et al. 2023; Su et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.core.block import Block
from nas.nn.base import Mixer, State
from nas.nn.primitives import Linear, RMSNorm


class GroupedQueryAttention(Mixer):
    """Causal softmax attention; query head h reads key-value head h // (heads / kv_heads).

    State: (keys, values), each [B, kv_heads, S, head_dim] after QK-norm and RoPE; S tokens seen so far.
    A block with `kv=n` has no keys and values of its own: it is handed layer n's state *after* the chunk.
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.heads, self.kv_heads = self.block.int("heads"), self.block.int("kv_heads")
        self.head_dim = self.block.int("head_dim")
        self.rope_theta = float(self.block.get("rope_theta") or 0.0)
        self.owns_cache = self.block.get("kv") is None
        norm = bool(self.block.get("qk_norm"))
        self.q = Linear(d_model, self.heads * self.head_dim)
        self.q_norm = RMSNorm(self.head_dim) if norm else None
        if self.owns_cache:
            self.k = Linear(d_model, self.kv_heads * self.head_dim)
            self.v = Linear(d_model, self.kv_heads * self.head_dim)
            self.k_norm = RMSNorm(self.head_dim) if norm else None
        self.o = Linear(self.heads * self.head_dim, d_model, residual=True)

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> State:
        """Keys and values of no token."""
        empty = torch.zeros(batch, self.kv_heads, 0, self.head_dim, dtype=dtype, device=device)
        return empty, empty

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        if self.owns_cache:
            state = self._append(x, state)
        assert state is not None, "a block with kv=n is handed layer n's state"
        keys, values = state
        q = self._heads(self.q(x), self.q_norm, keys.shape[2] - x.shape[1])
        mixed = _attend(q, keys, values)
        y: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return y, (keys, values)

    def _append(self, x: Tensor, state: State | None) -> State:
        past = state[0].shape[2] if state else 0
        keys = self._heads(self.k(x), self.k_norm, past)
        values = self._split(self.v(x))
        if state and past:
            keys, values = torch.cat([state[0], keys], 2), torch.cat([state[1], values], 2)
        return keys, values

    def _heads(self, projected: Tensor, norm: RMSNorm | None, past: int) -> Tensor:
        heads = self._split(projected)
        if norm is not None:
            heads = norm(heads)
        return rotate(heads, past, self.rope_theta) if self.rope_theta else heads

    def _split(self, projected: Tensor) -> Tensor:
        """[B, T, H * head_dim] -> [B, H, T, head_dim]."""
        return projected.view(*projected.shape[:2], -1, self.head_dim).transpose(1, 2)


def rotate(x: Tensor, past: int, theta: float) -> Tensor:
    """RoPE on [..., T, head_dim] for positions past .. past + T - 1.

    Number i of a head's first half and number i of its second half form a pair that turns by theta^(-2i / head_dim)
    radians a token: the "NeoX" order, which transformers and llama.cpp use for LFM2.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    positions = torch.arange(past, past + x.shape[-2], dtype=torch.float32, device=x.device)
    angles = torch.outer(positions, frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last T of S positions: [B, H, T, d] over [B, KV, S, d] -> [B, H, T, d]."""
    length, seen = q.shape[2], keys.shape[2]
    mask = None
    if 1 < length < seen:
        mask = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril(seen - length)
    grouped = q.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=1 < length == seen, enable_gqa=grouped
    )


def reference_gqa(
    block: Block, weights: Mapping[str, Tensor], h: Tensor, cache: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """softmax(q k / sqrt(head_dim)) v, one head and one token at a time (Vaswani et al. 2017, equation 1).

    Args:
        block: the block, resolved.
        weights: the module's state dict.
        h: one sequence [T, D].
        cache: keys and values [kv_heads, T, head_dim] of the layer that `kv=n` names; None: the block's own.

    Returns:
        The output [T, D].
    """
    heads, kv_heads, head_dim = block.int("heads"), block.int("kv_heads"), block.int("head_dim")
    keys, values = cache if cache is not None else reference_cache(block, weights, h)
    queries = _reference_heads(block, weights, h, "q")
    out = torch.zeros(len(h), heads, head_dim, dtype=h.dtype)
    for head in range(heads):
        group = head // (heads // kv_heads)
        for t in range(len(h)):
            scores = keys[group, : t + 1] @ queries[head, t] / math.sqrt(head_dim)
            out[t, head] = scores.softmax(-1) @ values[group, : t + 1]
    return out.flatten(1) @ weights["o.weight"].T


def reference_cache(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [kv_heads, T, head_dim] of one sequence [T, D]."""
    values = (h @ weights["v.weight"].T).view(len(h), -1, block.int("head_dim")).transpose(0, 1)
    return _reference_heads(block, weights, h, "k"), values


def _reference_heads(block: Block, weights: Mapping[str, Tensor], h: Tensor, name: str) -> Tensor:
    head_dim, theta = block.int("head_dim"), float(block.get("rope_theta") or 0.0)
    heads = (h @ weights[f"{name}.weight"].T).view(len(h), -1, head_dim).transpose(0, 1).clone()
    if block.get("qk_norm"):
        scale = (heads.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        heads = heads / scale * weights[f"{name}_norm.weight"]
    if theta:
        for t in range(len(h)):
            heads[:, t] = _reference_turn(heads[:, t], t, theta)
    return heads


def _reference_turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Su et al. 2024, section 3.2.2: a pair is a complex number, multiplied by exp(i m theta_i)."""
    half = x.shape[-1] // 2
    turned = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / x.shape[-1])
        turned[:, i] = x[:, i] * math.cos(angle) - x[:, half + i] * math.sin(angle)
        turned[:, half + i] = x[:, half + i] * math.cos(angle) + x[:, i] * math.sin(angle)
    return turned
