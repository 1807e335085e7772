"""Runs one stage under its result key: found, shared with whoever is at it, or done now; never twice.

A worker or device that dies costs that stage only: it is tried again here, and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.service.ledger import Ledger
from nas.store.rows import Stage

Outcome = dict[str, Any]
"""{"value": ...} or {"failed": {reason, message}}, with "seconds"."""
Action = Callable[[], Awaitable[Outcome]]

_TRIES = 3
_FIRST_PAUSE_S = 0.5


class Stages:
    """The stages of one study in this process.

    Args:
        ledger: where results are.
        tries: per stage, before its infrastructure failure is passed on.
    """

    def __init__(self, ledger: Ledger, tries: int = _TRIES) -> None:
        self._ledger = ledger
        self._tries = tries
        self._running: dict[str, asyncio.Task[Outcome]] = {}

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
        if failed := outcome.get("failed"):
            raise CandidateFailed(failed["reason"], failed["message"])
        return outcome["value"]

    async def _do(self, stage: Stage, key: str, trial: int, action: Action) -> Outcome:
        for attempt in range(1, self._tries + 1):
            try:
                outcome = await action()
                return self._ledger.put(key, stage, outcome, trial)
            except InfrastructureFailed as error:
                self._ledger.attempt(key, stage, trial, str(error))
                if attempt == self._tries:
                    raise
                await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable: the last try returns or raises")


def failure(error: CandidateFailed) -> Outcome:
    """A candidate's failure as a stage outcome."""
    return {"failed": {"reason": error.reason, "message": str(error)}}
