"""What was disturbed when: so that every failure can be asked whether it had a cause."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

CAUSES = {
    "lease": r"did not renew its lease|its agent was gone|epoch \d+ of .* is over|in use by another|agent's host",
    "coordinator": r"^(coordinator:|download|the coordinator's own )",
    "disk": r"No space left|MB are free",
    "damage": r"damaged|the bytes have SHA-256",
    "wire": r"^(ssh://|adb:|\d+\.\d+\.\d+\.\d+:)|restarted or exchanged|was let go before the job began",
}
"""Kinds of reasons for a failure, by what its message says. The first that fits counts."""

AFTER_S = {"lease": 45.0, "coordinator": 20.0, "disk": 20.0, "damage": 60.0, "wire": 45.0}
"""How long after its end a disturbance may still be told: a lease runs out after 30 s, a silent network is noticed
after 15 s or when a run should have ended, and damage when somebody looks."""


def cause(message: str) -> str | None:
    """Which of `CAUSES` the message tells; None where it tells none."""
    return next((name for name, pattern in CAUSES.items() if re.search(pattern, message)), None)


@dataclass(slots=True)
class Disturbance:
    """One fault at work.

    Args:
        device: whom it concerns; None: all.
        tells: the causes that may be told of it.
        begun: seconds since the epoch.
        ended: same; None while it lasts.
    """

    device: str | None
    tells: frozenset[str]
    begun: float
    ended: float | None = None


class Weather:
    """All disturbances of a campaign. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Disturbance] = []

    @contextlib.contextmanager
    def disturbed(self, device: str | None, tells: frozenset[str]) -> Iterator[Disturbance]:
        """From now to the end of the context."""
        begun = Disturbance(device, tells, time.time())
        with self._lock:
            self._all.append(begun)
        try:
            yield begun
        finally:
            begun.ended = time.time()

    def excuses(self, told: str, device: str, at: float) -> bool:
        """Whether a failure of the device at this time may have had this cause."""
        with self._lock:
            return any(
                told in each.tells
                and each.device in (None, device)
                and each.begun <= at
                and (each.ended is None or at <= each.ended + AFTER_S[told])
                for each in self._all
            )
