"""The part of a search space about one block kind: choices for each of its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from nas.core.block import BLOCKS, Args, Block, BlockKind, Role, Scalar
from nas.core.errors import InvalidInput, UnknownName

Scope = Literal["model", "layer"]
Choice = Scalar | str
"""A number, or the name of another argument of the block, whose value is meant: `kv_heads: heads`."""

EXPANSION = "expansion"
"""A knob in place of a feed-forward's width: width / d_model."""
MAX_EXPANSION = 1 << 15
"""The widest feed-forward of the narrowest model."""

MAX_CHOICES = 4096
"""Of a knob, and different blocks, or sets of parallel ones, of a layer."""


class _Choices(BaseModel):
    """A choice. In YAML: a value, a list of values, `{choices: [...], scope: layer}` or `{min, max, step}`.

    `scope: model` chooses once for all layers, `scope: layer` for each layer by itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    _kinds: ClassVar[tuple[type, ...]] = (int, float)
    scope: Scope = "model"

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        if isinstance(data, (int, float, str)):
            return {"choices": (data,)}
        if isinstance(data, (list, tuple)):
            return {"choices": tuple(data)}
        if isinstance(data, Mapping) and not data.keys().isdisjoint(("min", "max", "step")):
            return _range(data)
        return data

    @field_validator("choices", mode="before", check_fields=False)
    @classmethod
    def _readable(cls, choices: Any) -> Any:
        if not isinstance(choices, (list, tuple)):
            return choices
        for choice in choices:
            if type(choice) not in cls._kinds or (isinstance(choice, float) and not math.isfinite(choice)):
                raise ValueError(f"a choice must be a number, not {_yaml(choice)}")
        return tuple(int(choice) if isinstance(choice, float) and choice.is_integer() else choice for choice in choices)

    @field_validator("choices", check_fields=False)
    @classmethod
    def _distinct(cls, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
        if len(set(choices)) != len(choices):
            raise ValueError(f"a choice occurs twice in {list(choices)}")
        return choices


class Knob(_Choices):
    """A choice between numbers."""

    choices: tuple[Scalar, ...] = Field(min_length=1)


class ArgKnob(_Choices):
    """A choice between values of an argument; where `Arg.same_as` allows it, also the name of another argument."""

    _kinds: ClassVar[tuple[type, ...]] = (bool, int, float, str)
    choices: tuple[Choice, ...] = Field(min_length=1)

    def allows(self, value: Scalar | None, args: Args) -> bool:
        """Returns whether `value` is a choice for a block with the resolved arguments `args`."""
        return any(matches(value, choice, args) for choice in self.choices)


def matches(value: Scalar | None, choice: Choice, args: Args) -> bool:
    """Returns whether an argument's value is the choice, or that of the argument which the choice names."""
    return value == (args.get(choice) if isinstance(choice, str) else choice)


def arguments(block: Block, d_model: int) -> dict[str, Scalar | None]:
    """Returns the values of all arguments of a block."""
    full = block.resolve(d_model)
    return {arg.name: full.get(arg.name) for arg in block.spec.args}


def resolved(values: Mapping[str, Choice]) -> dict[str, Scalar]:
    """Replaces each choice that names another argument by the value of that argument."""
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    return {name: numbers[value] if isinstance(value, str) else value for name, value in values.items()}


