"""What the modules of softmax attention share: projections, heads, QK-norm and RoPE (Su et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nas.core.block import Block
from nas.nn.base import Mixer, State
from nas.nn.primitives import Linear, RMSNorm


class Attention(Mixer):
    """Projections of a block with the arguments `nas.blocks.attention.HEAD_ARGS`; subclasses attend.

    Query head h reads key-value head h // (heads / kv_heads).

    Args:
        block: the block.
        d_model: residual width D.
        own_kv: whether the block makes keys and values of its own.
    """

    def __init__(self, block: Block, d_model: int, *, own_kv: bool = True) -> None:
        super().__init__(block, d_model)
        self.heads, self.kv_heads = self.block.int("heads"), self.block.int("kv_heads")
        self.head_dim = self.block.int("head_dim")
        self.rope_theta = float(self.block.get("rope_theta") or 0.0)
        norm = bool(self.block.get("qk_norm"))
        self.q = Linear(d_model, self.heads * self.head_dim)
        self.q_norm = RMSNorm(self.head_dim) if norm else None
        if own_kv:
            self.k = Linear(d_model, self.kv_heads * self.head_dim)
            self.v = Linear(d_model, self.kv_heads * self.head_dim)
            self.k_norm = RMSNorm(self.head_dim) if norm else None
        self.o = Linear(self.heads * self.head_dim, d_model, residual=True)

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> State:
        """Keys and values of no token."""
        empty = torch.zeros(batch, self.kv_heads, 0, self.head_dim, dtype=dtype, device=device)
        return empty, empty

    def queries(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, heads, T, head_dim], normalised, before RoPE."""
        return self._normed(self.q(x), self.q_norm)

    def keys(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, kv_heads, T, head_dim], normalised, before RoPE."""
        return self._normed(self.k(x), self.k_norm)

    def values(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, kv_heads, T, head_dim]."""
        return self._split(self.v(x))

    def turned(self, heads: Tensor, past: int) -> Tensor:
        """`heads` [B, H, T, head_dim] with RoPE at positions past .. past + T - 1, where the block has positions."""
        return rotate(heads, past, self.rope_theta) if self.rope_theta else heads

    def output(self, mixed: Tensor) -> Tensor:
        """[B, heads, T, head_dim] -> [B, T, D]."""
        y: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return y

    def _normed(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        heads = self._split(projected)
        return heads if norm is None else norm(heads)

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


def reference_heads(block: Block, weights: Mapping[str, Tensor], h: Tensor, name: str) -> Tensor:
    """Queries ("q") or keys ("k") [H, T, head_dim] of one sequence [T, D], one token's RoPE at a time."""
    head_dim, theta = block.int("head_dim"), float(block.get("rope_theta") or 0.0)
    heads = (h @ weights[f"{name}.weight"].T).view(len(h), -1, head_dim).transpose(0, 1).clone()
    if block.get("qk_norm"):
        scale = (heads.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        heads = heads / scale * weights[f"{name}_norm.weight"]
    if theta:
        for t in range(len(h)):
            heads[:, t] = _reference_turn(heads[:, t], t, theta)
    return heads


def reference_cache(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [kv_heads, T, head_dim] of one sequence [T, D]."""
    values = (h @ weights["v.weight"].T).view(len(h), -1, block.int("head_dim")).transpose(0, 1)
    return reference_heads(block, weights, h, "k"), values


def _reference_turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Su et al. 2024, section 3.2.2: a pair is a complex number, multiplied by exp(i m theta_i)."""
    half = x.shape[-1] // 2
    turned = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / x.shape[-1])
        turned[:, i] = x[:, i] * math.cos(angle) - x[:, half + i] * math.sin(angle)
        turned[:, half + i] = x[:, half + i] * math.cos(angle) + x[:, i] * math.sin(angle)
    return turned
