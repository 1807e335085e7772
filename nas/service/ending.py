"""When a study proposes no more: its trials are used up, its time is, or the next batch would add too little."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from nas.core.space import StopRules
from nas.core.trial import Event
from nas.search import is_exhausted
from nas.service.ledger import Ledger
from nas.service.record import elapsed

CLOSED = "closed"
"""Events that say why no more layouts are proposed."""
EXPECTED = "expected gain"
"""Events of a trial that say what its proposer expected of it, and of how much it would have been a gain."""
_IN_A_ROW = 3
"""Proposals of little expected gain that end a study: one alone may be a whim of the model."""


class Expected(NamedTuple):
    """What was expected of one proposal.

    Args:
        gain: in hypervolume; None where no model chose the layout.
        hypervolume: that was reached then.
        batch: layouts that are asked for side by side.
        quality: minimised, that was forecast of the layout; None where no model did.
    """

    gain: float | None
    hypervolume: float
    batch: int
    quality: float | None = None

    @property
    def of_batch(self) -> float | None:
        """Upper bound of the gain of a whole batch: no other of its layouts is expected to gain more."""
        return None if self.gain is None else self.gain * self.batch


def expectations(log: Iterable[Event]) -> dict[int, Expected]:
    """Trial -> what was expected of it, in the order of the log."""
    return {
        event.trial: Expected(*(event.payload[name] for name in Expected._fields))
        for event in log
        if event.trial is not None and event.payload.get("what") == EXPECTED
    }


def why_end(
    rules: StopRules, *, proposed: int, wanted: int, hours: float, expected: Sequence[Expected]
) -> dict[str, Any] | None:
    """The rule that ends the study, with a sentence; None where none does.

    Args:
        rules: the space's.
        proposed: layouts so far, references not counted.
        wanted: layouts in all.
        hours: that the study has run.
        expected: of the proposals so far.
    """
    if proposed >= wanted:
        return {"rule": "trials", "message": f"all {wanted} layouts were proposed"}
    if rules.hours is not None and hours >= rules.hours:
        return {"rule": "hours", "message": f"it ran for the {rules.hours:g} hours that it had"}
    last = expected[-_IN_A_ROW:]
    if rules.gain is not None and len(last) == _IN_A_ROW:
        share = rules.gain
        if all(is_exhausted(each.gain, each.hypervolume, each.batch, share) for each in last):
            return {"rule": "gain", "message": f"the next batch is expected to gain less than {share:.2%}"}
    return None


class Ending:
    """Watches one study's rules, and keeps in its log why it ended.

    Args:
        rules: the space's.
        ledger: the study's log.
        wanted: layouts in all.
    """

    def __init__(self, rules: StopRules, ledger: Ledger, wanted: int) -> None:
        self._rules, self._ledger, self._wanted = rules, ledger, wanted
        self._expected: dict[int, Expected] = {}
        self._told: dict[str, Any] | None = None
        self._before_s, self._begun = 0.0, time.monotonic()

    def recall(self, log: list[Event]) -> None:
        """Takes up where the log ends."""
        self._expected = expectations(log)
        self._told = ending(log)
        self._before_s = next(reversed(elapsed(log)), 0.0)

    def expect(self, trial: int, expected: Expected) -> None:
        """A layout was proposed, of which so much was expected."""
        self._expected[trial] = expected
        self._ledger.note(trial, EXPECTED, **expected._asdict())

    def forecast(self, trial: int) -> float | None:
        """The quality that was forecast of a trial when it was proposed."""
        expected = self._expected.get(trial)
        return expected.quality if expected else None

    def is_due(self, proposed: int) -> bool:
        """Whether a rule ends the study."""
        hours = (self._before_s + time.monotonic() - self._begun) / 3600
        why = why_end(
            self._rules, proposed=proposed, wanted=self._wanted, hours=hours, expected=[*self._expected.values()]
        )
        if why is not None:
            self._tell(why)
        return why is not None

    def space_is_empty(self) -> None:
        """The proposer has no more layouts."""
        self._tell({"rule": "space", "message": "the space has no more layouts"})

    def _tell(self, why: dict[str, Any]) -> None:
        if why != self._told:
            self._told = why
            self._ledger.note(None, CLOSED, **why)


def ending(log: Iterable[Event]) -> dict[str, Any] | None:
    """Why no more layouts are proposed, {rule, message}; None while they are."""
    told = [event.payload for event in log if event.payload.get("what") == CLOSED]
    return {key: told[-1][key] for key in ("rule", "message")} if told else None
