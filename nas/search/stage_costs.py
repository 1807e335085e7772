"""What each stage of a trial takes, learned from the trials that went through it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nas.core.quality_config import Rung


class StageCosts:
    """Seconds of a trial's stages, device and training together: on one host they are spent one after the other.

    Args:
        rungs: of the ladder; before a rung has been seen, its seconds are guessed from its training steps.
    """

    def __init__(self, rungs: Sequence[Rung]) -> None:
        self._steps = [_new_steps(rungs, index) for index in range(len(rungs))]
        self._rungs: list[dict[int, float]] = [{} for _ in rungs]
        self._entries: dict[int, float] = {}
        self._confirmations: dict[int, float] = {}

    def enter(self, trial: int, seconds: float) -> None:
        """Export and device gate, whatever the gate's verdict."""
        self._entries[trial] = seconds

    def train(self, trial: int, rung: int, seconds: float) -> None:
        """What a rung took beyond the one before it."""
        self._rungs[rung][trial] = seconds

    def confirm(self, trial: int, seconds: float) -> None:
        """The equivalence gate and the measurement of the top rung."""
        self._confirmations[trial] = seconds

    def rung(self, rung: int) -> float:
        """Mean seconds of a rung."""
        if self._rungs[rung]:
            return _mean(self._rungs[rung])
        seen = [index for index, spent in enumerate(self._rungs) if spent]
        if not seen:
            return float(self._steps[rung])
        pace = math.fsum(_mean(self._rungs[i]) for i in seen) / max(1, sum(self._steps[i] for i in seen))
        return pace * self._steps[rung]

    @property
    def confirmation(self) -> float:
        """Mean seconds of a confirmation; before the first, those of an entry."""
        return _mean(self._confirmations or self._entries)

    @property
    def training(self) -> float:
        """Mean seconds of all rungs together."""
        return math.fsum(self.rung(rung) for rung in range(len(self._rungs)))

    @property
    def arrival(self) -> float:
        """Seconds for one more candidate at the lowest rung: with what was spent on those that the gate refused."""
        arrived = max(1, len(self._rungs[0].keys() & self._entries.keys()))
        return math.fsum(self._entries.values()) / arrived + self.rung(0)


def _mean(spent: dict[int, float]) -> float:
    return math.fsum(spent.values()) / len(spent) if spent else 0.0


def _new_steps(rungs: Sequence[Rung], index: int) -> int:
    """Optimiser steps that a rung adds: a language model goes on from the rung before where that has its seed."""
    rung = rungs[index]
    before = {seed: below.lm_steps for below in rungs[:index] if below.lm_steps for seed in below.seeds}
    lm = sum(max(0, rung.lm_steps - before.get(seed, 0)) for seed in rung.seeds) if rung.lm_steps else 0
    tasks = sum(stage.steps * len(rung.task_seeds(name)) for name, stage in rung.tasks.items())
    return lm + tasks
