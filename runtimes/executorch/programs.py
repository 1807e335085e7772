"""Programs: what is lowered once and run by every layer of the same shape.

A program is one half of a residual layer (a mixer, a feed-forward), one expert, or the output head, with no weights of
its own: each constant has a name, and whoever makes an artifact says what it holds. No torch here, so artifacts whose
programs are in the cache need none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from nas.blocks.mamba2 import convolved
from nas.core.block import Block

CHUNK = 128
"""Most tokens that one call takes."""
GROUP = 32
"""Weights along a row that share a scale."""
EPS = 1e-5

Role = Literal["int4", "matrix", "norm", "taps", "bias", "decay", "fill"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant of a program.

    Args:
        name: attribute of the module that is lowered.
        shape: of what the program reads; of "int4", of the weights before they are packed.
        role: "int4": a matrix in 4 bits with a scale per group; the others are float32. "fill": `value` everywhere.
        source: the tensor of `nas.nn.model`'s state dict, below its layer; "{j}" is the mixer's number.
        rows: of that tensor; None: all.
        column: of that tensor; None: all.
        value: of a "fill".
    """

    name: str
    shape: Shape
    role: Role
    source: str = ""
    rows: tuple[int, int] | None = None
    column: int | None = None
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Program:
    """What is lowered.

    Args:
        kind: names the module in `nas.runtimes.executorch.modules`.
        sizes: its arguments.
        constants: what it reads.
        states: shapes of what it hands on from chunk to chunk.
    """

    kind: str
    sizes: tuple[tuple[str, int], ...]
    constants: tuple[Constant, ...]
    states: tuple[Shape, ...] = ()

    def size(self, name: str) -> int:
        """The argument called `name`."""
        return dict(self.sizes)[name]


@cache
def mixer_program(block: Block, d_model: int) -> Program:
    """The program of a mixer."""
    makers = {"conv": _conv, "gqa": _attention, "swa": _attention, "mamba2": _mamba2}
    return makers[block.kind](block.resolve(d_model), d_model)


@cache
def swiglu_program(block: Block, d_model: int) -> Program:
    """The program of a dense feed-forward."""
    sizes = (("d_model", d_model), ("width", block.int("width")))
    return Program("swiglu", sizes, (*_norm("norm", d_model, "ffn_norm.weight"), *_gated(block, d_model)))


@cache
def router_program(block: Block, d_model: int) -> Program:
    """What comes before the experts: the norm and the router's logits."""
    experts = block.int("experts")
    router = Constant("router", (experts, d_model), "matrix", "ffn.router.weight")
    constants = (*_norm("norm", d_model, "ffn_norm.weight"), router)
    return Program("router", (("d_model", d_model), ("experts", experts)), constants)


@cache
def expert_program(block: Block, d_model: int) -> Program:
    """One expert; all experts of a mixture run the same program on weights of their own."""
    sizes = (("d_model", d_model), ("width", block.int("width")))
    return Program("expert", sizes, tuple(_gated(block, d_model)))


def head_program(d_model: int, vocab: int, tied: bool) -> Program:
    """The final norm and the output head of one token."""
    head = Constant("head", (vocab, d_model), "int4", "embed.weight" if tied else "head.weight")
    constants = (*_norm("norm", d_model, "norm.weight"), head)
    return Program("head", (("d_model", d_model), ("vocab", vocab)), constants)


