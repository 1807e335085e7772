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
        self._new: list[tuple[float, float]] = []
        self._rows = np.zeros((0, 2))
        """[M, 2] when each was made, in this order, and its seconds."""
        self._spent = np.zeros(1)
        """[M + 1] seconds of the first so many of them."""

    @property
    def total(self) -> float:
        """Seconds so far."""
        self._settle()
        return float(self._spent[-1])

    def add(self, measured: Iterable[MeasuredRow]) -> None:
        """Takes what was measured; what it has seen counts once."""
        for row in measured:
            key = bytes.fromhex(row.key)
            if key not in self._seen:
                self._seen.add(key)
                self._new.append((row.created, row.seconds))

    def until(self, moments: Sequence[float]) -> NDArray[np.float64]:
        """What had been spent by each of the moments."""
        self._settle()
        return np.asarray(self._spent[np.searchsorted(self._rows[:, 0], moments, side="right")])

    def _settle(self) -> None:
        """Puts what is new in its place: nearly always behind all the rest, which is then not reckoned again."""
        if not self._new:
            return
        kept = int(np.searchsorted(self._rows[:, 0], min(self._new)[0], side="left"))
        rest = np.concatenate([self._rows[kept:], np.array(self._new)])
        rest = rest[np.lexsort(rest.T[::-1])]
        self._new = []
        self._rows = np.concatenate([self._rows[:kept], rest])
        # One sum after the other, as over all rows at once: both are the same to the last digit.
        self._spent = np.concatenate([self._spent[:kept], np.cumsum([self._spent[kept], *rest[:, 1]])])
