"""What is tested by default, and what with HILNAS_TEST_ALL (`make test-all`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")


def mostly_exhaustive(values: Iterable[T], *by_default: T) -> list[ParameterSet]:
    """Returns all `values`; tests of any but those `by_default` are marked `exhaustive`."""
    return [pytest.param(value, marks=() if value in by_default else pytest.mark.exhaustive) for value in values]


def examples(number: int) -> int:
    """Returns how many examples hypothesis draws in a run: `number`, or by default a third. Each run draws others."""
    return number if os.environ.get("HILNAS_TEST_ALL") else -(-number // 3)


def first_by_default(values: tuple[T, ...]) -> tuple[T, ...]:
    """Returns all `values` with HILNAS_TEST_ALL, otherwise the first."""
    return values if os.environ.get("HILNAS_TEST_ALL") else values[:1]
