"""Studies, their leases, trials and events."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import StatementError
from store_support import SPACE, StillClock, new_study, proposal

from nas.core.errors import InvalidInput, StudyBusy, UnknownName
from nas.core.trial import EventKind, TrialState, TrialStatus, derive
from nas.infra.store import events, leases, studies, trials
from nas.infra.store.rows import StudyState
from nas.infra.store.store import Store


@pytest.mark.sql
def test_a_study_comes_back_as_it_was_made(store: Store) -> None:
    study = studies.create(store, "lfm2.a-b_c", SPACE, seed=3, version="0.2.0")
    assert study == studies.get(store, "lfm2.a-b_c") == studies.get(store, study.id)
    assert (study.space, study.state, study.desired_state) == (SPACE, "new", "run")
    assert study.scales is None and study.reference_point is None


def test_names_are_unique_and_plain(store: Store) -> None:
    new_study(store, "first")
    with pytest.raises(InvalidInput, match="--resume"):
        new_study(store, "first")
    for name in ("", "../up", "a b", "x" * 65, ".hidden"):
        with pytest.raises(InvalidInput, match="no study name"):
            new_study(store, name)
    with pytest.raises(InvalidInput, match=r"'first\.json' is the address of another study's data"):
        new_study(store, "first.json")
    with pytest.raises(UnknownName, match="did you mean 'first'"):
        studies.get(store, "frist")


def test_states_are_written_and_logged_once(store: Store) -> None:
    study = new_study(store)
    studies.set_desired_state(store, study.id, "pause")
    for _ in range(2):
        studies.set_state(store, study.id, StudyState.PAUSED)
    again = studies.get(store, study.id)
    assert (again.state, again.desired_state) == (StudyState.PAUSED, "pause")
    assert [event.payload for event in events.since(store, study.id)] == [{"state": "paused"}]
    for call in (lambda: studies.set_desired_state(store, 99, "stop"), lambda: events.append(store, 99, {})):
        with pytest.raises(UnknownName):
            call()


def test_the_reference_point_freezes(store: Store) -> None:
    study = new_study(store)
    for _ in range(2):
        assert studies.freeze_reference(store, study.id, {"quality": 0.5, "latency": 2}).reference_point == {
            "quality": 0.5,
            "latency": 2,
        }
    with pytest.raises(InvalidInput, match="frozen"):
        studies.freeze_reference(store, study.id, {"quality": 0.6, "latency": 2})
    assert len(events.since(store, study.id)) == 1


@pytest.mark.sql
def test_a_lease_excludes_others_until_it_ends(store: Store, clock: StillClock) -> None:
    study = new_study(store)
    first = leases.acquire(store, study.id, "one")
    with pytest.raises(StudyBusy, match="run by one; its lease ends in 30 s"):
        leases.acquire(store, study.id, "two")
    clock.time += 29
    first = leases.renew(store, first)
    clock.time += 29
    with pytest.raises(StudyBusy):
        leases.acquire(store, study.id, "two")
    clock.time += 1
    second = leases.acquire(store, study.id, "two")
    assert (first.epoch, second.epoch) == (1, 2)
    with pytest.raises(StudyBusy, match="run by two now"):
        leases.renew(store, first)
    leases.release(store, first)
    second = leases.renew(store, second)
    leases.release(store, second)
    assert leases.acquire(store, study.id, "one").epoch == 3


def test_an_expired_lease_is_good_until_it_is_taken(store: Store, clock: StillClock) -> None:
    lease = leases.acquire(store, new_study(store).id, "one")
    clock.time += 300
    assert leases.renew(store, lease).expires == clock.time + 30


def test_every_write_of_a_lost_lease_is_refused(store: Store, clock: StillClock) -> None:
    study = new_study(store).id
    old = leases.acquire(store, study, "old")
    trials.propose(store, study, [proposal(32)], lease=old)
    clock.time += leases.LEASE_S
    leases.acquire(store, study, "new")
    for write in (
        lambda: trials.propose(store, study, [proposal(64)], lease=old),
        lambda: trials.add_event(store, study, 0, EventKind.EXPORTED, lease=old),
        lambda: studies.set_state(store, study, StudyState.RUNNING, lease=old),
        lambda: studies.freeze_reference(store, study, {"q": 1}, lease=old),
        lambda: studies.set_scales(store, study, {"q": 1}, lease=old),
        lambda: events.append(store, study, {}, lease=old),
    ):
        with pytest.raises(StudyBusy):
            write()
    stored = studies.get(store, study)
    assert (stored.proposer, stored.reference_point, stored.scales, stored.state) == (None, None, None, StudyState.NEW)
    assert len(events.since(store, study)) == len(trials.all(store, study)) == 1


def test_holders_are_never_the_same_twice() -> None:
    assert leases.new_holder() != leases.new_holder()


def test_trials_are_numbered_without_gaps_and_repeated_proposals_use_none(store: Store) -> None:
    study = new_study(store).id
    other = new_study(store, "other").id
    first = trials.propose(store, study, [proposal(32, origin="reference"), proposal(64), proposal(32)])
    assert [trial.number for trial in first] == [0, 1, 0]
    [again, child] = trials.propose(store, study, [proposal(64), proposal(96, parents=(0, 1), operator="crossover")])
    assert (again.number, child.number, child.parents, child.operator) == (1, 2, (0, 1), "crossover")
    assert [trial.number for trial in trials.propose(store, other, [proposal(32)])] == [0]
    assert trials.get(store, study, 2) == child
    with pytest.raises(UnknownName, match="0 to 2"):
        trials.get(store, study, 3)


def test_all_proposals_are_stored_or_none(store: Store) -> None:
    study = new_study(store).id
    trials.propose(store, study, [proposal(32)])
    with pytest.raises((StatementError, ValueError), match="not JSON compliant"):
        trials.propose(store, study, [proposal(64), proposal(96, record={"bad": float("nan")})])
    assert len(trials.all(store, study)) == 1


def test_events_lead_to_a_status_that_is_what_derive_says(store: Store, clock: StillClock) -> None:
    study = new_study(store).id
    trials.propose(store, study, [proposal(32), proposal(64)])
    steps = [
        (EventKind.EXPORTED, {}),
        (EventKind.MEASURING, {}),
        (EventKind.PROGRESS, {"repetition": 1}),
        (EventKind.GATED_IN, {}),
        (EventKind.TRAINING, {"rung": 0}),
        (EventKind.TRAINING, {"rung": 1}),
        (EventKind.STOPPED, {"reason": "not promoted"}),
    ]
    for kind, payload in steps:
        clock.time += 1
        status = trials.add_event(store, study, 0, kind, payload)
        log = [event for event in events.since(store, study) if event.trial == 0]
        assert status == trials.get(store, study, 0).status == derive(log)
    assert status == TrialStatus(TrialState.STOPPED, 1, "not promoted")
    assert trials.get(store, study, 0).updated == clock.time
    assert [trial.number for trial in trials.all(store, study, states=[TrialState.PROPOSED])] == [1]


def test_a_repeated_transition_is_no_event_and_an_illegal_one_an_error(store: Store) -> None:
    study = new_study(store).id
    trials.propose(store, study, [proposal(32)])
    for _ in range(2):
        trials.add_event(store, study, 0, EventKind.EXPORTED)
    assert len(events.since(store, study)) == 2
    trials.add_event(store, study, 0, EventKind.CANCELLED, {"reason": "by the user"})
    with pytest.raises(InvalidInput, match="'cancelled' cannot become 'measuring'"):
        trials.add_event(store, study, 0, EventKind.MEASURING)
    with pytest.raises(UnknownName):
        trials.add_event(store, study, 5, EventKind.EXPORTED)


@pytest.mark.sql
def test_events_are_read_in_pages_by_id(store: Store) -> None:
    study, other = new_study(store).id, new_study(store, "other").id
    for number in range(5):
        events.append(store, study, {"n": number})
        events.append(store, other, {"n": -1})
    first = events.since(store, study, limit=2)
    rest = events.since(store, study, first[-1].id)
    assert [event.payload["n"] for event in first + rest] == [0, 1, 2, 3, 4]
    assert events.since(store, study, rest[-1].id) == []


@pytest.mark.sql
def test_a_study_is_deleted_whole_but_not_while_it_runs(store: Store, clock: StillClock) -> None:
    study = new_study(store).id
    lease = leases.acquire(store, study, "one")
    trials.propose(store, study, [proposal(32)], lease=lease)
    with pytest.raises(StudyBusy, match="stop it first"):
        studies.delete(store, study)
    leases.release(store, lease)
    studies.delete(store, study)
    with pytest.raises(UnknownName):
        studies.get(store, study)
    with pytest.raises(StudyBusy, match="was deleted"):
        leases.renew(store, lease)
    last = new_study(store, "next")
    assert last.id > study
    assert trials.all(store, last.id) == [] == events.since(store, study)
