"""Rows of the table: what is stated of a statistic, and how often, or how far, that was so over simulated studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from nas.core.stats import mean_interval, share_interval

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
        low: lower end of the 95 % interval of `held`, that of the number of simulated studies.
        high: its upper end.
        count: statements.
        relation: of `held` to `nominal`.
        slack: how far `held` may be off.
        unit: "%" of shares; "x" of ratios, whose nominal is 1.
    """

    name: str
    where: str
    nominal: float
    held: float
    low: float
    high: float
    count: int
    relation: Relation = "is"
    slack: float = SLACK
    unit: Literal["%", "x"] = "%"

    @property
    def right(self) -> bool:
        """Whether `held` is where it is stated to be, as far as the number of studies tells."""
        not_above = self.relation == "at least" or self.low - self.slack <= self.nominal
        not_below = self.relation == "at most" or self.nominal <= self.high + self.slack
        return not_above and not_below

    def cells(self) -> dict[str, str]:
        """Returns the row of the page."""

        def text(value: float) -> str:
            return f"{100 * value:.1f} %" if self.unit == "%" else f"{value:.2f}"

        stated = text(self.nominal) if self.relation == "is" else f"{self.relation} {text(self.nominal)}"
        return {
            "statistic": self.name,
            "studies": self.where,
            "stated": stated,
            "held": f"{text(self.held)} ({text(self.low).removesuffix(' %')} to {text(self.high)})",
            "statements": f"{self.count:,}",
            "": "" if self.right else "**off**",
        }


def share(name: str, where: str, nominal: float, hits: Sequence[bool], relation: Relation = "is") -> Row:
    """Returns the row of a share, with Wilson's interval."""
    low, high = share_interval(sum(map(bool, hits)), len(hits))
    return Row(name, where, nominal, fmean(hits), low, high, len(hits), relation)


def mean(
    name: str, where: str, nominal: float, values: Sequence[float], slack: float = SLACK, unit: Literal["%", "x"] = "%"
) -> Row:
    """Returns the row of a mean over studies, with Student's interval."""
    value, half = mean_interval(values)
    return Row(name, where, nominal, value, value - half, value + half, len(values), "is", slack, unit)


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
