"""How a study's hypervolume grew, kept up as trials complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nas.core.archive import FrontArchive
from nas.service.live_table import LiveTable
from nas.store.columns import Completion, MeasuredRow


class Step(NamedTuple):
    """A moment at which the hypervolume grew.

    Args:
        trial: that made it grow.
        complete: trials that had come to count by then, this one included.
        at: seconds since the epoch.
        hypervolume: from then on.
    """

    trial: int
    complete: int
    at: float
    hypervolume: float


class LiveCourse:
    """The front of the complete trials that count, and the steps in which its hypervolume grew.

    Trials enter in the order in which they became complete, each with the coordinates that it has now. Where one that
    has entered gets other coordinates, all enter anew.

    Args:
        corner: the reference point; None until it is fixed, and there is neither front nor hypervolume.
    """

    def __init__(self, corner: Sequence[float] | None) -> None:
        self.corner = corner
        self._order: list[Completion] = []
        self._complete: set[int] = set()
        self._begin()

    def _begin(self) -> None:
        self._archive = None if self.corner is None else FrontArchive(self.corner)
        self._entered: dict[int, bytes] = {}
        self.steps: list[Step] = []

    @property
    def hypervolume(self) -> float | None:
        """Of the front now."""
        return None if self._archive is None else self._archive.hypervolume

    @property
    def front(self) -> list[int]:
        """The trials on it, by number."""
        return [] if self._archive is None else sorted(self._archive.keys.tolist())

    def counts(self, trials: Iterable[int]) -> bool:
        """Whether one of the trials has become complete."""
        return not self._complete.isdisjoint(trials)

    def entered(self) -> list[int]:
        """The complete trials that count, by number."""
        return sorted(self._entered)

    def complete(self, new: Sequence[Completion], table: LiveTable) -> None:
        """Takes trials that became complete."""
        self._order += new
        self._complete.update(each.trial for each in new)
        self._enter(new, table)

    def revise(self, touched: Iterable[int], table: LiveTable) -> bool:
        """Looks whether what is known of trials that have entered is another now; whether it was."""
        known = [trial for trial in touched if trial in self._complete]
        trials, points = table.points(known)
        now = {trial: point.tobytes() for trial, point in zip(trials, points, strict=True)}
        if all(now.get(trial) == self._entered.get(trial) for trial in known):
            return False
        self._begin()
        self._enter(self._order, table)
        return True

    def _enter(self, order: Sequence[Completion], table: LiveTable) -> None:
        if self._archive is None or not order:
            return
        at = {each.trial: each.at for each in order}
        trials, points = table.points([*at])
        before = self._archive.hypervolume
        gains = self._archive.take(trials, points)
        totals = np.cumsum([before, *gains])[1:]
        for trial, point, gain, total in zip(trials, points, gains, totals, strict=True):
            self._entered[trial] = point.tobytes()
            if gain > 0:
                self.steps.append(Step(trial, len(self._entered), at[trial], float(total)))


class DeviceSeconds:
    """What a study's own measurements took of its devices, whenever they were made."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._at: list[float] = []
        self._seconds: list[float] = []

    @property
    def total(self) -> float:
        """Seconds so far."""
        return float(np.sum(self._seconds))

    def add(self, measured: Iterable[MeasuredRow]) -> None:
        """Takes what was measured; what it has seen counts once."""
        for row in measured:
            key = bytes.fromhex(row.key)
            if key not in self._seen:
                self._seen.add(key)
                self._at.append(row.created)
                self._seconds.append(row.seconds)

    def until(self, moments: Sequence[float]) -> NDArray[np.float64]:
        """What had been spent by each of the moments."""
        order = np.argsort(self._at, kind="stable")
        spent = np.concatenate([[0.0], np.cumsum(np.asarray(self._seconds)[order])])
        return np.asarray(spent[np.searchsorted(np.asarray(self._at)[order], moments, side="right")])