def _norm(name: str, width: int, source: str, groups: int = 1) -> Iterator[Constant]:
    """RMSNorm as what XNNPACK takes whole: x * rsqrt(x^2 . mean + eps) * weight; each of `groups` parts by itself."""
    yield Constant(f"{name}_weight", (width,), "norm", source)
    yield Constant(f"{name}_mean", (1, width // groups), "fill", value=groups / width)
    yield Constant(f"{name}_eps", (1,), "fill", value=EPS)


def _gated(block: Block, d_model: int) -> Iterator[Constant]:
    width = block.int("width")
    for name in ("gate", "up"):
        yield Constant(name, (width, d_model), "int4", f"ffn.{name}.weight")
    yield Constant("down", (d_model, width), "int4", "ffn.down.weight")


def _taps(kernel: int, channels: int, source: str) -> Iterator[Constant]:
    for tap in range(kernel):
        yield Constant(f"tap{tap}", (channels,), "taps", source, column=tap)


def _conv(block: Block, d_model: int) -> Program:
    kernel = block.int("kernel")
    parts = ("gate_in", "gate_out", "value")
    constants = (
        *_norm("norm", d_model, "mixer_norm.weight"),
        *(
            Constant(
                name, (d_model, d_model), "int4", "mixers.{j}.in_proj.weight", rows=(i * d_model, (i + 1) * d_model)
            )
            for i, name in enumerate(parts)
        ),
        *_taps(kernel, d_model, "mixers.{j}.conv.weight"),
        Constant("out", (d_model, d_model), "int4", "mixers.{j}.out.weight"),
    )
    return Program("conv", (("d_model", d_model), ("kernel", kernel)), constants, ((kernel - 1, d_model),))


def _attention(block: Block, d_model: int) -> Program:
    """What RoPE, windows and sinks are is the attention kernel's business: the program is the same for all."""
    names = ("heads", "kv_heads", "head_dim")
    heads, kv_heads, head_dim = (block.int(name) for name in names)
    own = block.get("kv") is None if block.kind == "gqa" else True
    norm = bool(block.get("qk_norm"))
    rows = {"q": heads, "k": kv_heads, "v": kv_heads} if own else {"q": heads}
    normed = [name for name in ("q", "k") if norm and name in rows]
    constants = (
        *_norm("norm", d_model, "mixer_norm.weight"),
        *(
            Constant(name, (count * head_dim, d_model), "int4", f"mixers.{{j}}.{name}.weight")
            for name, count in rows.items()
        ),
        *(part for name in normed for part in _norm(f"{name}_norm", head_dim, f"mixers.{{j}}.{name}_norm.weight")),
        Constant("o", (d_model, heads * head_dim), "int4", "mixers.{j}.o.weight"),
    )
    sizes = (("d_model", d_model), *((name, block.int(name)) for name in names), ("norm", norm), ("own", own))
    return Program("attention", tuple((name, int(value)) for name, value in sizes), constants)


def _mamba2(block: Block, d_model: int) -> Program:
    names = ("state", "heads", "expand", "conv", "groups")
    inner, mixed, heads = block.int("expand") * d_model, convolved(block, d_model), block.int("heads")
    source = "mixers.{j}.in_proj.weight"
    constants = (
        *_norm("norm", d_model, "mixer_norm.weight"),
        Constant("gate", (inner, d_model), "int4", source, rows=(0, inner)),
        Constant("mixed", (mixed, d_model), "int4", source, rows=(inner, inner + mixed)),
        Constant("step", (heads, d_model), "matrix", source, rows=(inner + mixed, inner + mixed + heads)),
        *_taps(block.int("conv"), mixed, "mixers.{j}.conv.weight"),
        Constant("conv_bias", (mixed,), "bias", "mixers.{j}.conv.bias"),
        Constant("dt_bias", (heads,), "bias", "mixers.{j}.dt_bias"),
        Constant("decay", (heads,), "decay", "mixers.{j}.A_log"),
        Constant("skip", (heads, 1), "norm", "mixers.{j}.D"),
        *_norm("out_norm", inner, "mixers.{j}.norm.weight", block.int("groups")),
        Constant("out", (d_model, inner), "int4", "mixers.{j}.out.weight"),
    )
    memory = (block.int("groups"), block.int("state"), inner // block.int("groups"))
    states = ((block.int("conv") - 1, mixed), memory)
    return Program("mamba2", (("d_model", d_model), *((name, block.int(name)) for name in names)), constants, states)
