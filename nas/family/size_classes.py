"""Models of about one size, which are compared with each other: the report's groups in section 2.4."""

from __future__ import annotations

import math

from nas.core.errors import UnknownName

_LIMITS = {"350M": 5e8, "700M": 9e8, "1B": 2e9, "3B": math.inf}
"""Class -> parameters that its models stay below."""

SIZE_CLASSES = tuple(_LIMITS)


def size_class(parameters: int) -> str:
    """The class of a model; of a mixture of experts, by all of its parameters, as in the report."""
    return next(name for name, limit in _LIMITS.items() if parameters < limit)


def known_class(name: str) -> str:
    """`name`, if it is a class.

    Raises:
        UnknownName: it is none.
    """
    if name not in _LIMITS:
        raise UnknownName("size class", name, _LIMITS, where="--class")
    return name
