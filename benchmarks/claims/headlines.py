"""The sentence of a study: what it claims where nothing is better, and what it states of true gains."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from benchmarks.claims.rows import Relation, Row, mean, share
from benchmarks.claims.world import Floats, World, snapshot
from nas.core.comparison import CONFIDENCE
from nas.search.analysis.headline import Headline, headline
from nas.search.analysis.snapshot import StudySnapshot

CANDIDATES = (12, 60, 300)
GAINS = (0.03, 0.10, 0.30)
_FEWER = {12: 1, 60: 2, 300: 5}
"""Large studies take longer, so that there are fewer of them."""
_FIRST = 2
"""Number of the first candidate: those before it are references."""


def null_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields how often something is claimed in studies in which every candidate equals the reference."""
    for count in CANDIDATES:
        for second in (True, False):
            claims = []
            for _ in range(max(8, studies // _FEWER[count])):
                record = World(rng).study(np.zeros(count), np.ones(count), second=second)
                claims.append(of(headline(snapshot(record))).better > 0)
            where = f"{count} candidates, all equal to the reference, {_measured(second)}"
            yield share("headline: a layout is better", where, 1 - CONFIDENCE, claims, "at most")


def gain_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields how true the statements about true gains are; some candidates are better, most are not."""
    for gain in GAINS:
        for second in (True, False):
            off, covered, mistakes = [], [], []
            for _ in range(studies):
                log_latency, quality = _mixed(rng, 30, gain)
                statement = of(headline(snapshot(World(rng).study(log_latency, quality, second=second))))
                assert statement.named is not None, "a study with a front names a trial"
                place = statement.named - _FIRST
                truth = {"latency": math.expm1(log_latency[place]), "quality": quality[place] - 1}
                if second:
                    off += [
                        row.change - truth["latency"]
                        for row in statement.gains
                        if row.objective == "latency" and row.change
                    ]
                if statement.gains:
                    bounds = [
                        (_or(row.low, -math.inf), truth[row.objective], _or(row.high, math.inf))
                        for row in statement.gains
                    ]
                    covered.append(all(low <= true <= high for low, true, high in bounds))
                mistakes.append(statement.best is not None and truth["latency"] >= 0 and truth["quality"] <= 0)
            where = f"30 candidates, the best {100 * gain:.0f} % faster, {_measured(second)}"
            if second:
                yield mean("headline: stated gain - true gain", where, 0.0, off, slack=0.002)
            relation: Relation = "is" if second else "at least"
            yield share("headline: all stated intervals hold", where, CONFIDENCE, covered, relation)
            yield share(
                "headline: the named layout is called better and is not", where, 1 - CONFIDENCE, mistakes, "at most"
            )


def reliability_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields how often quality is said to order layouts of one quality: all of a study, and the best third of one."""
    for count in (9, 20, 60):
        falling = 1 - np.maximum(0, np.arange(count) - count // 3) * 0.2
        for quality, phrases, name, where in (
            (np.ones(count), ("Quality orders", "Quality tells"), "the layouts", "candidates of one quality"),
            (falling, ("Quality orders",), "the best third", "candidates, the best third of one quality"),
        ):
            claims = []
            for _ in range(studies):
                record = World(rng).study(np.linspace(-0.3, 0.3, count), quality, second=False)
                text = of(headline(StudySnapshot(record))).text
                assert "reliability" in text, "there are enough layouts"
                claims.append(any(phrase in text for phrase in phrases))
            statistic = f"headline: quality is said to order {name}"
            yield share(statistic, f"{count} {where}", 1 - CONFIDENCE, claims, "at most")


def _mixed(rng: np.random.Generator, count: int, gain: float) -> tuple[Floats, Floats]:
    """Returns latencies and qualities: a tenth gains `gain` at equal quality, others lose in one or in both."""
    log_latency = rng.normal(0.05, gain, count).clip(math.log1p(-gain), None)
    quality = 1 - np.abs(rng.normal(0, 0.05, count))
    best = rng.permutation(count)[: max(1, count // 10)]
    log_latency[best], quality[best] = math.log1p(-gain), 1.0
    return log_latency, quality


def _measured(second: bool) -> str:
    return "measured again" if second else "measured once"


def of(statement: Headline | None) -> Headline:
    assert statement is not None, "the references are measured"
    return statement


def _or(number: float | None, other: float) -> float:
    return other if number is None else number
