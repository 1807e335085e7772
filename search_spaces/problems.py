"""Validation errors as lines for people: `file:line: key.path: message`."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nas.core.block_space import ArgKnob
from nas.core.errors import InvalidInput, nearest
from nas.core.space import SearchSpace
from nas.search.spaces.yaml_text import Document, KeyPath, read_yaml

M = TypeVar("M", bound=BaseModel)
Problem = tuple[int, str, str]
"""(line, file:line, message)."""


def read_model(path: Path, model: type[M]) -> M:
    """Reads a `model` from a YAML file.

    Raises:
        InvalidInput: one line for each problem, as `file:line: message`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"not UTF-8 at byte {error.start}", where=str(path)) from None
    document = read_yaml(text, str(path))
    try:
        return model.model_validate({} if document.value is None else document.value)
    except ValidationError as error:
        raise InvalidInput("\n".join(describe(error, document, model))) from None


def describe(error: ValidationError, document: Document, model: type[BaseModel] = SearchSpace) -> list[str]:
    """Returns one line per problem of a file that should be a `model`, in the file's order."""
    return in_order(problems(error, document, model))


def in_order(mistakes: Iterable[Problem]) -> list[str]:
    """Returns one line per problem, in the file's order."""
    return [f"{where}: {text}" for _, where, text in sorted(set(mistakes))]


def problems(error: ValidationError, document: Document, model: type[BaseModel] = SearchSpace) -> list[Problem]:
    """Returns the problems of a file that should be a `model`."""
    errors = error.errors()
    return [_problem(details, document, model) for details in errors if not _follows(details, errors)]


def problem_at(path: KeyPath, message: str, document: Document) -> Problem:
    """Returns a problem of the value at `path`."""
    where, keys = document.where(path), ".".join(map(str, path))
    return int(where.rpartition(":")[2]), where, f"{keys}: {message}" if keys else message


def _problem(details: ErrorDetails, document: Document, model: type[BaseModel]) -> tuple[int, str, str]:
    path = _in_file(details["loc"], document)
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInput) and cause.where:
        path += tuple(int(key) if key.isdigit() else key for key in cause.where.split("."))
    return problem_at(path, _message(details, cause, model), document)


def _follows(details: ErrorDetails, errors: list[ErrorDetails]) -> bool:
    """Returns whether a list is too short only because some of its items are wrong."""
    location = details["loc"]
    inside = (other["loc"] for other in errors if len(other["loc"]) > len(location))
    return details["type"] == "too_short" and any(loc[: len(location)] == location for loc in inside)


def _message(details: ErrorDetails, cause: object, model: type[BaseModel]) -> str:
    if isinstance(cause, InvalidInput):
        return cause.message
    name = str(details["loc"][-1]) if details["loc"] else ""
    if details["type"] == "extra_forbidden":
        return f"unknown key {name!r}{nearest(name, _keys_beside(details['loc'], model))}"
    if details["type"] == "missing":
        return "is missing"
    if details["type"] == "too_short":
        return "needs at least {min_length}, but has {actual_length}".format(**details["ctx"])
    if isinstance(cause, ValueError):
        return str(cause)
    return details["msg"][:1].lower() + details["msg"][1:]


def _in_file(loc: KeyPath, document: Document) -> KeyPath:
    """Returns `loc` without keys that the file's short forms leave out: a knob's list has no `choices`."""
    value: Any = document.value
    path: list[str | int] = []
    for key in loc:
        inside = _child(value, key)
        if inside is _NOTHING and key == "choices" and not isinstance(value, Mapping):
            continue
        if inside is _NOTHING and isinstance(value, Mapping) and value.get("kind") == key:
            continue  # the tag of a discriminated union
        path.append(key)
        value = inside
    return tuple(path)


def _child(value: Any, key: str | int) -> Any:
    if isinstance(value, Mapping) and key in value:
        return value[key]
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        return value[key]
    return _NOTHING


def _keys_beside(loc: KeyPath, model: type[BaseModel]) -> list[str]:
    """Returns the keys of `model` that are valid beside the last one of `loc`."""
    types: list[Any] = [model]
    for key in loc[:-1]:
        types = [inner for type_ in types for inner in _step(type_, key)]
    return sorted({name for type_ in types if _is_model(type_) for name in type_.model_fields})


def _step(kind: Any, key: str | int) -> Iterator[Any]:
    if kind is SearchSpace and key in ("mixers", "ffn"):
        yield dict[str, dict[str, ArgKnob]]  # how YAML writes them; the field itself holds a tuple of blocks
    elif _is_model(kind):
        yield from _unwrap(kind.model_fields[key].annotation) if key in kind.model_fields else ()
    else:
        yield from (inner for argument in typing.get_args(kind) for inner in _unwrap(argument))


def _unwrap(annotation: Any) -> Iterator[Any]:
    """Yields the models and containers inside unions and annotations."""
    if _is_model(annotation) or typing.get_origin(annotation) in (dict, tuple, list):
        yield annotation
    else:
        yield from (inner for argument in typing.get_args(annotation) for inner in _unwrap(argument))


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


_NOTHING = object()
