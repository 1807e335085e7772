"""Health checks in the store: when they are due, what follows from them, and what is remembered."""

from __future__ import annotations

import pytest
from store_support import (
    RESULT,
    StillClock,
    add_device,
    break_down,
    device,
    key,
    new_study,
    proposal,
    put,
    round_of,
    take,
)

from nas.core.errors import UnknownName
from nas.infra.store import agents, devices, jobs, outcomes, studies, trials
from nas.infra.store.rows import CheckOutcome, DeviceEventKind, DeviceState, Health, JobKind
from nas.infra.store.store import Store

PASSED, FAILED, UNSURE = CheckOutcome.PASSED, CheckOutcome.FAILED, CheckOutcome.UNSURE


pytestmark = pytest.mark.usefixtures("registered")


def due(store: Store) -> list[str]:
    return [row.id for row in outcomes.due_checks(store)]


def end(store: Store, outcome: CheckOutcome, reason: str | None = None, at: float | None = None) -> bool:
    number = devices.get(store, "box").check_number
    return outcomes.conclude_check(store, "box", number, outcome, reason, store.now() if at is None else at)


def test_a_new_device_is_due_until_it_passes(store: Store) -> None:
    assert due(store) == ["box"]
    assert end(store, PASSED)
    row = devices.get(store, "box")
    assert (row.health, row.checked_at, row.check_due, row.check_number) == (Health.GOOD, store.now(), None, 1)
    assert due(store) == []


def test_a_check_is_ended_once(store: Store) -> None:
    assert outcomes.conclude_check(store, "box", 0, PASSED, None, store.now())
    assert not outcomes.conclude_check(store, "box", 0, FAILED, "late", store.now())
    assert devices.get(store, "box").health is Health.GOOD


def test_a_failed_job_makes_a_check_due_at_once(store: Store, clock: StillClock) -> None:
    end(store, PASSED)
    put(store)
    break_down(store, clock)
    assert (devices.get(store, "box").health, due(store)) == (Health.UNKNOWN, ["box"])


def test_what_does_not_pass_is_checked_ever_more_rarely(store: Store, clock: StillClock) -> None:
    pauses = []
    for _ in range(7):
        assert end(store, FAILED, "no report")
        row = devices.get(store, "box")
        assert (row.health, row.health_reason) == (Health.BAD, "no report")
        assert row.check_due is not None
        pauses.append(row.check_due - clock.time)
        clock.time = row.check_due - 1
        assert due(store) == []
        clock.time += 1
        assert due(store) == ["box"]
    assert pauses == sorted(pauses)
    assert pauses[0] == 60 and pauses[-1] == 3600
    end(store, PASSED)
    end(store, FAILED)
    assert devices.get(store, "box").check_due == clock.time + pauses[0]


@pytest.mark.parametrize("health", [Health.UNKNOWN, Health.BAD])
def test_an_unsure_check_changes_no_health_and_says_why(store: Store, health: Health) -> None:
    devices.set_health(store, "box", health, "before")
    end(store, UNSURE, "it throttled")
    row = devices.get(store, "box")
    assert (row.health, row.health_reason) == (health, "it throttled")
    assert row.check_due is not None and row.check_due > store.now()


def test_a_person_may_ask_for_a_check_of_a_good_device(store: Store) -> None:
    end(store, PASSED)
    assert outcomes.request_check(store, "box").check_due == store.now()
    assert due(store) == ["box"]
    end(store, UNSURE, "it throttled")
    row = devices.get(store, "box")
    assert (row.health, row.health_reason, row.check_due) == (Health.GOOD, None, None)
    outcomes.request_check(store, "box")
    end(store, FAILED, "no report")
    assert devices.get(store, "box").health is Health.BAD
    with pytest.raises(UnknownName, match="did you mean 'box'"):
        outcomes.request_check(store, "bix")


@pytest.mark.parametrize("health", [Health.MAINTENANCE, Health.RETIRED])
def test_what_a_person_decided_is_neither_checked_nor_changed_by_a_check(store: Store, health: Health) -> None:
    devices.set_health(store, "box", health, "on my desk")
    outcomes.request_check(store, "box")
    assert due(store) == []
    assert end(store, PASSED)
    row = devices.get(store, "box")
    assert (row.health, row.health_reason) == (health, "on my desk")
    devices.register(store, "local", [device(memory_mb=4096)], boot_id="boot")
    assert devices.get(store, "box").health is health
    devices.set_health(store, "box", Health.UNKNOWN)
    assert due(store) == ["box"]


