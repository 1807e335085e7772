"""Budgets as people type them: decode_p50<=20ms."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nas.core.errors import InvalidInput
from nas.core.metrics import metric
from nas.core.units import parse_limit

_BUDGET = re.compile(r"\s*(\w+)\s*<=\s*(\S.*)")


@dataclass(frozen=True)
class Limit:
    """A budget, such as decode_p50 <= 20 ms: smaller is better."""

    metric: str
    value: float

    @staticmethod
    def parse(text: str) -> Limit:
        """Parses 'decode_p50<=20ms'.

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
            value, relative = parse_limit(match[2], cost.unit)
        except ValueError as error:
            raise InvalidInput(str(error), where="--budget") from error
        if relative:
            raise InvalidInput("a budget is a number with its unit, not a multiple", where="--budget")
        return Limit(cost.name, value)

    def __str__(self) -> str:
        return f"{self.metric} <= {self.value:g} {metric(self.metric).unit}"
