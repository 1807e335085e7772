"""Programs: what is lowered once and run by every layer of the same shape.

A program is one half of a residual layer (a mixer, a feed-forward), one expert, or the output head, with no weights of
its own: each constant has a name, and the artifact defines its content. No torch here, so artifacts whose
programs are in the cache need none. Which programs a kind of block needs is in `kinds`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

CHUNK = 128
"""Most tokens that one call takes."""
GROUP = 32
"""Weights along a row that share a scale, unless a format has more."""
EPS = 1e-5
MODULES = "nas.measure.runtimes.executorch.modules"

Role = Literal["int4", "matrix", "norm", "taps", "bias", "decay", "fill"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant of a program.

    Args:
        name: attribute of the module that is lowered.
        shape: of what the program reads; of "int4", of the weights before they are packed.
        role: "int4": a matrix in the program's format; the others are float32. "fill": `value` everywhere.
        source: the tensor of `nas.model.nn.model`'s state dict, below its layer; "{j}" is the mixer's number.
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
class Format:
    """Number format of a program's matrices; activations have 8 bits, with a scale per token.

    Args:
        bits: of a weight.
        group: weights along a row that share a scale; 0: the whole row.
    """

    bits: Literal[4, 8] = 4
    group: int = GROUP

    def scales(self, columns: int) -> int:
        """Returns the number of scales of a row."""
        return columns // self.group if self.group else 1


PLAIN = Format()
FORMATS = {"8da4w": PLAIN, "8da4w_64": Format(4, 64), "8da4w_128": Format(4, 128), "8da8w": Format(8, 0)}
"""Quantisation -> format."""


@dataclass(frozen=True, slots=True)
class Program:
    """A unit of lowering.

    Args:
        kind: its name, in messages and in the key of its template; with `sizes` it says all that is lowered.
        module: "module:Class" of a `nas.measure.runtimes.executorch.modules.ProgramModule`.
        sizes: its arguments.
        constants: what it reads.
        states: shapes of what it hands on from chunk to chunk.
        inputs: tensors [1, S, D] before the states: 2, x and the residual stream, of a mixer; 1, x, otherwise.
        chunked: whether S varies up to `CHUNK`; else it is 1.
        format: of its matrices.
    """

    kind: str
    module: str
    sizes: tuple[tuple[str, int], ...]
    constants: tuple[Constant, ...]
    states: tuple[Shape, ...] = ()
    inputs: int = 2
    chunked: bool = True
    format: Format = PLAIN

    def stored_as(self, quantisation: str) -> Program:
        """Returns the program with one of `FORMATS`: in the largest groups, if any, that all of its rows have."""
        target = FORMATS[quantisation]
        rows = [constant.shape[1] for constant in self.constants if constant.role == "int4"]
        group = target.group
        while group > GROUP and any(columns % group for columns in rows):
            group //= 2
        return replace(self, format=Format(target.bits, group)) if rows else self

    def size(self, name: str) -> int:
        """Returns the argument called `name`."""
        return dict(self.sizes)[name]


def head_program(d_model: int, vocab: int, tied: bool) -> Program:
    """Returns the program of the final norm and the output head of one token."""
    head = Constant("head", (vocab, d_model), "int4", "embed.weight" if tied else "head.weight")
    constants = (*norm_constants("norm", d_model, "norm.weight"), head)
    return Program(
        "head", f"{MODULES}:Head", (("d_model", d_model), ("vocab", vocab)), constants, inputs=1, chunked=False
    )


def norm_constants(name: str, width: int, source: str, groups: int = 1, eps: float = EPS) -> Iterator[Constant]:
    """Yields RMSNorm as XNNPACK fuses it: x * rsqrt(x^2 . mean + eps) * weight; each of `groups` parts by itself."""
    yield Constant(f"{name}_weight", (width,), "norm", source)
    yield Constant(f"{name}_mean", (1, width // groups), "fill", value=groups / width)
    yield Constant(f"{name}_eps", (1,), "fill", value=eps)


def tap_constants(kernel: int, channels: int, source: str) -> Iterator[Constant]:
    """Yields the taps of a depthwise convolution, one constant each; `ProgramModule.convolve` reads them."""
    for tap in range(kernel):
        yield Constant(f"tap{tap}", (channels,), "taps", source, column=tap)
