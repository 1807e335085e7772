"""The text form of a block's arguments, driven by the kind's `syntax`.

'{heads}/{kv_heads}[:{head_dim}]' reads '16/8' and '16/8:64'. What the syntax does not place is written behind it as
named arguments, keys sorted: '16/8(qk_norm=0,rope_theta=10000)'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from nas.core.errors import InvalidInput

_NUMBER = r"-?\d{1,18}(?:\.\d{1,18})?(?:e-?\d{1,3})?"
_FIELD = re.compile(r"\{(\w+)\}")
_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")


def format_args(syntax: str, values: Mapping[str, float | None], given: Mapping[str, float]) -> str:
    """Text of a block's arguments: `values` fill the syntax, the other `given` ones follow by name."""
    text = _OPTIONAL.sub(lambda m: m[1] if any(f in given for f in _FIELD.findall(m[1])) else "", syntax)
    text = _FIELD.sub(lambda m: _number(values[m[1]]), text)
    placed = set(_FIELD.findall(syntax))
    named = ",".join(f"{key}={_number(given[key])}" for key in sorted(given) if key not in placed)
    return f"{text}({named})" if named else text


def parse_args(syntax: str, text: str, whole: str) -> dict[str, float]:
    """The arguments that `text` gives; `whole` is quoted in errors.

    Raises:
        InvalidInput: `text` does not fit the syntax, or a named argument is not `key=number` or comes twice.
    """
    match = _pattern(syntax).fullmatch(text)
    if match is None:
        raise InvalidInput(f"cannot read block {whole!r}: expected the form {_shown(syntax)}")
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


def _shown(syntax: str) -> str:
    return _FIELD.sub(lambda m: m[1].upper(), syntax) or "without arguments"


def _number(value: float | None) -> str:
    assert value is not None
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _read(text: str) -> float:
    return float(text) if re.search(r"[.e]", text) else int(text)
