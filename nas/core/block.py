"""Blocks: the mixers and feed-forwards that layouts are made of.

A `Block` is data: the name of a kind and its arguments. A `BlockKind` defines the arguments, arithmetic and text form
of a kind, one file per kind in `nas.model.blocks`, found through the registry `BLOCKS`. So core imports no block.

The text form of the arguments follows the kind's `syntax`: '{heads}/{kv_heads}[:{head_dim}]' reads '16/8' and
'16/8:64'. Arguments that the syntax does not place follow by name, sorted: '16/8(qk_norm=0,rope_theta=10000)'.
"""

from __future__ import annotations

import builtins
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

from nas.core.errors import InvalidInput, UnknownName
from nas.core.registry import Registry

Scalar = int | float | bool
Args = Mapping[str, Scalar | None]
Role = Literal["mixer", "ffn"]
Caches = Literal["heads", "ratio"]
"""Property of attention that stays as the width grows: key-value heads (so the cache of a token) or ratio of heads."""

QUANTISED = 32
"""Block of 4-bit quantisers, in numbers: widths of models that are exported are multiples of it."""

_NUMBER = r"-?\d{1,18}(?:\.\d{1,21})?(?:e-?\d{1,3})?"
_FIELD = re.compile(r"\{(\w+)\}")
_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")


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
        same_as: another argument, whose name stands for its value among the choices of a search space.
        doc: one line for the reference.
    """

    name: str
    type: type[int] | type[float] | type[bool]
    doc: str
    default: Scalar | None = None
    low: float | None = None
    high: float | None = None
    required: bool = False
    same_as: str | None = None

    def check(self, value: Scalar, kind: str) -> Scalar:
        """Returns `value` as this argument's type.

        Raises:
            InvalidInput: of another type or out of range.
        """
        if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
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
    """Definition of a block kind, without torch. Subclass once per kind and register the instance.

    Example:
        A mixer that scales each channel by a weight, `Z` in the one-line string of a layout:

        >>> class Scale(BlockKind):
        ...     name = "scale"
        ...     letter = "Z"
        ...     role = "mixer"
        ...     syntax = ""
        ...     args = ()
        ...     doc = "a weight for each channel"
        ...
        ...     def count(self, block: Block, d_model: int) -> Count:
        ...         return Count(d_model, d_model)
        ...
        ...     def flops(self, block: Block, d_model: int, context: int) -> float:
        ...         return float(d_model)
        ...
        ...     def narrow(self, block: Block, d_model: int, to: int) -> Block:
        ...         return block
        >>> BLOCKS.add("scale", Scale())

        A distribution names the instance as an entry point of the group `nas.blocks`, and its torch module as one of
        `nas.modules` (docs/how-to/adding-a-block.md).
    """

    name: ClassVar[str]
    letter: ClassVar[str]
    """Prefix in the one-line string: one capital for a mixer, a word for a feed-forward."""
    role: ClassVar[Role]
    syntax: ClassVar[str]
    """Positional form after the letter, such as '{heads}/{kv_heads}[:{head_dim}]'; [..] is left out at its default."""
    args: ClassVar[tuple[Arg, ...]]
    doc: ClassVar[str]
    cache_args: ClassVar[tuple[str, ...]] = ()
    """Arguments in which a block with `kv=n` must equal the block whose cache it reads; (): the kind has no `kv`."""

    version: ClassVar[str | None] = None
    """Of the kind and its module, in the keys of results; None: that of the distribution that adds it."""

    hue: ClassVar[int | None] = None
    """Number of its colour in pictures of layouts, 0 to 19; None: one of the last four, by its name."""

    @abstractmethod
    def count(self, block: Block, d_model: int) -> Count:
        """Returns the weights of the block, without the pre-norm."""

    @abstractmethod
    def flops(self, block: Block, d_model: int, context: int) -> float:
        """Returns multiply-adds x 2 for one token that sees `context` tokens."""

    def check(self, block: Block, d_model: int) -> None:  # noqa: B027 - most kinds have no such rule
        """Checks that the arguments are valid together at this width.

        Raises:
            InvalidInput: naming the rule.
        """

    def derived(self, block: Block, d_model: int) -> dict[str, Scalar]:
        """Returns the values of arguments whose default follows from the width; equal given values are dropped."""
        return {}

    def kv_bytes(self, block: Block, d_model: int, context: int, element: float) -> float:
        """Returns the bytes of key-value cache for `context` tokens at `element` bytes a number."""
        return 0.0

    def state_bytes(self, block: Block, d_model: int) -> float:
        """Returns the bytes of recurrent state in float32."""
        return 0.0

    def memory(self, block: Block, d_model: int) -> int:
        """Returns the numbers in the recurrent memory, which bounds what can be recalled; the block is resolved.

        That is the recurrent state without a convolution's last inputs.
        """
        return 0

    @abstractmethod
    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        """Returns the block at width `to`: widths scale, kernels and ratios stay."""

    def shorten(self, block: Block, d_model: int, context: int, length: int) -> Block:
        """Returns the block for sequences of `length` tokens that it is for `context` tokens at deploy scale.

        What is a share of the sequence (a window, a recurrent memory, the reach of positions) shrinks with it and never
        grows. Proxies are shortened at the width of deploy scale, then narrowed.
        """
        return block

    def pad(self, block: Block, multiple: int) -> Block:
        """Returns the block with hidden widths rounded up to multiples of `multiple`, the block of a quantiser.

        With the weights of `block` in its tensors' first rows and columns and zeros elsewhere it computes the same.
        """
        return block

    def scale(self, block: Block, d_model: int, to: int, caches: Caches) -> Block:
        """Returns the block at another width in a model of a family: as in proxies, unless the kind says otherwise.

        Raises:
            InvalidInput: there is none at that width.
        """
        return self.narrow(block, d_model, to)

    def width_step(self, block: Block) -> int:
        """Returns the number that widths must be a multiple of for `block`, which is resolved."""
        return 1

    def strain(self, block: Block, scaled: Block, caches: Caches) -> float:
        """Returns the distance of `scaled` from what `caches` should keep, as a logarithm; both are resolved."""
        return 0.0

    def arg(self, name: str) -> Arg:
        """Returns the argument called `name`; raises `UnknownName`."""
        for arg in self.args:
            if arg.name == name:
                return arg
        raise UnknownName(f"argument of {self.name}", name, [a.name for a in self.args])


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a layer: a kind and the arguments that differ from the kind's defaults, sorted by name."""

    kind: str
    args: tuple[tuple[str, Scalar], ...] = ()

    @staticmethod
    def of(kind: str, **args: Scalar | None) -> Block:
        """Returns a checked block; arguments at their default are dropped, `None` means "not given".

        Raises:
            UnknownName: unknown kind or argument.
            InvalidInput: a value out of range, or a required argument missing.
        """
        spec = BLOCKS[kind]
        values = {name: spec.arg(name).check(value, kind) for name, value in args.items() if value is not None}
        missing = [arg.name for arg in spec.args if arg.required and arg.name not in values]
        if missing:
            raise InvalidInput(f"{kind}: {', '.join(missing)} must be given")
        changed = {name: value for name, value in values.items() if value != spec.arg(name).default}
        return Block(kind, tuple(sorted(changed.items())))

    @property
    def spec(self) -> BlockKind:
        """The registered kind."""
        return BLOCKS[self.kind]

    def get(self, name: str) -> Scalar | None:
        """Returns the argument's value, or its default."""
        for key, value in self.args:
            if key == name:
                return value
        return self.spec.arg(name).default

    def int(self, name: str) -> builtins.int:
        """Returns the argument's value as a whole number; it must have one."""
        value = self.get(name)
        assert value is not None, f"{self.kind}.{name} has no value: resolve the block first"
        return int(value)

    def replace(self, **args: Scalar | None) -> Block:
        """Returns a copy with some arguments changed."""
        return Block.of(self.kind, **(dict(self.args) | args))

    def resolve(self, d_model: builtins.int) -> Block:
        """Returns a copy in which arguments that follow from the width are filled in."""
        return _resolved(self, d_model)

    def canonical(self, d_model: builtins.int) -> Block:
        """Returns a checked copy without arguments that follow from the width; raises `InvalidInput`."""
        return _canonical(self, d_model)

    def format(self) -> str:
        """Returns the one-line form, such as 'A16/8' or 'moe:32x4:1792'."""
        return _formatted(self)

    @staticmethod
    def parse(text: str, role: Role) -> Block:
        """Parses the one-line form.

        Raises:
            UnknownName: no kind of this role starts so.
            InvalidInput: the arguments do not fit the kind's form.
        """
        return _parsed(text, role)