def test_only_what_can_be_reached_is_due(store: Store, clock: StillClock) -> None:
    devices.set_state(store, "box", DeviceState.DRAINING)
    assert due(store) == []
    devices.set_state(store, "box", DeviceState.IDLE)
    clock.time += outcomes.OFFLINE_S
    outcomes.expire(store)
    assert due(store) == []
    jobs.claim(store, "box", "local")
    assert due(store) == ["box"]


def test_what_is_being_checked_is_not_due_besides_and_who_asks_may_choose(store: Store, clock: StillClock) -> None:
    for name in ("one", "two"):
        clock.time += 1
        add_device(store, name, f"agent-{name}")
    assert due(store) == ["box", "one", "two"]
    jobs.enqueue(store, key("measurement"), round_of(), device="one")
    jobs.enqueue(store, key("calibration"), round_of(), device="box", kind=JobKind.CHECK)
    assert due(store) == ["one", "two"]
    assert [row.id for row in outcomes.due_checks(store, most=1)] == ["one"]
    assert [row.id for row in outcomes.due_checks(store, among=["two", "box"])] == ["two"]
    jobs.cancel(store, [jobs.job_id(key("calibration"), 0)])
    assert due(store) == ["box", "one", "two"]


def test_a_failure_after_the_checks_runs_is_not_forgiven_by_it(store: Store, clock: StillClock) -> None:
    ran_at = clock.time
    put(store)
    break_down(store, clock)
    assert end(store, PASSED, at=ran_at)
    assert (devices.get(store, "box").health, due(store)) == (Health.UNKNOWN, ["box"])
    clock.time += 1
    assert end(store, PASSED)
    assert devices.get(store, "box").health is Health.GOOD


def test_the_history_tells_what_led_there(store: Store, clock: StillClock) -> None:
    end(store, PASSED)
    for n in range(outcomes.BAD_AFTER_JOBS):
        put(store, f"j{n}", priority=n)
        break_down(store, clock)
    clock.time += outcomes.OFFLINE_S
    outcomes.expire(store)
    steps = [(event.kind.value, event.what) for event in reversed(devices.history(store, "box"))]
    failures = [("failure", "running")] * 3
    assert [step for step in steps if step[0] == "failure"] == failures
    assert [step for step in steps if step[0] != "failure"] == [
        ("registered", "local"), ("check", "passed"), ("health", "good"), ("health", "unknown"), ("health", "bad"),
        ("state", "offline"),
    ]  # fmt: skip
    [bad, *_] = devices.history(store, "box", kind=DeviceEventKind.HEALTH)
    assert bad.reason == "3 jobs failed since its last passed check; last: cable fell out"
    assert {event.job for event in devices.history(store, "box", kind=DeviceEventKind.FAILURE)} == {
        f"{key(f'j{n}')}.0" for n in range(3)
    }


def test_the_history_outlasts_the_study_and_is_bounded(store: Store, clock: StillClock) -> None:
    study = new_study(store).id
    trials.propose(store, study, [proposal(32)])
    put(store, trial=(study, 0))
    break_down(store, clock)
    studies.delete(store, study)
    assert [event.what for event in devices.history(store, "box", kind=DeviceEventKind.FAILURE)] == ["running"]
    for _ in range(devices.LOG_KEPT + 5):
        end(store, UNSURE, "x" * 5000)
    checks = devices.history(store, "box", kind=DeviceEventKind.CHECK, limit=1000)
    assert len(checks) == devices.LOG_KEPT
    assert len(checks[0].reason or "") < 2000
    assert len(devices.history(store, "box", limit=7)) == 7
    assert devices.history(store, "box", kind=DeviceEventKind.FAILURE, limit=1)
    with pytest.raises(UnknownName):
        devices.history(store, "bix")


def test_registering_the_same_again_and_again_leaves_no_trace(store: Store) -> None:
    before = devices.history(store, "box")
    for _ in range(3):
        devices.register(store, "local", [device()], boot_id="boot")
    assert devices.history(store, "box") == before
    devices.register(store, "local", [device()], boot_id="another")
    assert devices.history(store, "box")[0].reason == "the agent's host has restarted"
    agents.register_local(store, "other")


def test_jobs_of_old_checks_are_forgotten(store: Store, clock: StillClock) -> None:
    jobs.enqueue(store, key("check"), round_of(), device="box", kind=JobKind.CHECK)
    old = take(store)
    assert outcomes.submit(store, old.id, "box", "local", old.epoch or 0, RESULT).accepted
    end(store, PASSED)
    assert jobs.get(store, old.id) is not None
    clock.time += 100_000
    jobs.enqueue(store, key("next"), round_of(), device="box", kind=JobKind.CHECK)
    end(store, PASSED)
    assert jobs.get(store, old.id) is None
    assert [job.result_key for job in jobs.live(store)] == [key("next")]
