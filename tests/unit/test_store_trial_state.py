"""`nas.core.trial`: the only place where a trial's state comes from."""

from __future__ import annotations

import pytest

from nas.core.errors import InvalidInput
from nas.core.trial import TERMINAL, TRANSITIONS, Event, EventKind, TrialState, TrialStatus, advance, derive


def events(*kinds: str) -> list[Event]:
    """One event of each kind; `training` goes up a rung each time."""
    rungs = iter(range(len(kinds)))
    return [Event(EventKind(kind), {"rung": next(rungs)} if kind == "training" else {}, trial=0) for kind in kinds]


FULL = ("proposed", "exported", "measuring", "gated_in", "training", "training", "confirming", "complete")
FORKS = {
    ("proposed", "exported", "measuring", "infeasible"),
    ("proposed", "exported", "measuring", "borderline", "infeasible"),
    ("proposed", "exported", "measuring", "borderline", "gated_in", "training", "stopped"),
    ("proposed", "exported", "measuring", "gated_in", "training", "confirming", "infeasible"),
    ("proposed", "failed"),
    ("proposed", "exported", "cancelled"),
    FULL,
}


@pytest.mark.parametrize("kinds", sorted(FORKS), ids="-".join)
def test_lives_that_trials_may_have(kinds: tuple[str, ...]) -> None:
    assert derive(events(*kinds)).state == kinds[-1]
    assert derive(events(*kinds)).terminal


def test_every_prefix_of_a_life_is_in_its_last_events_state() -> None:
    for end in range(1, len(FULL)):
        status = derive(events(*FULL[:end]))
        assert status.state == FULL[end - 1]
        assert not status.terminal


@pytest.mark.parametrize("state", TrialState)
def test_only_listed_transitions_are_legal(state: TrialState) -> None:
    for kind in TrialState:
        event = Event(EventKind(kind.value), {"rung": 5}, trial=3)
        if kind in TRANSITIONS[state]:
            assert advance(TrialStatus(state), event).state is kind
        else:
            with pytest.raises(InvalidInput, match=r"trial 3: .*cannot become"):
                advance(TrialStatus(state), event)


def test_every_state_has_an_event_and_a_row_in_the_table() -> None:
    assert {state.value for state in TrialState} <= {kind.value for kind in EventKind}
    assert TRANSITIONS.keys() == set(TrialState)
    assert {state for state, targets in TRANSITIONS.items() if not targets} == TERMINAL - {TrialState.COMPLETE}


def test_fresh_seeds_may_find_a_complete_trial_infeasible() -> None:
    assert TRANSITIONS[TrialState.COMPLETE] == {TrialState.INFEASIBLE}
    status = TrialStatus(TrialState.COMPLETE, rung=2)
    outcome = advance(status, Event(EventKind.INFEASIBLE, {"reason": "below the limit"}, trial=3))
    assert outcome == TrialStatus(TrialState.INFEASIBLE, 2, "below the limit")


def test_failed_and_cancelled_can_follow_anything_unfinished() -> None:
    for state in set(TrialState) - TERMINAL:
        assert {TrialState.FAILED, TrialState.CANCELLED} <= TRANSITIONS[state]


def test_the_first_event_is_proposed() -> None:
    for kind in set(EventKind) - {EventKind.PROPOSED}:
        with pytest.raises(InvalidInput, match="first event"):
            derive([Event(kind, {"rung": 0})])
    with pytest.raises(InvalidInput, match="at least"):
        derive([])


def test_training_only_climbs() -> None:
    at_two = derive([*events("proposed", "exported", "measuring", "gated_in"), Event(EventKind.TRAINING, {"rung": 2})])
    assert at_two.rung == 2
    for payload in ({"rung": 2}, {"rung": 1}, {}):
        with pytest.raises(InvalidInput, match="rung above 2"):
            advance(at_two, Event(EventKind.TRAINING, payload))
    assert advance(at_two, Event(EventKind.STOPPED, {"reason": "not promoted"})) == TrialStatus(
        TrialState.STOPPED, 2, "not promoted"
    )


def test_a_retryable_failure_starts_over_and_another_does_not() -> None:
    lost = derive([*events("proposed"), Event(EventKind.FAILED, {"reason": "device", "retryable": True})])
    assert (lost.reason, lost.retryable, lost.terminal) == ("device", True, True)
    assert advance(lost, Event(EventKind.RETRIED)) == TrialStatus(TrialState.PROPOSED)
    broken = derive([*events("proposed"), Event(EventKind.FAILED, {"reason": "crash"})])
    with pytest.raises(InvalidInput, match="nothing"):
        advance(broken, Event(EventKind.RETRIED))
    with pytest.raises(InvalidInput, match="retried"):
        advance(lost, Event(EventKind.EXPORTED))


def test_progress_changes_nothing_and_a_study_event_is_no_trials() -> None:
    status = derive(events("proposed", "exported"))
    assert advance(status, Event(EventKind.PROGRESS, {"rung": 9, "reason": "x"})) == status
    with pytest.raises(InvalidInput):
        advance(status, Event(EventKind.STUDY))
