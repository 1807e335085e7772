"""Blocks: the letters a layout is written with.

A `Block` is data (a kind's name and its arguments). What a kind means, its arguments, its arithmetic and how it is
written, is a `BlockKind`, one file per kind in `nas.blocks`, found through the registry `BLOCKS`. So core imports no
block, and a new kind is one file there, one in `nas.nn`, and one line in the registry.
"""

from __future__ import annotations

import builtins
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

from nas.core.block_text import format_args, parse_args
from nas.core.errors import InvalidInput, UnknownName
from nas.core.registry import Registry

Scalar = int | float | bool
Args = Mapping[str, Scalar | None]
Role = Literal["mixer", "ffn"]


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument of a block kind.

    Args:
        name: its name in JSON, in named text form, and in search spaces.
        type: int, float or bool.
        default: the value that is omitted from canonical forms; `None` with `required=False` means "derived".
        low: least value allowed.
        high: greatest value allowed.
        required: whether it must be given.
        doc: one line for the reference.
    """

    name: str
    type: type[int] | type[float] | type[bool]
    doc: str
    default: Scalar | None = None
    low: float | None = None
    high: float | None = None
    required: bool = False

    def check(self, value: Scalar, kind: str) -> Scalar:
        """`value` as this argument's type.

        Raises:
            InvalidInput: of another type or out of range.
        """
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidInput(f"{kind}: {self.name} must be a number, not {value!r}")
        if self.type is bool:
            if value not in (0, 1):
                raise InvalidInput(f"{kind}: {self.name} must be 0 or 1, not {value}")
            return bool(value)
        if self.type is int and int(value) != value:
            raise InvalidInput(f"{kind}: {self.name} must be a whole number, not {value}")
        value = self.type(value)
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            raise InvalidInput(f"{kind}: {self.name} must be in [{self.low}, {self.high}], not {value}")
        return value


@dataclass(frozen=True, slots=True)
class Count:
    """Weights of a block: all of them, and those that one token passes through."""

    total: int
    active: int


class BlockKind(ABC):
    """What a block kind means, without torch. Subclass once per kind and register the instance."""

    name: ClassVar[str]
    letter: ClassVar[str]
    """What the one-line string starts a block with: one capital for a mixer, a word for a feed-forward."""
    role: ClassVar[Role]
    syntax: ClassVar[str]
    """Positional form behind the letter, such as '{heads}/{kv_heads}[:{head_dim}]'; [..] is left out at its default."""
    args: ClassVar[tuple[Arg, ...]]
    doc: ClassVar[str]
    cache_args: ClassVar[tuple[str, ...]] = ()
    """Arguments in which a block with `kv=n` must equal the block whose cache it reads; (): the kind has no `kv`."""

    @abstractmethod
    def count(self, block: Block, d_model: int) -> Count:
        """Weights of the block, without the pre-norm."""

    @abstractmethod
    def flops(self, block: Block, d_model: int, context: int) -> float:
        """Multiply-adds x 2 for one token that sees `context` tokens."""

    def check(self, block: Block, d_model: int) -> None:  # noqa: B027 - most kinds have no such rule
        """Refuses arguments that cannot stand together at this width.

        Raises:
            InvalidInput: naming the rule.
        """

    def derived(self, block: Block, d_model: int) -> dict[str, Scalar]:
        """Values of arguments whose default follows from the width; equal values given by hand are dropped."""
        return {}

    def kv_bytes(self, block: Block, d_model: int, context: int, element: float) -> float:
        """Bytes of key-value cache for `context` tokens at `element` bytes a number."""
        return 0.0

    def state_bytes(self, block: Block, d_model: int) -> float:
        """Bytes of recurrent state in float32."""
        return 0.0

    @abstractmethod
    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        """The same block at width `to`: widths scale, kernels and ratios stay."""

    def shorten(self, block: Block, ratio: float) -> Block:
        """The same block for sequences `ratio` times as long: attention windows shrink with them, and never grow."""
        return block

    def arg(self, name: str) -> Arg:
        """The argument called `name`.

        Raises:
            UnknownName: the kind has no such argument.
        """
        for arg in self.args:
            if arg.name == name:
                return arg
        raise UnknownName(f"argument of {self.name}", name, [a.name for a in self.args])


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a layer: a kind and the arguments that differ from the kind's defaults, sorted by name."""

    kind: str
    given: tuple[tuple[str, Scalar], ...] = ()

    @staticmethod
    def of(kind: str, **args: Scalar | None) -> Block:
        """A checked block; arguments at their default are dropped, `None` means "not given".

        Raises:
            UnknownName: unknown kind or argument.
            InvalidInput: a value out of range, or a required argument missing.
        """
        spec = BLOCKS[kind]
        values = {name: spec.arg(name).check(value, kind) for name, value in args.items() if value is not None}
        missing = [arg.name for arg in spec.args if arg.required and arg.name not in values]
        if missing:
            raise InvalidInput(f"{kind}: {', '.join(missing)} must be given")
        kept = {name: value for name, value in values.items() if value != spec.arg(name).default}
        return Block(kind, tuple(sorted(kept.items())))

    @property
    def spec(self) -> BlockKind:
        """The registered kind."""
        return BLOCKS[self.kind]

    def get(self, name: str) -> Scalar | None:
        """The argument's value, or its default."""
        for key, value in self.given:
            if key == name:
                return value
        return self.spec.arg(name).default

    def int(self, name: str) -> builtins.int:
        """The argument's value as a whole number; it must have one."""
        value = self.get(name)
        assert value is not None, f"{self.kind}.{name} has no value: resolve the block first"
        return int(value)

    def replace(self, **args: Scalar | None) -> Block:
        """A copy with some arguments changed."""
        return Block.of(self.kind, **(dict(self.given) | args))

    def resolve(self, d_model: builtins.int) -> Block:
        """A copy in which arguments that follow from the width are filled in."""
        return _resolved(self, d_model)

    def canonical(self, d_model: builtins.int) -> Block:
        """A checked copy without arguments that follow from the width anyway.

        Raises:
            InvalidInput: the arguments cannot stand together at this width.
        """
        return _canonical(self, d_model)

    def format(self) -> str:
        """The block's one-line form, such as 'A16/8' or 'moe:32x4:1792'."""
        return _formatted(self)

    @staticmethod
    def parse(text: str, role: Role) -> Block:
        """The block that `text` names.

        Raises:
            UnknownName: no kind of this role starts so.
            InvalidInput: the arguments do not fit the kind's form.
        """
        kinds = {kind.letter: kind for kind in BLOCKS.values() if kind.role == role}
        starts = [letter for letter in kinds if text.startswith(letter)]
        if not starts:
            raise UnknownName(f"{role} block", text, kinds)
        kind = kinds[max(starts, key=len)]
        return Block.of(kind.name, **parse_args(kind.syntax, text[len(kind.letter) :], text))


