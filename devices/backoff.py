"""Pauses between tries: random ones below a bound that doubles ("full jitter"), so that many agents spread out.

Where nobody answers, the bound ends low: knocking at a closed port costs next to nothing, and a coordinator that is
back should have its agents back. A thousand of them then come evenly over these seconds. A coordinator that answers,
but is in trouble, is left alone for longer.

Source: M. Brooker, Exponential Backoff And Jitter, AWS Architecture Blog, 2015 ("Full Jitter").
"""

from __future__ import annotations

import random

from nas.devices.client import NotReached

NOBODY_THERE_S, IN_TROUBLE_S = 6.0, 30.0
"""Longest pauses: where the connection is refused, and after any other failure of the coordinator."""


class Backoff:
    """Pauses that grow from at most `first_s` to at most `longest_s` seconds.

    Args:
        first_s: bound of the first pause.
        longest_s: no pause is longer.
        rng: the source of jitter.
    """

    def __init__(self, first_s: float = 0.2, longest_s: float = IN_TROUBLE_S, rng: random.Random | None = None) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._bound_s = first_s
        self._rng = rng or random.Random()

    def reset(self) -> None:
        """After a success: the next pause is a first one."""
        self._bound_s = self._first_s

    def pause_s(self, error: Exception) -> float:
        """The next pause after `error`, in seconds."""
        bound_s = min(self._bound_s, NOBODY_THERE_S) if isinstance(error, NotReached) else self._bound_s
        self._bound_s = min(self._bound_s * 2, self._longest_s)
        return bound_s * self._rng.random()