class BlockSpace(BaseModel):
    """Knobs of one block kind: argument name -> knob. `expansion` may replace a feed-forward's width."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    knobs: dict[str, ArgKnob]

    @property
    def layer_choices(self) -> int:
        """Blocks that one layer chooses from, those that are not valid included."""
        return math.prod(len(knob.choices) for knob in self.knobs.values() if knob.scope == "layer")


def block_spaces(data: Any, role: Role) -> Any:
    """Returns `data` (kind -> argument -> knob) as a tuple of `BlockSpace`; other data is returned as it is.

    Raises:
        ValidationError: every unknown kind, unknown knob and impossible choice, each with its place.
    """
    if not isinstance(data, Mapping):
        return data  # already built, or pydantic says what it is
    kinds = [name for name in BLOCKS if BLOCKS[name].role == role]
    problems: list[InitErrorDetails] = []
    spaces = []
    for kind, knobs in data.items():
        if kind not in kinds:
            problems.append(problem((str(kind),), UnknownName(f"{role} block", str(kind), kinds)))
            continue
        try:
            spaces.append(_block_space(kind, role, {} if knobs is None else knobs))
        except ValidationError as error:
            problems += details(error)
    refuse(problems)
    return tuple(spaces)


def _block_space(kind: str, role: Role, data: Any) -> BlockSpace:
    """Returns the knobs of one block kind.

    Raises:
        ValidationError: every problem of `data` (argument -> knob), each at its place below `kind`.
    """
    if not isinstance(data, Mapping):
        _KNOBS.validate_python({kind: data})  # says what it is
    problems: list[InitErrorDetails] = []
    knobs: dict[str, ArgKnob] = {}
    for name, knob in data.items():
        try:
            knobs |= _KNOBS.validate_python({kind: {name: knob}})[kind]
        except ValidationError as error:
            problems += details(error)
    refuse([*problems, *_knob_problems(kind, role, knobs, set(data))])
    return BlockSpace(kind=kind, knobs=knobs)


def problem(place: tuple[str | int, ...], error: InvalidInput) -> InitErrorDetails:
    """Returns `error` at `place` (keys below the field that is validated), for `refuse`."""
    kind = PydanticCustomError("invalid_input", "{message}", {"message": error.message})
    return InitErrorDetails(type=kind, loc=place, input=None)


def details(error: ValidationError) -> list[InitErrorDetails]:
    """Returns the problems of a validation, to be raised again by `refuse` together with others."""
    return [
        InitErrorDetails(
            type=PydanticCustomError(item["type"], "{message}", {"message": item["msg"], **item.get("ctx", {})}),
            loc=item["loc"],
            input=None,
        )
        for item in error.errors()
    ]


def refuse(problems: list[InitErrorDetails]) -> None:
    """Raises all `problems`, if any, as one `ValidationError`, each at its own place."""
    if problems:
        raise ValidationError.from_exception_data("search space", problems)


def _knob_problems(kind: str, role: Role, knobs: Mapping[str, ArgKnob], names: set[str]) -> Iterator[InitErrorDetails]:
    """Finds the problems of valid `knobs`; `names` are those of all that are given."""
    spec = BLOCKS[kind]
    valid = [arg.name for arg in spec.args] + ([EXPANSION] if role == "ffn" else [])
    for name, knob in knobs.items():
        if name not in valid:
            yield problem((kind, name), UnknownName(f"knob of {kind}", name, valid))
        elif name != EXPANSION:
            yield from _choice_problems(spec, name, knob)
        elif any(isinstance(choice, (str, bool)) or not 0 < choice <= MAX_EXPANSION for choice in knob.choices):
            yield problem(
                (kind, name), InvalidInput(f"{kind}: expansion must be a number above 0 up to {MAX_EXPANSION}")
            )
    # A mistyped name is reported once: the name that was meant is not reported as missing, too.
    meant = {close for name in names - set(valid) for close in get_close_matches(name, valid, n=1)}
    supplied = names | meant | ({"width"} if EXPANSION in names else set())
    for arg in spec.args:
        if arg.required and arg.name not in supplied:
            yield problem((kind,), InvalidInput(f"{kind} needs {arg.name!r}: {arg.doc}"))
    if BlockSpace(kind=kind, knobs=dict(knobs)).layer_choices > MAX_CHOICES:
        yield problem((kind,), InvalidInput(f"{kind}: a layer would have more than {MAX_CHOICES} different blocks"))
    if {"width", EXPANSION} <= names:
        yield problem((kind, EXPANSION), InvalidInput(f"{kind}: give width or expansion, not both"))


def _choice_problems(spec: BlockKind, name: str, knob: ArgKnob) -> Iterator[InitErrorDetails]:
    arg = spec.arg(name)
    for choice in knob.choices:
        try:
            if isinstance(choice, bool) and arg.type is not bool:
                raise InvalidInput(f"a choice must be a number, not {_yaml(choice)}")
            if not isinstance(choice, str):
                arg.check(choice, spec.name)
            elif choice != arg.same_as:
                valid = f"a number or {arg.same_as!r}" if arg.same_as else "a number"
                raise InvalidInput(f"a choice must be {valid}, not {choice!r}")
        except InvalidInput as error:
            yield problem((spec.name, name), error)


def _range(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a range as choices, exactly those of its decimal numbers.

    Raises:
        ValueError: what is written does not say which numbers these are.
    """
    ends = {"min": data.get("min"), "max": data.get("max"), "step": data.get("step", 1)}
    for name, value in ends.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"a range needs numbers, such as {{min: 8, max: 16, step: 2}}; {name} is {_yaml(value)}")
    if "choices" in data:
        raise ValueError("give choices, or min and max, not both")
    low, high, step = (Fraction(str(value)) for value in ends.values())
    written = f"min {float(low):g}, max {float(high):g}, step {float(step):g}"
    if "step" not in data and low.denominator * high.denominator > 1:
        raise ValueError("a range with fractions needs a step, such as {min: 2.5, max: 3.5, step: 0.5}")
    if step <= 0 or high < low:
        raise ValueError(f"empty range: {written}")
    count = (high - low) / step + 1
    if count > MAX_CHOICES:
        raise ValueError(f"a range of more than {MAX_CHOICES} choices: raise step")
    if count.denominator > 1:
        last = float(low + (math.floor(count) - 1) * step)
        raise ValueError(f"max is not a whole number of steps above min: {written}; the last choice would be {last:g}")
    numbers = (low + index * step for index in range(count.numerator))
    choices = tuple(number.numerator if number.denominator == 1 else float(number) for number in numbers)
    return {"choices": choices, **{key: value for key, value in data.items() if key not in ends}}


def _yaml(value: Any) -> str:
    """Returns a value as YAML writes it."""
    return "missing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


_KNOBS = TypeAdapter(dict[str, dict[str, ArgKnob]])
