"""Clocks as a dependency, so that tests of waits and deadlines do not wait."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds: `now` since the epoch, `monotonic` for durations."""

    def now(self) -> float: ...

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
