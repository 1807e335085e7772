"""Weights of a block from those of a smaller block of the same kind.

Every function takes both blocks, resolved, the smaller one's tensors, the larger one's start values, the map of the
residual stream and a generator, and returns the larger one's tensors, which compute the same. Where a block cannot be
carried over so, it raises `Anew`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nas.core.block import Block
from nas.family.growth_maps import tiled, widened

Tensors = Mapping[str, Tensor]
Grow = Callable[[Block, Block, Tensors, Tensors, Tensor, torch.Generator], dict[str, Tensor]]

_SPARK = 1e-3
"""Of start values, in query and key numbers that were not there: nothing to the function, and enough for gradients,
which are zero where both are."""


class Anew(Exception):
    """The block is not carried over, and why."""


def grow_conv(
    a: Block, b: Block, small: Tensors, start: Tensors, width: Tensor, rng: torch.Generator
) -> dict[str, Tensor]:
    """Channels are copied; taps that were not there are zero."""
    old, new = a.int("kernel"), b.int("kernel")
    if new < old:
        raise Anew(f"a kernel of {new} taps cannot hold {old}")
    rows = torch.cat([width + part * (int(width.max()) + 1) for part in range(3)])
    taps = torch.nn.functional.pad(small["conv.weight"][width], (new - old, 0))
    return {
        "in_proj.weight": widened(small["in_proj.weight"], rng, outputs=rows, inputs=width),
        "conv.weight": taps,
        "out.weight": widened(small["out.weight"], rng, outputs=width, inputs=width),
    }


def grow_attention(
    a: Block, b: Block, small: Tensors, start: Tensors, width: Tensor, rng: torch.Generator
) -> dict[str, Tensor]:
    """Heads are copied, each with the key-value head that it reads; heads grow by whole factors.

    RoPE turns pair i of a head of d numbers like pair m i of one of m d, so that is where its numbers go; scores, which
    are divided by sqrt(m d) there, need the factor sqrt(m) on queries. With QK-norm the mean square is over m times as
    many numbers: projections times sqrt(m) keep it, and the gain of queries makes up for it.
    """
    for name in ("qk_norm", "rope_theta", "window", "sink"):
        if name in {arg.name for arg in a.spec.args} and a.get(name) != b.get(name):
            raise Anew(f"{name} differs")
    d, wide = a.int("head_dim"), b.int("head_dim")
    if wide % d:
        raise Anew(f"heads of {wide} numbers are no whole multiple of {d}, and RoPE's frequencies do not meet")
    m = wide // d
    queries, kv = _heads(a, b)
    norm = bool(a.get("qk_norm"))
    grown = {"q.weight": _projected("q.weight", queries, d, m, math.sqrt(m), small, start, width, rng)}
    if norm:
        grown["q_norm.weight"] = _gain(small["q_norm.weight"], m) / math.sqrt(m)
    if "k.weight" in small:
        grown["k.weight"] = _projected("k.weight", kv, d, m, math.sqrt(m) if norm else 1.0, small, start, width, rng)
        values = _units(kv, tiled(d, wide), d)
        grown["v.weight"] = widened(small["v.weight"], rng, outputs=values, inputs=width)
        if norm:
            grown["k_norm.weight"] = _gain(small["k_norm.weight"], m)
    if "sinks.weight" in small:
        grown["sinks.weight"] = small["sinks.weight"][queries]
    read = _units(queries, tiled(d, wide), d)
    return grown | {"o.weight": widened(small["o.weight"], rng, outputs=width, inputs=read)}


def _heads(a: Block, b: Block) -> tuple[Tensor, Tensor]:
    """For each query and each key-value head of `b`, the head of `a` that it copies."""
    old, new = a.int("kv_heads"), b.int("kv_heads")
    group, slots = a.int("heads") // old, b.int("heads") // new
    kv = tiled(old, new)
    if new < old or int(kv.bincount().min()) * slots < group:
        raise Anew(f"{b.int('heads')}/{new} heads have no room for all of {a.int('heads')}/{old}")
    queries, filled = [], [0] * old
    for head in kv.tolist():
        for _ in range(slots):
            queries.append(head * group + filled[head] % group)
            filled[head] += 1
    return torch.tensor(queries), kv


def _projected(
    name: str, heads: Tensor, d: int, m: int, factor: float, small: Tensors, start: Tensors, width: Tensor,
    rng: torch.Generator,
) -> Tensor:  # fmt: skip
    """Queries or keys: each old number `factor` times in its place, next to nothing in the new ones."""
    old = widened(small[name], rng, outputs=_units(heads, torch.arange(d), d), inputs=width) * factor
    new = (start[name] * (_SPARK if m > 1 else 0.0)).view(len(heads), m * d, -1)
    new[:, _places(d, m)] = old.view(len(heads), d, -1)
    return new.flatten(0, 1)


def _gain(gain: Tensor, m: int) -> Tensor:
    wide = torch.ones(m * len(gain))
    wide[_places(len(gain), m)] = gain
    return wide


def _places(d: int, m: int) -> Tensor:
    """Where the d numbers of a head lie in one of m d: pair i becomes pair m i; halves of pairs lie d / 2 apart."""
    first = m * torch.arange(d // 2)
    return torch.cat([first, first + m * d // 2])


def _units(heads: Tensor, inner: Tensor, size: int) -> Tensor:
    """Map over heads with a map over the numbers of each: [len(heads) * len(inner)]."""
    return (heads[:, None] * size + inner).flatten()


def grow_mamba2(
    a: Block, b: Block, small: Tensors, start: Tensors, width: Tensor, rng: torch.Generator
) -> dict[str, Tensor]:
    """Heads and the channels of each are copied: channels of a head share its decay, B and C, and meet nowhere else."""
    for name in ("state", "groups", "expand"):
        if a.int(name) != b.int(name):
            raise Anew(f"{name} differs")
    if a.int("groups") > 1:
        raise Anew("groups of heads have no order that copies keep")
    old, new = a.int("conv"), b.int("conv")
    h, heads = a.int("heads"), b.int("heads")
    inner, wide = len(small["norm.weight"]), len(start["norm.weight"])
    if new < old or heads % h or wide % heads or (wide // heads) % (inner // h):
        raise Anew(
            f"{heads} heads of {wide // heads} channels and {new} taps are no multiple of {h}, {inner // h}, {old}"
        )
    head = tiled(h, heads)
    channels = _units(head, tiled(inner // h, wide // heads), inner // h)
    shared = torch.arange(2 * a.int("state"))  # B and C
    mixed = torch.cat([channels, shared + inner])
    rows = torch.cat([channels, mixed + inner, head + 2 * inner + len(shared)])
    return {
        "in_proj.weight": widened(small["in_proj.weight"], rng, outputs=rows, inputs=width),
        "conv.weight": torch.nn.functional.pad(small["conv.weight"][mixed], (new - old, 0)),
        "conv.bias": small["conv.bias"][mixed],
        "dt_bias": small["dt_bias"][head],
        "A_log": small["A_log"][head],
        "D": small["D"][head],
        "norm.weight": small["norm.weight"][channels],
        "out.weight": widened(small["out.weight"], rng, outputs=width, inputs=channels),
    }


def grow_swiglu(
    a: Block, b: Block, small: Tensors, start: Tensors, width: Tensor, rng: torch.Generator
) -> dict[str, Tensor]:
    """Hidden units are copied, any number of times."""
    units = _hidden(a, b)
    return {
        "gate.weight": widened(small["gate.weight"], rng, outputs=units, inputs=width),
        "up.weight": widened(small["up.weight"], rng, outputs=units, inputs=width),
        "down.weight": widened(small["down.weight"], rng, outputs=width, inputs=units),
    }


def grow_moe(
    a: Block, b: Block, small: Tensors, start: Tensors, width: Tensor, rng: torch.Generator
) -> dict[str, Tensor]:
    """Hidden units of each expert are copied, and so are experts where there are more of them.

    Those no token chooses until balancing lets them in: two equal ones would take two places among the chosen.
    """
    if a.int("top_k") != b.int("top_k"):
        raise Anew("experts per token differ")
    old, new = a.int("experts"), b.int("experts")
    if new < old:
        raise Anew(f"{new} experts have no room for {old}")
    units, experts = _hidden(a, b), tiled(old, new)
    bias = small["bias.weight"][experts].clone()
    bias[old:] = small["bias.weight"].min() - 1.0  # scores lie between 0 and 1
    router = widened(small["router.weight"], rng, outputs=experts, inputs=width)
    router[old:] = start["router.weight"][old:]
    return {
        "router.weight": router,
        "bias.weight": bias,
        "gate.weight": widened(small["gate.weight"][experts], rng, outputs=units, inputs=width),
        "up.weight": widened(small["up.weight"][experts], rng, outputs=units, inputs=width),
        "down.weight": widened(small["down.weight"][experts], rng, outputs=width, inputs=units),
    }


def _hidden(a: Block, b: Block) -> Tensor:
    old, new = a.int("width"), b.int("width")
    if new < old:
        raise Anew(f"{new} hidden units have no room for {old}")
    return tiled(old, new)


GROW: dict[str, Grow] = {
    "conv": grow_conv,
    "gqa": grow_attention,
    "swa": grow_attention,
    "mamba2": grow_mamba2,
    "swiglu": grow_swiglu,
    "moe": grow_moe,
}
OUTPUT = {"conv": "out", "gqa": "o", "swa": "o", "mamba2": "out", "swiglu": "down", "moe": "down"}
"""Kind -> the projection into the residual stream; zero there is a block that adds nothing."""
