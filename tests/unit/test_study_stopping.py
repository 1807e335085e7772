"""When a study proposes no more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nas.core.space import StopRules
from nas.core.trial import Event, EventKind
from nas.search.study.events import Closed, Expected, Launched, closing, expectations
from nas.search.study.stopping import stop_reason

LITTLE, MUCH, UNKNOWN = (Expected(gain, 1.0, 4) for gain in (0.001, 0.1, None))


def rule(rules: StopRules, expected: Sequence[Expected] = (), proposed: int = 5, hours: float = 1.0) -> str | None:
    reason = stop_reason(rules, proposed=proposed, trials=10, hours=hours, expected=expected)
    return reason and reason.rule


def test_without_rules_trials_alone_end_it() -> None:
    assert rule(StopRules(), [LITTLE] * 9, hours=1e6) is None
    assert rule(StopRules(), proposed=10) == "trials"


def test_hours() -> None:
    assert rule(StopRules(hours=2), hours=1.9) is None
    assert rule(StopRules(hours=2), hours=2.0) == "hours"


@pytest.mark.parametrize(
    ("expected", "ends"),
    [
        ([LITTLE] * 3, True),
        ([MUCH, LITTLE, LITTLE, LITTLE], True),
        ([LITTLE] * 2, False),
        ([LITTLE, LITTLE, MUCH], False),
        ([LITTLE, UNKNOWN, LITTLE], False),
        ([Expected(0.0, 0.0, 4)] * 3, False),
    ],
)
def test_little_gain_ends_it_when_seen_thrice(expected: list[Expected], ends: bool) -> None:
    assert (rule(StopRules(gain=0.005), expected) == "gain") is ends


def test_a_launch_that_asks_for_more_opens_a_study_again() -> None:
    notes = [Launched(4), Closed("trials", "all 4"), Launched(4), Launched(2), Launched(6), Closed("hours", "over")]
    log = [Event(EventKind.PROGRESS, note.to_json(), trial=None) for note in notes]
    rules = [closed and closed.rule for closed in (closing(log[:count]) for count in range(1, 7))]
    assert rules == [None, "trials", "trials", "trials", None, "hours"]


def test_what_was_expected_is_read_from_the_log() -> None:
    event = Event(EventKind.PROGRESS, MUCH.to_json(), trial=3)
    assert expectations([event, Event(EventKind.PROGRESS, {"what": "else"}, trial=3)]) == {3: MUCH}
    assert MUCH.of_batch == pytest.approx(0.4)
    assert UNKNOWN.of_batch is None
