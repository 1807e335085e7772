"""Rows of the table: what is stated of a statistic, and how often, or how far, that was so over simulated studies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from nas.core.stats import Z95

SLACK = 0.03
"""How far a stated chance may be off."""
Relation = Literal["is", "at most", "at least"]


@dataclass(frozen=True)
class Row:
    """One statistic.

    Args:
        name: of the statistic, as `benchmarks.claims.registry` calls it.
        where: the simulated studies.
        nominal: what is stated.
        held: what was so.
        error: half width of the 95 % interval of `held`, that of the number of simulated studies.
        count: statements.
        relation: of `held` to `nominal`.
        slack: how far `held` may be off.
        unit: "%" of shares; "x" of ratios, whose nominal is 1.
    """

    name: str
    where: str
    nominal: float
    held: float
    error: float
    count: int
    relation: Relation = "is"
    slack: float = SLACK
    unit: Literal["%", "x"] = "%"

    @property
    def right(self) -> bool:
        """Whether `held` is where it is stated to be, as far as the number of studies tells."""
        off, most = self.held - self.nominal, self.slack + self.error
        return (self.relation == "at least" or off <= most) and (self.relation == "at most" or off >= -most)

    def cells(self) -> dict[str, str]:
        """Returns the row of the page."""

        def shown(value: float) -> str:
            return f"{100 * value:.1f} %" if self.unit == "%" else f"{value:.2f}"

        stated = shown(self.nominal) if self.relation == "is" else f"{self.relation} {shown(self.nominal)}"
        return {
            "statistic": self.name,
            "studies": self.where,
            "stated": stated,
            "held": f"{shown(self.held)} ± {shown(self.error)}",
            "statements": f"{self.count:,}",
            "": "" if self.right else "**off**",
        }


def share(name: str, where: str, nominal: float, hits: Sequence[bool], relation: Relation = "is") -> Row:
    """Returns the row of a share, with the half width of Wilson's interval."""
    count, weight = len(hits), Z95**2 / max(1, len(hits))
    held = sum(map(bool, hits)) / max(1, count)
    half = Z95 * math.sqrt(held * (1 - held) / max(1, count) + weight / (4 * max(1, count))) / (1 + weight)
    return Row(name, where, nominal, held, half, count, relation)


def mean(
    name: str, where: str, nominal: float, values: Iterable[float], slack: float = SLACK, unit: Literal["%", "x"] = "%",
    relation: Relation = "is",
) -> Row:  # fmt: skip
    """Returns the row of a mean over studies, with the 95 % interval of that."""
    known = list(values)
    error = Z95 * stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.inf
    return Row(name, where, nominal, fmean(known), error, len(known), relation, slack, unit)


def calibration(
    name: str, where: str, stated: Sequence[float], so: Sequence[bool], relation: Relation = "is"
) -> list[Row]:
    """Returns a row for each fifth of the stated chances."""
    rows = []
    for fifth in range(5):
        inside = [place for place, chance in enumerate(stated) if min(4, int(5 * chance)) == fifth]
        if len(inside) >= 30:
            nominal = fmean(stated[place] for place in inside)
            label = f"{where}; stated {20 * fifth} to {20 * fifth + 20} %"
            rows.append(share(name, label, nominal, [so[place] for place in inside], relation))
    return rows
