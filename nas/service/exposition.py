"""Metrics in Prometheus' text format (version 0.0.4): what is counted, and how it is written.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import bisect
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """The samples of one metric at one moment.

    Args:
        name: with unit and, for a counter, `_total` at its end.
        kind: of the metric.
        help: one line.
        labels: their names.
        samples: values of the labels, in that order -> value.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: Sequence[str]
    samples: Mapping[Labels, float]

    def lines(self) -> Iterator[str]:
        """The family as text."""
        yield from _head(self.name, self.kind, self.help)
        for values, value in sorted(self.samples.items()):
            yield _sample(self.name, zip(self.labels, values, strict=True), value)


class Counter:
    """Counts events since the process began. Safe for use by several threads."""

    def __init__(self, name: str, help: str, labels: Sequence[str]) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._counts: dict[Labels, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, *labels: str) -> None:
        """One more."""
        with self._lock:
            self._counts[labels] += 1

    def lines(self) -> Iterator[str]:
        """The counter as text."""
        with self._lock:
            counts = dict(self._counts)
        return Family(self._name, "counter", self._help, self._labels, counts).lines()


class Histogram:
    """Counts durations by upper bounds since the process began. Safe for use by several threads.

    Args:
        name: with its unit.
        help: one line.
        labels: their names.
        bounds: upper bounds of the buckets, ascending, in seconds; there is one more without bound.
    """

    def __init__(self, name: str, help: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name, self._help, self._labels, self._bounds = name, help, labels, bounds
        self._buckets: dict[Labels, list[int]] = defaultdict(lambda: [0] * (len(bounds) + 1))
        self._sums: dict[Labels, float] = defaultdict(float)
        self._lock = threading.Lock()

    def observe(self, seconds: float, *labels: str) -> None:
        """One more, of this length."""
        with self._lock:
            self._buckets[labels][bisect.bisect_left(self._bounds, seconds)] += 1
            self._sums[labels] += seconds

    def lines(self) -> Iterator[str]:
        """The histogram as text."""
        with self._lock:
            found = [(labels, list(counts), self._sums[labels]) for labels, counts in self._buckets.items()]
        yield from _head(self._name, "histogram", self._help)
        for values, counts, total in sorted(found):
            labels = list(zip(self._labels, values, strict=True))
            cumulative = list(accumulate(counts))
            for bound, count in zip([*map(str, self._bounds), "+Inf"], cumulative, strict=True):
                yield _sample(f"{self._name}_bucket", [*labels, ("le", bound)], count)
            yield _sample(f"{self._name}_sum", labels, total)
            yield _sample(f"{self._name}_count", labels, cumulative[-1])


def _head(name: str, kind: str, help: str) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def _sample(name: str, labels: Iterable[tuple[str, str]], value: float) -> str:
    shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
    return f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
