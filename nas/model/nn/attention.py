"""Shared parts of softmax attention modules: projections, heads, QK-norm and RoPE (Su et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nas.core.block import Block
from nas.model.nn.base import Mixer, Padding, State
from nas.model.nn.growth import BlockGrowth, CannotGrow, tiled, units
from nas.model.nn.primitives import DepthwiseConv, Linear, RMSNorm, Weights, reference_conv
from nas.model.nn.rope import rope_divisors, turned_numbers

_SHARP = 64
"""With QK-norm, a score is at most gain^2 sqrt(head size). Smaller heads start with gains that make it that of heads of
this size: else attention over many tokens starts near an average of them and cannot be anything else for long."""
_SPARK = 1e-3
"""Scale of start values in added query and key numbers: nothing to the function, and enough for gradients,
which are zero where both are."""


class Divisors(Weights):
    """What the angles of RoPE's pairs are divided by: buffer `weight` [pairs], ones at the start.

    It is float32 where transformers makes a model in half precision, in which angles of thousands of tokens are wrong.
    """

    weight: Tensor

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(pairs, dtype=torch.float32))

    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Sets ones."""
        self.weight.fill_(1.0)


class Attention(Mixer):
    """Projections of a block with the arguments `nas.model.blocks.attention.HEAD_ARGS`; subclasses attend.

    Query head h reads key-value head h // (heads / kv_heads).

    Weights: q.weight [heads * head_dim, D]; k.weight, v.weight [kv_heads * head_dim, D] if `own_kv`;
    o.weight [D, heads * head_dim]; q_norm.weight, k_norm.weight [head_dim] (qk_norm=1; k_norm if `own_kv`), as long as
    the rows of q and k with qk_norm_wide=1; gate.weight [heads, D] (gate=1), [heads * head_dim, D] (gate_wide=1);
    q.bias, k.bias, v.bias, as long as the rows of their weights (qkv_bias=1; k and v if `own_kv`);
    rope_short.weight, rope_long.weight [pairs that turn] (rope_long; buffers);
    canon.weight [D, K], last tap for the current token. RoPE pairs number i of the first half of what it turns, a head
    or its first `rope_dim` numbers, with number i of the second.

    Args:
        block: the block.
        d_model: residual width D.
        own_kv: whether the block makes keys and values of its own.
    """

    projection = "o"
    stackable = True

    def __init__(self, block: Block, d_model: int, *, own_kv: bool = True) -> None:
        super().__init__(block, d_model)
        self.heads, self.kv_heads = self.block.int("heads"), self.block.int("kv_heads")
        self.head_dim = self.block.int("head_dim")
        self.rope_theta = float(self.block.get("rope_theta") or 0.0)
        self.rope_dim, self.rope_divisors = turned_numbers(self.block), rope_divisors(self.block)
        self.rope_tokens = self.block.int("rope_long")
        if self.rope_tokens:
            self.rope_short, self.rope_long = Divisors(self.rope_dim // 2), Divisors(self.rope_dim // 2)
        norm, bias = bool(self.block.get("qk_norm")), bool(self.block.get("qkv_bias"))
        self.canon = DepthwiseConv(d_model, self.block.int("canon")) if self.block.get("canon") else None
        self.q = Linear(d_model, self.heads * self.head_dim, bias=bias)
        gain = max(1.0, (_SHARP / self.head_dim) ** 0.25)
        wide = bool(self.block.get("qk_norm_wide"))
        self.q_norm = RMSNorm(self.head_dim * (self.heads if wide else 1), gain=gain) if norm else None
        if own_kv:
            self.k = Linear(d_model, self.kv_heads * self.head_dim, bias=bias)
            self.v = Linear(d_model, self.kv_heads * self.head_dim, bias=bias)
            self.k_norm = RMSNorm(self.head_dim * (self.kv_heads if wide else 1), gain=gain) if norm else None
        self.softcap = float(self.block.get("softcap") or 0.0)
        gates = self.heads * (self.head_dim if self.block.get("gate_wide") else 1)
        self.gate = Linear(d_model, gates) if self.block.get("gate") else None
        self.o = Linear(self.heads * self.head_dim, d_model, residual=True)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        empty = (self.kv_heads, 0, self.head_dim)
        return (empty, empty) if self.canon is None else (empty, empty, (self.canon.kernel - 1, self.d_model))

    def mixed_in(self, x: Tensor, state: State, padding: Padding | None = None) -> tuple[Tensor, State]:
        """Adds the block's convolution, if it has one, to its input [B, T, D].

        Returns:
            The sum [B, T, D], and what of a state the convolution keeps: (window [B, canon - 1, D],), the last inputs,
            oldest first; () without one.
        """
        if self.canon is None:
            return x, ()
        window = torch.cat([state[2], x], 1)
        return x + self.canon(window), (self.canon.last_rows(window, padding),)

    def queries(self, x: Tensor) -> Tensor:
        """Maps [B, T, D] -> [B, heads, T, head_dim], normalised, before RoPE."""
        return self._normed(self.q(x), self.q_norm)

    def keys(self, x: Tensor) -> Tensor:
        """Maps [B, T, D] -> [B, kv_heads, T, head_dim], normalised, before RoPE."""
        return self._normed(self.k(x), self.k_norm)

    def values(self, x: Tensor) -> Tensor:
        """Maps [B, T, D] -> [B, kv_heads, T, head_dim]."""
        return self._split(self.v(x))

    def turned(self, heads: Tensor, past: int, padding: Padding | None = None) -> Tensor:
        """Applies RoPE to `heads` [B, H, T, head_dim] where the block has positions.

        They are past .. past + T - 1, or those of the last T tokens of padded rows. With `rope_long`, the last of them
        says whether the text is a long one; keys that are cached stay as they were turned.
        """
        if not self.rope_theta:
            return heads
        at = past if padding is None else padding.positions[:, None, -heads.shape[2] :]
        divisors: Tensor | tuple[float, ...] = self.rope_divisors
        if self.rope_tokens:
            total = past + heads.shape[2] if isinstance(at, int) else int(at.max()) + 1
            divisors = (self.rope_long if total > self.rope_tokens else self.rope_short).weight
        turned = rotate(heads[..., : self.rope_dim], at, self.rope_theta, divisors)
        return turned if self.rope_dim == self.head_dim else torch.cat([turned, heads[..., self.rope_dim :]], -1)

    def output(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Maps [B, heads, T, head_dim] -> [B, T, D]; x [B, T, D] is what gates are computed from."""
        heads = mixed.transpose(1, 2)
        if self.gate is not None:
            heads = heads * torch.sigmoid(torch.unflatten(self.gate(x), -1, (self.heads, -1)))
        y: Tensor = self.o(heads.flatten(2))
        return y

    def _normed(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        if norm is not None and norm.weight.shape[-1] == projected.shape[-1]:
            return self._split(norm(projected))
        heads = self._split(projected)
        return heads if norm is None else norm(heads)

    def _split(self, projected: Tensor) -> Tensor:
        """Maps [B, T, H * head_dim] -> [B, H, T, head_dim]."""
        return projected.view(*projected.shape[:2], -1, self.head_dim).transpose(1, 2)

    @staticmethod
    def grow(growing: BlockGrowth) -> dict[str, Tensor]:
        """Heads are copied, each with the key-value head that it reads; heads grow by whole factors.

        RoPE turns pair i of a head of d numbers like pair m i of one of m d, so that is where its numbers go; scores,
        which are divided by sqrt(m d) there, need the factor sqrt(m) on queries. With QK-norm the mean square is over m
        times as many numbers: projections times sqrt(m) keep it, and the gain of queries makes up for it.
        """
        a, b, small, width = growing.a, growing.b, growing.small, growing.width
        rope = ("rope_theta", "rope_factor", "rope_tokens", "rope_yarn", "rope_long", "rope_dim")
        for name in (
            "qk_norm",
            "qk_norm_wide",
            "qkv_bias",
            "softcap",
            "gate",
            "gate_wide",
            *rope,
            "canon",
            "window",
            "sink",
        ):
            if name in {arg.name for arg in a.spec.args} and a.get(name) != b.get(name):
                raise CannotGrow(f"{name} differs")
        if a.get("qkv_bias"):
            raise CannotGrow("biases on queries, keys and values have no rule")
        if a.get("qk_norm_wide") or a.get("gate") or a.get("rope_long"):
            raise CannotGrow("QK-norm over all heads together, gates on heads, and rope_long have no rule")
        d, wide = a.int("head_dim"), b.int("head_dim")
        if wide % d:
            raise CannotGrow(
                f"heads of {wide} numbers are no whole multiple of {d}, and RoPE's frequencies do not meet"
            )
        m = wide // d
        if m > 1 and a.int("rope_dim"):
            raise CannotGrow("heads of which RoPE turns a part have no rule")
        if m > 1 and a.get("rope_yarn"):
            raise CannotGrow("YaRN rounds its bounds to whole pairs, of which larger heads have more")
        queries, kv = _copied_heads(a, b)
        norm = bool(a.get("qk_norm"))
        grown = {"q.weight": _projected(growing, "q.weight", queries, d, m, math.sqrt(m))}
        if norm:
            grown["q_norm.weight"] = _gain(small["q_norm.weight"], m) / math.sqrt(m)
        if "k.weight" in small:
            grown["k.weight"] = _projected(growing, "k.weight", kv, d, m, math.sqrt(m) if norm else 1.0)
            values = units(kv, tiled(d, wide), d)
            grown["v.weight"] = growing.widened("v.weight", outputs=values, inputs=width)
            if norm:
                grown["k_norm.weight"] = _gain(small["k_norm.weight"], m)
        if "canon.weight" in small:
            grown["canon.weight"] = small["canon.weight"][width]
        if "sinks.weight" in small:
            grown["sinks.weight"] = small["sinks.weight"][queries]
        read = units(queries, tiled(d, wide), d)
        return grown | {"o.weight": growing.widened("o.weight", outputs=width, inputs=read)}


def _copied_heads(a: Block, b: Block) -> tuple[Tensor, Tensor]:
    """Returns, for each query and each key-value head of `b`, the head of `a` that it copies."""
    old, new = a.int("kv_heads"), b.int("kv_heads")
    group, slots = a.int("heads") // old, b.int("heads") // new
    kv = tiled(old, new)
    if new < old or int(kv.bincount().min()) * slots < group:
        raise CannotGrow(f"{b.int('heads')}/{new} heads have no room for all of {a.int('heads')}/{old}")
    queries, filled = [], [0] * old
    for head in kv.tolist():
        for _ in range(slots):
            queries.append(head * group + filled[head] % group)
            filled[head] += 1
    return torch.tensor(queries), kv


def _projected(growing: BlockGrowth, name: str, heads: Tensor, d: int, m: int, factor: float) -> Tensor:
    """Returns queries or keys: each old number `factor` times in its place, next to nothing in the new ones."""
    old = growing.widened(name, outputs=units(heads, torch.arange(d), d), inputs=growing.width) * factor
    new = (growing.start[name] * (_SPARK if m > 1 else 0.0)).view(len(heads), m * d, -1)
    new[:, _places(d, m)] = old.view(len(heads), d, -1)
    return new.flatten(0, 1)


def _gain(gain: Tensor, m: int) -> Tensor:
    wide = torch.ones(m * len(gain))
    wide[_places(len(gain), m)] = gain
    return wide


def _places(d: int, m: int) -> Tensor:
    """Returns where the d numbers of a head go in one of m d: pair i becomes pair m i; halves are d / 2 apart."""
    first = m * torch.arange(d // 2)
    return torch.cat([first, first + m * d // 2])


def visible(
    length: int, total: int, device: torch.device, window: int | None = None, padding: Padding | None = None
) -> Tensor:
    """Returns which of S positions each of the last T sees: bool [T, S], or [B, 1, T, S] of padded rows.

    A token of a padded row sees itself even where it is padding: a softmax over nothing is not a number.
    """
    causal = torch.ones(length, total, dtype=torch.bool, device=device).tril(total - length)
    if padding is None:
        return causal if window is None else causal.triu(total - length - window + 1)
    mask = causal & padding.text[:, None, None, -total:]
    if window is not None:
        at = padding.positions[:, None, -total:]
        mask = mask & (at[..., -length:, None] - at[..., None, :] < window)
    return mask | causal.triu(total - length)


def rotate(x: Tensor, at: int | Tensor, theta: float, divisors: Tensor | tuple[float, ...] = ()) -> Tensor:
    """Applies RoPE to [..., T, head_dim] at positions `at` [..., T]; a number is the position of the first token.

    Number i of a head's first half and number i of its second half form a pair that turns by theta^(-2i / head_dim)
    radians a token: the "NeoX" order, which transformers and llama.cpp use for LFM2. Angles are float32 at least, and
    divided by `divisors` [head_dim / 2], if there are any.
    """
    half, kind = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    frequencies = theta ** (-torch.arange(half, dtype=kind, device=x.device) / half)
    if len(divisors):
        frequencies = frequencies / torch.as_tensor(divisors, dtype=kind, device=x.device)
    positions = torch.arange(at, at + x.shape[-2], device=x.device) if not isinstance(at, Tensor) else at
    angles = positions.to(kind)[..., None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def reference_heads(block: Block, weights: Mapping[str, Tensor], h: Tensor, name: str) -> Tensor:
    """Returns queries ("q") or keys ("k") [H, T, head_dim] of one sequence [T, D], one token's RoPE at a time."""
    head_dim, theta = block.int("head_dim"), float(block.get("rope_theta") or 0.0)
    rows = reference_projected(block, weights, h, name)
    if block.get("qk_norm_wide"):
        rows = rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}_norm.weight"]
    heads = rows.view(len(h), -1, head_dim).transpose(0, 1).clone()
    if block.get("qk_norm") and not block.get("qk_norm_wide"):
        scale = (heads.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        heads = heads / scale * weights[f"{name}_norm.weight"]
    if theta:
        part, divisors = block.int("rope_dim") or head_dim, None
        if block.int("rope_long"):
            divisors = weights["rope_long.weight" if len(h) > block.int("rope_long") else "rope_short.weight"]
        for t in range(len(h)):
            heads[:, t, :part] = reference_turn(heads[:, t, :part], t, theta, block, divisors)
    return heads


def reference_projected(block: Block, weights: Mapping[str, Tensor], h: Tensor, name: str) -> Tensor:
    """Returns queries, keys or values [T, H * head_dim], before they are split into heads."""
    projected = h @ weights[f"{name}.weight"].T
    return projected + weights[f"{name}.bias"] if block.get("qkv_bias") else projected


def reference_canon(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes h_t + sum over lags of w_lag h_{t - lag} where the block has `canon`: [T, D] -> [T, D]."""
    return h + reference_conv(weights["canon.weight"], h) if block.int("canon") else h


def reference_scores(block: Block, scores: Tensor) -> Tensor:
    """Computes b tanh(score / b) where the block has a bound b (softcap)."""
    bound = float(block.get("softcap") or 0)
    return bound * torch.tanh(scores / bound) if bound else scores


def reference_output(block: Block, weights: Mapping[str, Tensor], heads: Tensor, h: Tensor) -> Tensor:
    """Computes the output [T, D] of heads [T, heads, head_dim] and the block's input [T, D]."""
    if block.get("gate"):
        heads = heads / (1 + torch.exp(-(h @ weights["gate.weight"].T))).view(*heads.shape[:2], -1)
    return heads.flatten(1) @ weights["o.weight"].T


def reference_cache(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values [kv_heads, T, head_dim] of one sequence [T, D]."""
    values = reference_projected(block, weights, h, "v").view(len(h), -1, block.int("head_dim")).transpose(0, 1)
    return reference_heads(block, weights, h, "k"), values


def reference_turn(
    x: Tensor, position: int, theta: float, scaled: Block | None = None, divisors: Tensor | None = None
) -> Tensor:
    """Computes RoPE by Su et al. 2024, section 3.2.2: a pair is a complex number, multiplied by exp(i m theta_i).

    theta_i is changed as `rope_factor`, `rope_tokens` and `rope_yarn` of the block `scaled` say, or divided by
    `divisors`.
    """
    half = x.shape[-1] // 2
    turned = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / x.shape[-1])
        if scaled is not None:
            speed = _reference_yarn(scaled, theta, i, half) if scaled.get("rope_yarn") else None
            angle *= _reference_speed(scaled, theta ** (-2 * i / x.shape[-1])) if speed is None else speed
        angle /= 1.0 if divisors is None else float(divisors[i])
        turned[:, i] = x[:, i] * math.cos(angle) - x[:, half + i] * math.sin(angle)
        turned[:, half + i] = x[:, half + i] * math.cos(angle) + x[:, i] * math.sin(angle)
    return turned


def _reference_yarn(block: Block, theta: float, pair: int, half: int) -> float:
    """Returns what YaRN multiplies the frequency of pair i by (Peng et al. 2023, section 3.2; ramp over pairs)."""
    bounds = [half * math.log(block.int("rope_tokens") / (turns * 2 * math.pi)) / math.log(theta) for turns in (32, 1)]
    first, last = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), 2 * half - 1)
    slowed = 0.0 if pair <= first else 1.0 if pair >= last else (pair - first) / (last - first)
    return 1 - slowed + slowed / float(block.get("rope_factor") or 1)


def _reference_speed(block: Block, frequency: float) -> float:
    """Returns what scaling multiplies a pair's frequency [radians a token] by, by wavelengths as Llama 3.1 does."""
    factor, tokens = float(block.get("rope_factor") or 1), block.int("rope_tokens")
    wavelength = 2 * math.pi / frequency
    if tokens and wavelength < tokens / 4:
        return 1.0
    if not tokens or wavelength > tokens:
        return 1 / factor
    smooth = (tokens / wavelength - 1) / (4 - 1)
    return (1 - smooth) / factor + smooth
