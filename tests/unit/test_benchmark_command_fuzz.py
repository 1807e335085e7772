"""Cases of `benchmarks.command_fuzz`, which are the same in every process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import command_fuzz
from benchmarks.command_fuzz import NUMBERS, TEXTS, argument_cases


class First(random.Random):
    """Draws the first ones."""

    def sample(self, population: Sequence[Any], k: int, *, counts: Any = None) -> list[Any]:
        return list(population[:k])


def test_values_of_a_parameter_come_in_the_order_of_their_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = SimpleNamespace(annotation=int)
    count = SimpleNamespace(name="count", opts=["--count"], required=False, type_descriptor=kind)
    monkeypatch.setattr(command_fuzz, "commands", lambda _: [(("count",), SimpleNamespace(params=[count]))])
    values = [case.words[-1] for case in argument_cases(First()) if "--count" in case.words]
    assert values == list(dict.fromkeys([*NUMBERS[:5], *TEXTS[:3]]))