# A search asks for the same few blocks at the same few widths, some thousand times per proposal.
@lru_cache(maxsize=1 << 14)
def _resolved(block: Block, d_model: int) -> Block:
    derived = block.spec.derived(block, d_model)
    return Block(block.kind, tuple(sorted((derived | dict(block.given)).items())))


@lru_cache(maxsize=1 << 14)
def _canonical(block: Block, d_model: int) -> Block:
    block.spec.check(block.resolve(d_model), d_model)
    derived = block.spec.derived(block, d_model)
    return Block(block.kind, tuple((k, v) for k, v in block.given if derived.get(k) != v))


@lru_cache(maxsize=1 << 14)
def _formatted(block: Block) -> str:
    values = {arg.name: block.get(arg.name) for arg in block.spec.args}
    return block.spec.letter + format_args(block.spec.syntax, values, dict(block.given))


BLOCKS: Registry[BlockKind] = Registry(
    "block kind",
    "nas.blocks",
    {
        "conv": "nas.blocks.conv:CONV",
        "gqa": "nas.blocks.gqa:GQA",
        "swa": "nas.blocks.swa:SWA",
        "mamba2": "nas.blocks.mamba2:MAMBA2",
        "swiglu": "nas.blocks.swiglu:SWIGLU",
        "moe": "nas.blocks.moe:MOE",
    },
)
