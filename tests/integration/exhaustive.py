"""Parameters of which one is tested by default, and all with HILNAS_TEST_ALL."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")


def mostly_exhaustive(values: Iterable[T], by_default: T) -> list[ParameterSet]:
    """Returns all `values`; tests of any but `by_default` are marked `exhaustive`."""
    return [pytest.param(value, marks=() if value == by_default else pytest.mark.exhaustive) for value in values]
