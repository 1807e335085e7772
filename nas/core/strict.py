"""Bases of models that people write in YAML: unknown keys are refused, and so are numbers that are none."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class StrictKeys(BaseModel):
    """Refuses unknown keys and infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Strict(StrictKeys):
    """Refuses `true` and `false` in place of a number, too; a member of a discriminated union cannot be one."""

    @field_validator("*", mode="before")
    @classmethod
    def _number_is_no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = _kinds(cls, str(info.field_name))
        if isinstance(value, list) and tuple in kinds:
            value = tuple(value)  # what strict parsing of JSON wants, once a value has been here
        items = value if isinstance(value, tuple) else (value,)
        for item in items:
            if isinstance(item, bool) and kinds & {int, float} and not kinds & {bool, Any}:
                raise ValueError(f"must be a number, not {str(item).lower()}")
        return value


@cache
def _kinds(model: type[BaseModel], field: str) -> set[Any]:
    """Returns the types that a field's annotation names."""
    return set(_named(model.model_fields[field].annotation))


def _named(annotation: Any) -> Iterator[Any]:
    yield typing.get_origin(annotation) or annotation
    for argument in typing.get_args(annotation):
        yield from _named(argument)
