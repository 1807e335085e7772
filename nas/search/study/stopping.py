"""Stopping rules of a study: number of trials, hours, or a next batch that would gain too little."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nas.core.space import StopRules
from nas.core.trial import Event
from nas.core.units import show_share
from nas.search.proposers import is_exhausted
from nas.search.study.events import Closed, Expected, closing, elapsed, expectations
from nas.search.study.ledger import Ledger

_IN_A_ROW = 3
"""Consecutive proposals of little expected gain that end a study: a single one may be an outlier of the model."""


class StoppingRules:
    """Applies the stopping rules of one study and logs which one closed it.

    Args:
        rules: the space's.
        ledger: the study's log.
        trials: layouts in all.
    """

    def __init__(self, rules: StopRules, ledger: Ledger, trials: int) -> None:
        self._rules, self._ledger, self._trials = rules, ledger, trials
        self._expected: dict[int, Expected] = {}
        self._logged: Closed | None = None
        self._before_s, self._start = 0.0, time.monotonic()

    def recall(self, log: list[Event]) -> None:
        """Restores the state from the log of earlier launches."""
        self._expected = expectations(log)
        self._logged = closing(log)
        self._before_s = next(reversed(elapsed(log)), 0.0)

    def expect(self, trial: int, expected: Expected) -> None:
        """Logs the forecast of a proposal."""
        self._expected[trial] = expected
        self._ledger.note(trial, expected)

    def is_due(self, proposed: int) -> bool:
        """Returns whether a rule ends the study, and logs it."""
        hours = (self._before_s + time.monotonic() - self._start) / 3600
        why = stop_reason(
            self._rules, proposed=proposed, trials=self._trials, hours=hours, expected=[*self._expected.values()]
        )
        if why is not None:
            self._log(why)
        return why is not None

    def space_is_empty(self) -> None:
        """Logs that the proposer has no more layouts."""
        self._log(Closed("space", "the space has no more layouts"))

    def _log(self, why: Closed) -> None:
        if why != self._logged:
            self._logged = why
            self._ledger.note(None, why)


def stop_reason(
    rules: StopRules, *, proposed: int, trials: int, hours: float, expected: Sequence[Expected]
) -> Closed | None:
    """Returns the rule that ends the study; None if none does.

    Args:
        rules: the space's.
        proposed: layouts so far, references not counted.
        trials: layouts in all.
        hours: that the study has run.
        expected: of the proposals so far.
    """
    if proposed >= trials:
        return Closed("trials", f"all {trials} layouts were proposed")
    if rules.hours is not None and hours >= rules.hours:
        return Closed("hours", f"it ran for the {rules.hours:g} hours that it had")
    last = expected[-_IN_A_ROW:]
    if rules.gain is not None and len(last) == _IN_A_ROW:
        share = rules.gain
        if all(is_exhausted(forecast.gain, forecast.hypervolume, forecast.batch, share) for forecast in last):
            return Closed("gain", f"the next batch is expected to gain less than {show_share(share)}")
    return None
