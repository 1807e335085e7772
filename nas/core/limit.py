"""Budgets as people type them: decode_p50<=20ms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nas.core.errors import InvalidInput
from nas.core.metrics import metric
from nas.core.units import parse_limit

_BUDGET = re.compile(r"\s*(\w+)\s*<=\s*(\S.*)")


@dataclass(frozen=True)
class Limit:
    """A budget, such as decode_p50 <= 20 ms: smaller is better.

    Args:
        metric: name of a cost.
        value: in the metric's unit.
        relative: whether the value is a multiple of a model's own figure instead.
    """

    metric: str
    value: float
    relative: bool = False

    @staticmethod
    def parse(text: str, *, relative: bool = False) -> Limit:
        """Parses 'decode_p50<=20ms', or 'decode_p50<=0.8x' if relative budgets are taken.

        Raises:
            UnknownName: no such metric.
            InvalidInput: another form, or a metric that is not a cost.
        """
        match = _BUDGET.fullmatch(text)
        if match is None:
            raise InvalidInput(f"cannot read {text!r}: write METRIC<=LIMIT, such as decode_p50<=20ms", where="--budget")
        cost = metric(match[1])
        if cost.direction != "min":
            raise InvalidInput(f"{cost.name} is no cost: limit one that is better when smaller", where="--budget")
        try:
            value, is_multiple = parse_limit(match[2], cost.unit)
        except ValueError as error:
            raise InvalidInput(str(error), where="--budget") from error
        if is_multiple and not relative:
            raise InvalidInput("a budget is a number with its unit, not a multiple", where="--budget")
        return Limit(cost.name, value, is_multiple)

    def of(self, figures: Mapping[str, float]) -> Limit:
        """Returns it in the metric's unit, for a model with these figures."""
        return Limit(self.metric, self.value * figures[self.metric]) if self.relative else self

    def __str__(self) -> str:
        if self.relative:
            return f"{self.metric} <= {self.value:g}x"
        return f"{self.metric} <= {self.value:g} {metric(self.metric).unit}"
