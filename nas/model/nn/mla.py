"""Multi-head latent attention (DeepSeek-V2, section 2.1 and appendix C; PLM, section 2.1; Zebra-Llama, 3.1.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.attention import reference_turn, rotate
from nas.model.nn.base import Mixer, Padding, State
from nas.model.nn.gqa import attend
from nas.model.nn.primitives import Linear, RMSNorm, draw_uniform, linear


class KeyMaps(Linear):
    """Maps between latents [R] and keys [N] of all heads, head after head: `weight` [heads * R, N].

    Stored for the absorbed form: rows h R .. (h + 1) R map a query of head h to the space of latents.
    """

    def __init__(self, heads: int, latent: int, size: int) -> None:
        super().__init__(size, heads * latent)
        self.heads = heads

    def keys(self, latents: Tensor) -> Tensor:
        """Maps latents [B, S, R] -> keys [B, S, heads * N]."""
        maps = torch.unflatten(self.weight, -2, (self.heads, -1)).transpose(-1, -2)
        return linear(latents, maps.flatten(-3, -2))

    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Draws keys as large as their latents are."""
        draw_uniform(self.weight, math.sqrt(self.heads / self.weight.shape[-2]), rng)


class MultiHeadLatentAttention(Mixer):
    """Causal softmax attention whose keys and values are made of a latent per token.

    In training keys and values of all heads are made and attended to. Otherwise the maps that make them are absorbed:
    queries are mapped to the space of latents, which are keys and values of all heads at once, and mixed latents are
    mapped to values. Both compute the same.

    State: (latents [B, S, R], normalised, shared keys [B, S, P] after RoPE); S tokens seen so far.

    Weights, with latents of R numbers, and N numbers of a head's key without positions, P with them, V of its value:
    q.weight [heads * (N + P), D], or with a rank Q of queries q_down.weight [Q, D], q_norm.weight [Q] and
    q_up.weight [heads * (N + P), Q]; kv_down.weight [R + P, D]; kv_norm.weight [R]; k_up.weight [heads * R, N];
    v_up.weight [heads * V, R]; o.weight [D, heads * V].
    """

    projection = "o"
    stackable = True

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.heads, self.latent, self.value_dim, self.nope_dim, self.rope_dim, rank = (
            self.block.int(name) for name in ("heads", "latent", "head_dim", "nope_dim", "rope_dim", "query")
        )
        self.rope_theta = float(self.block.get("rope_theta") or 0.0)
        self.scale = 1.0 / math.sqrt(self.nope_dim + self.rope_dim)
        query_width = self.heads * (self.nope_dim + self.rope_dim)
        if rank:
            self.q_down = Linear(d_model, rank)
            self.q_norm = RMSNorm(rank)
            self.q_up = Linear(rank, query_width)
        else:
            self.q = Linear(d_model, query_width)
        self.compressed = bool(rank)
        self.kv_down = Linear(d_model, self.latent + self.rope_dim)
        self.kv_norm = RMSNorm(self.latent)
        self.k_up = KeyMaps(self.heads, self.latent, self.nope_dim)
        self.v_up = Linear(self.latent, self.heads * self.value_dim)
        self.o = Linear(self.heads * self.value_dim, d_model, residual=True)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (0, self.latent), (0, self.rope_dim)

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        past = state[0].shape[1]
        at = past if padding is None else padding.positions[:, None, -x.shape[1] :]
        latents, shared = self.kv_down(x).split([self.latent, self.rope_dim], -1)
        latents, shared = self.kv_norm(latents), self._turned(shared[:, None], at)[:, 0]
        if past:
            latents, shared = torch.cat([state[0], latents], 1), torch.cat([state[1], shared], 1)
        queries = self.q_up(self.q_norm(self.q_down(x))) if self.compressed else self.q(x)
        q = queries.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, T, N + P]
        nope, rope = q.split([self.nope_dim, self.rope_dim], -1)
        attended = self._expanded if self.training else self._absorbed
        y: Tensor = self.o(attended(nope, self._turned(rope, at), latents, shared, padding))
        return y, (latents, shared)

    def _turned(self, x: Tensor, at: int | Tensor) -> Tensor:
        return rotate(x, at, self.rope_theta) if self.rope_theta else x

    def _expanded(self, nope: Tensor, rope: Tensor, latents: Tensor, shared: Tensor, padding: Padding | None) -> Tensor:
        """Maps queries [B, H, T, N], [B, H, T, P] -> mixed values [B, T, H * V]."""
        own_keys = torch.unflatten(self.k_up.keys(latents), -1, (self.heads, -1)).transpose(1, 2)
        keys = torch.cat([own_keys, shared[:, None].expand(-1, self.heads, -1, -1)], -1)
        values = self.v_up(latents).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return attend(torch.cat([nope, rope], -1), keys, values, padding).transpose(1, 2).flatten(2)

    def _absorbed(self, nope: Tensor, rope: Tensor, latents: Tensor, shared: Tensor, padding: Padding | None) -> Tensor:
        """Computes the same by one product per head on either side of attention over latents."""
        key_maps = torch.split(self.k_up.weight, self.latent, -2)
        q = torch.stack([linear(part, maps) for part, maps in zip(nope.unbind(1), key_maps, strict=True)], 1)
        keys = torch.cat([latents, shared], -1)[:, None]
        mixed = attend(torch.cat([q, rope], -1), keys, latents[:, None], padding, self.scale)  # [B, H, T, R]
        value_maps = torch.split(self.v_up.weight, self.value_dim, -2)
        return torch.cat([linear(part, maps) for part, maps in zip(mixed.unbind(1), value_maps, strict=True)], -1)


def reference_mla(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes DeepSeek-V2's equations 9 to 19, one head and one token at a time.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    heads, latent, value, nope = (block.int(name) for name in ("heads", "latent", "head_dim", "nope_dim"))
    theta, size = float(block.get("rope_theta") or 0.0), nope + block.int("rope_dim")

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + 1e-5).sqrt() * weights[name]

    def turned(x: Tensor, position: int) -> Tensor:
        return reference_turn(x[None], position, theta)[0] if theta else x

    keys, values, out = [], [], []
    for t, x in enumerate(h):
        both = weights["kv_down.weight"] @ x
        c, shared = norm(both[:latent], "kv_norm.weight"), turned(both[latent:], t)
        maps = weights["k_up.weight"].view(heads, latent, nope)
        keys.append([torch.cat([c @ maps[head], shared]) for head in range(heads)])
        values.append((weights["v_up.weight"] @ c).view(heads, value))
        if block.int("query"):
            queries = weights["q_up.weight"] @ norm(weights["q_down.weight"] @ x, "q_norm.weight")
        else:
            queries = weights["q.weight"] @ x
        mixed = []
        for head, q in enumerate(queries.view(heads, size)):
            query = torch.cat([q[:nope], turned(q[nope:], t)])
            scores = torch.stack([query @ key[head] for key in keys]) / math.sqrt(size)
            mixed.append(sum(share * value[head] for share, value in zip(scores.softmax(0), values, strict=True)))
        out.append(weights["o.weight"] @ torch.cat([one for one in mixed if isinstance(one, Tensor)]))
    return torch.stack(out)