# A search asks for the same few blocks at the same few widths some thousand times per proposal.
@lru_cache(maxsize=1 << 14)
def _parsed(text: str, role: Role) -> Block:
    kinds = {kind.letter: kind for kind in BLOCKS.values() if kind.role == role}
    starts = [letter for letter in kinds if text.startswith(letter)]
    if not starts:
        raise UnknownName(f"{role} block", text, kinds)
    kind = kinds[max(starts, key=len)]
    return Block.of(kind.name, **_parse_args(kind.syntax, text[len(kind.letter) :], text))


@lru_cache(maxsize=1 << 14)
def _resolved(block: Block, d_model: int) -> Block:
    derived = block.spec.derived(block, d_model)
    return Block(block.kind, tuple(sorted((derived | dict(block.args)).items())))


@lru_cache(maxsize=1 << 14)
def _canonical(block: Block, d_model: int) -> Block:
    block.spec.check(block.resolve(d_model), d_model)
    derived = block.spec.derived(block, d_model)
    return Block(block.kind, tuple((k, v) for k, v in block.args if derived.get(k) != v))


@lru_cache(maxsize=1 << 14)
def _formatted(block: Block) -> str:
    values = {arg.name: block.get(arg.name) for arg in block.spec.args}
    return block.spec.letter + _format_args(block.spec.syntax, values, dict(block.args))


