"""Runs one stage under its result key: found, shared with whoever is at it, or done now; never twice.

A worker that dies costs that stage only: it is tried again here, and nowhere else. What dies on a device is tried again
by the job table.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.service.ledger import Ledger
from nas.store.rows import Stage

Outcome = dict[str, Any]
"""{"value": ...} or {"failed": {reason, message}}, with "seconds"."""
Action = Callable[[], Awaitable[Outcome]]

_TRIES = {"export": 3, "train": 3, "gate": 3, "measure": 1}
_FIRST_PAUSE_S = 0.5


class Stages:
    """The stages of one study in this process.

    Args:
        ledger: where results are.
        first_pause_s: before the second try of a stage; doubles with each.
    """

    def __init__(self, ledger: Ledger, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        self._ledger = ledger
        self._first_pause_s = first_pause_s
        self._running: dict[str, asyncio.Task[Outcome]] = {}
        self._seconds: dict[int, dict[str, float]] = {}

    async def run(self, stage: Stage, key: str, trial: int, action: Action) -> Any:
        """The stage's value, from the store where it is there already.

        Raises:
            CandidateFailed: the candidate's own failure, which is its result.
            InfrastructureFailed: the last of several tries failed.
        """
        outcome = self._ledger.result(key, trial)
        while outcome is None:
            task = self._running.get(key)
            if task is None:
                task = asyncio.ensure_future(self._do(stage, key, trial, action))
                self._running[key] = task
                task.add_done_callback(lambda _: self._running.pop(key, None))
                outcome = await task
            else:
                # Another trial has the same proxy: its work is ours. Its cancellation is not.
                await asyncio.wait([task])
                outcome = self._ledger.result(key, trial)
        self._seconds.setdefault(trial, {})[key] = float(outcome.get("seconds", 0.0))
        return value_of(outcome)

    def seconds(self, trial: int) -> float:
        """What the stages that a trial went through take, whoever they were done for, each once."""
        return math.fsum(self._seconds.get(trial, {}).values())

    async def _do(self, stage: Stage, key: str, trial: int, action: Action) -> Outcome:
        tries = _TRIES[stage]
        for past in range(tries):
            try:
                outcome = await action()
                return self._ledger.put(key, stage, outcome, trial)
            except InfrastructureFailed as error:
                self._ledger.attempt(key, stage, trial, str(error))
                if past == tries - 1:
                    raise
                await asyncio.sleep(self._first_pause_s * 2**past)
        raise AssertionError("unreachable: the last try returns or raises")


def value_of(outcome: Outcome) -> Any:
    """The value of an outcome that has one.

    Raises:
        CandidateFailed: it is the candidate's failure.
    """
    if failed := outcome.get("failed"):
        raise CandidateFailed(failed["reason"], failed["message"])
    return outcome["value"]


def failure(error: CandidateFailed) -> Outcome:
    """A candidate's failure as a stage outcome."""
    return {"failed": {"reason": error.reason, "message": str(error)}}
