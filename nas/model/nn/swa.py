"""Sliding-window attention (Beltagy et al. 2020, section 3.1), with the sinks of gpt-oss where the block has them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from nas.model.nn.gqa import attend_bounded
from nas.model.nn.primitives import Weights, for_examples


class Sinks(Weights):
    """One logit per query head that takes part in its softmax and carries no value; `weight` [heads]."""

    stackable = True

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    @torch.no_grad()
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Sets zeros: as much as one token that matches no better than chance."""
        self.weight.fill_(0.0)


class SlidingWindowAttention(Attention):
    """Softmax attention in which token i sees the tokens j with 0 <= i - j < window.

    State: (keys, values), each [B, kv_heads, min(S, window), head_dim], of the last of S tokens seen, after QK-norm and
    before RoPE. RoPE makes scores depend on differences of positions alone, so keys are turned when they are read, and
    the state needs no position. With `canon` also what `Attention.mixed_in` keeps. Of padded rows all S tokens are
    kept: padding may be between the tokens of a window.

    Weights: as of `Attention`; sinks.weight [heads] (sink=1).
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.window = block.int("window")
        self.sinks = Sinks(self.heads) if block.get("sink") else None

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        x, window = self.mixed_in(x, state, padding)
        keys, values = self.keys(x), self.values(x)
        if state[0].shape[2]:
            keys, values = torch.cat([state[0], keys], 2), torch.cat([state[1], values], 2)
        q = self.turned(self.queries(x), keys.shape[2] - x.shape[1], padding)
        mixed = self._attend(q, self.turned(keys, 0, padding), values, padding)
        if padding is None:
            keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
        return self.output(mixed, x), (keys, values, *window)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, padding: Padding | None) -> Tensor:
        """Attends within windows: the last T of S positions [B, H, T, d] and twice [B, KV, S, d] -> [B, H, T, d].

        A sink is one more key: of score zero, and the sink's logit through the mask.
        """
        mask = visible(q.shape[2], keys.shape[2], q.device, self.window, padding)
        if self.softcap:
            return attend_bounded(q, keys, values, mask, self.softcap)
        if self.sinks is not None:
            hidden = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
            sinks = for_examples(self.sinks.weight, q[:, :, 0, 0]).to(q.dtype)[..., None, None]
            heads = (*max(sinks.shape[:-3], hidden.shape[:-3], key=len), self.heads)  # [heads] or [B, heads]
            mask = torch.cat([sinks.expand(*heads, q.shape[2], 1), hidden.expand(*heads, -1, -1)], -1)
            keys, values = F.pad(keys, (0, 0, 1, 0)), F.pad(values, (0, 0, 1, 0))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=self.heads != self.kv_heads)


def reference_swa(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes attention one head and one token at a time over the tokens of its window.

    With a sink s, weights are exp(score_j) / (exp(s) + sum over j of exp(score_j)): gpt-oss, and llama.cpp's
    `ggml_soft_max_add_sinks`.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    heads, kv_heads, head_dim = block.int("heads"), block.int("kv_heads"), block.int("head_dim")
    h = reference_canon(block, weights, h)
    keys, values = reference_cache(block, weights, h)
    queries = reference_heads(block, weights, h, "q")
    out = torch.zeros(len(h), heads, head_dim, dtype=h.dtype)
    for head in range(heads):
        group = head // (heads // kv_heads)
        for t in range(len(h)):
            window = [j for j in range(t + 1) if t - j < block.int("window")]
            scores = reference_scores(block, keys[group, window] @ queries[head, t] / math.sqrt(head_dim))
            shares = scores.exp()
            total = shares.sum() + (weights["sinks.weight"][head].exp() if block.get("sink") else 0)
            out[t, head] = shares @ values[group, window] / total
    return reference_output(block, weights, out, h)