def _format_args(syntax: str, values: Mapping[str, float | None], arguments: Mapping[str, float]) -> str:
    """Formats a block's arguments: `values` fill the syntax, the other `arguments` follow by name."""
    text = _OPTIONAL.sub(lambda m: m[1] if any(f in arguments for f in _FIELD.findall(m[1])) else "", syntax)
    text = _FIELD.sub(lambda m: _number(values[m[1]]), text)
    placed = set(_FIELD.findall(syntax))
    named = ",".join(f"{key}={_number(arguments[key])}" for key in sorted(arguments) if key not in placed)
    return f"{text}({named})" if named else text


def _parse_args(syntax: str, text: str, whole: str) -> dict[str, float]:
    """Parses a block's arguments; `whole` is quoted in errors.

    Raises:
        InvalidInput: `text` does not fit the syntax, or a named argument is not `key=number` or comes twice.
    """
    match = _pattern(syntax).fullmatch(text)
    if match is None:
        form = _FIELD.sub(lambda m: m[1].upper(), syntax) or "without arguments"
        raise InvalidInput(f"cannot read block {whole!r}: expected the form {form}")
    groups = match.groupdict()
    named = groups.pop("named_", None)
    values = {key: _read(value) for key, value in groups.items() if value is not None}
    for pair in named.split(",") if named else ():
        key, _, value = pair.partition("=")
        if not re.fullmatch(_NUMBER, value):
            raise InvalidInput(f"cannot read block {whole!r}: {pair!r} is not key=number")
        if key in values:
            raise InvalidInput(f"cannot read block {whole!r}: {key} is given twice")
        values[key] = _read(value)
    return values


@lru_cache
def _pattern(syntax: str) -> re.Pattern[str]:
    pattern = ""
    for part in re.split(r"(\{\w+\}|\[|\])", syntax):
        if field := _FIELD.fullmatch(part):
            pattern += f"(?P<{field[1]}>{_NUMBER})"
        else:
            pattern += {"[": "(?:", "]": ")?"}.get(part, re.escape(part))
    return re.compile(pattern + r"(?:\((?P<named_>[^()]*)\))?")


def _number(value: float | None) -> str:
    assert value is not None
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _read(text: str) -> float:
    return float(text) if re.search(r"[.e]", text) else int(text)


BLOCKS: Registry[BlockKind] = Registry(
    "block kind",
    "nas.blocks",
    {
        "conv": "nas.model.blocks.conv:CONV",
        "gqa": "nas.model.blocks.gqa:GQA",
        "swa": "nas.model.blocks.swa:SWA",
        "mla": "nas.model.blocks.mla:MLA",
        "mamba2": "nas.model.blocks.mamba2:MAMBA2",
        "gdn": "nas.model.blocks.gdn:GDN",
        "gla": "nas.model.blocks.gla:GLA",
        "mlstm": "nas.model.blocks.mlstm:MLSTM",
        "linear": "nas.model.blocks.linear:LINEAR",
        "deltanet": "nas.model.blocks.deltanet:DELTANET",
        "mamba": "nas.model.blocks.mamba:MAMBA",
        "s4": "nas.model.blocks.s4:S4",
        "s5": "nas.model.blocks.s5:S5",
        "cfc": "nas.model.blocks.cfc:CFC",
        "rtf": "nas.model.blocks.rtf:RTF",
        "longconv": "nas.model.blocks.longconv:LONGCONV",
        "swiglu": "nas.model.blocks.swiglu:SWIGLU",
        "geglu": "nas.model.blocks.geglu:GEGLU",
        "relu2": "nas.model.blocks.relu2:RELU2",
        "moe": "nas.model.blocks.moe:MOE",
    },
    mark=lambda kind: f"{kind.role} letter {kind.letter!r}",
    of=BlockKind,
)
