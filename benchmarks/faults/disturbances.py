"""Records disturbances with their times, to decide whether a failure had a cause."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

CAUSES = {
    "lease": r"did not renew its lease|asked for work while|epoch \d+ of .* is over|in use by another|agent's host",
    "coordinator": r"^(coordinator:|download|the coordinator's own )",
    "disk": r"No space left|\(\d MB are free",
    "damage": r"damaged|the bytes have SHA-256",
    "wire": r"^(ssh://|adb:|\d+\.\d+\.\d+\.\d+:)|restarted or exchanged|was released before the job began",
}
"""Causes of failures, by patterns of their messages. The first match counts."""

AFTER_S = {"lease": 45.0, "coordinator": 20.0, "disk": 20.0, "damage": 60.0, "wire": 45.0}
"""Seconds after its end in which a disturbance may still cause failures: a lease expires after 30 s, a silent network
is noticed after 15 s or at a run's deadline, and damage when the file is read."""


_REPORT_S = 120.0
"""Seconds after a disturbance of the whole farm in which its agent and coordinator start on a busy host."""
_UNAVAILABLE = frozenset({"coordinator", "disk"})
_LOG_S = 0.001
"""Resolution of times in the coordinator's log."""


def cause(message: str) -> str | None:
    """Returns the cause that matches the message, if any."""
    return next((name for name, pattern in CAUSES.items() if re.search(pattern, message)), None)


@dataclass(slots=True)
class Disturbance:
    """One active fault.

    Args:
        device: the affected one; None: all.
        causes: of failures that it explains.
        start: seconds since the epoch.
        end: same; None while it lasts.
    """

    device: str | None
    causes: frozenset[str]
    start: float
    end: float | None = None


class Disturbances:
    """All disturbances of a campaign. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Disturbance] = []

    @contextlib.contextmanager
    def disturbed(self, device: str | None, causes: frozenset[str]) -> Iterator[Disturbance]:
        """Records a disturbance from now to the end of the context."""
        disturbance = Disturbance(device, causes, time.time())
        with self._lock:
            self._all.append(disturbance)
        try:
            yield disturbance
        finally:
            disturbance.end = time.time()

    def answers(self, at: float) -> bool:
        """Returns whether a disturbance explains that the coordinator answered 503 at this time."""
        with self._lock:
            return any(
                _UNAVAILABLE & disturbance.causes
                and disturbance.start - _LOG_S <= at
                and (disturbance.end is None or at <= disturbance.end + AFTER_S["coordinator"])
                for disturbance in self._all
            )

    def excuses(self, message: str, device: str, at: float) -> bool:
        """Returns whether a disturbance explains a failure of the device, reported at this time, by this cause."""
        with self._lock:
            return any(
                message in disturbance.causes
                and disturbance.device in (None, device)
                and disturbance.start <= at
                and (disturbance.end is None or at <= self._reported_by(disturbance.end + AFTER_S[message]))
                for disturbance in self._all
            )

    def _reported_by(self, noticed: float) -> float:
        """Returns until when a failure may be reported that was noticed by then.

        Reports wait for the agent and the coordinator, so also for later disturbances of the whole farm.
        """
        end = noticed
        for disturbance in sorted(self._all, key=lambda disturbance: disturbance.start):
            if disturbance.device is None and disturbance.start <= end:
                end = max(end, math.inf if disturbance.end is None else disturbance.end + _REPORT_S)
        return end
