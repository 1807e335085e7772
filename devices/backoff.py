"""Pauses between tries: doubling, with jitter, so that many agents do not return in step."""

from __future__ import annotations

import random


class Backoff:
    """Pauses that grow from about `first_s` to `longest_s` seconds.

    Args:
        first_s: the first pause is between half of this and all of it.
        longest_s: no pause is longer.
        rng: the source of jitter.
    """

    def __init__(self, first_s: float = 0.2, longest_s: float = 30.0, rng: random.Random | None = None) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s
        self._rng = rng or random.Random()

    def reset(self) -> None:
        """After a success: the next pause is a first one."""
        self._next_s = self._first_s

    def pause_s(self) -> float:
        """The next pause, in seconds."""
        pause = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(self._next_s * 2, self._longest_s)
        return pause
