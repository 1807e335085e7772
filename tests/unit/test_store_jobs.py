"""Jobs: queueing, claims under epochs, results early and late."""

from __future__ import annotations

import pytest
from store_support import (
    BROKEN,
    RESULT,
    StillClock,
    add_device,
    device,
    key,
    new_study,
    proposal,
    put,
    round_of,
    state,
    take,
)

from nas.core.errors import InvalidInput, UnknownName
from nas.core.plan import RoundResult
from nas.core.wire import Failure
from nas.infra.store import agents, devices, jobs, outcomes, studies, trials
from nas.infra.store.outcomes import OFFLINE_S
from nas.infra.store.rows import DeviceEventKind, DeviceState, Health, JobKind, JobState
from nas.infra.store.store import Store

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.sql
def test_a_round_is_queued_once(store: Store) -> None:
    first = put(store, number=0)
    assert put(store, number=0, priority=9) == first
    assert [job.round for job in jobs.of_key(store, key("a"))] == [0]
    second = put(store, number=1)
    assert jobs.of_key(store, key("a")) == [first, second]
    assert first.payload == round_of()
    with pytest.raises(UnknownName, match="device 'bx'; did you mean 'box'"):
        put(store, "b", device="bx")


@pytest.mark.sql
def test_claims_go_by_priority_then_age_and_not_before_their_time(store: Store, clock: StillClock) -> None:
    for name, options in (("late", {"not_before": 5000.0}), ("old", {}), ("new", {}), ("urgent", {"priority": 5})):
        put(store, name, **options)
        clock.time += 1
    order = []
    while (job := jobs.claim(store, "box", "local")) is not None:
        order.append(job.result_key)
        outcomes.submit(store, job.id, "box", "local", job.epoch or 0, RESULT)
    assert order == [key("urgent"), key("old"), key("new")]
    clock.time = 5000
    assert take(store).result_key == key("late")


@pytest.mark.sql
def test_a_pause_does_not_grow_when_the_clock_is_set_back(store: Store, clock: StillClock) -> None:
    put(store)
    leased = take(store)
    failure = Failure(kind="infrastructure", message="cable", phase="running")
    outcomes.fail(store, leased.id, "box", "local", leased.epoch or 0, failure)
    devices.set_health(store, "box", Health.GOOD)
    assert jobs.claim(store, "box", "local") is None and not jobs.with_work(store, ["box"])
    clock.time -= 3600
    assert jobs.with_work(store, ["box"]) == {"box"}
    assert take(store).id == leased.id


@pytest.mark.sql
def test_every_claim_has_a_higher_epoch_and_results_free_the_device(store: Store) -> None:
    put(store, "a"), put(store, "b")
    for epoch in (1, 2):
        job = take(store)
        held = devices.get(store, "box")
        assert (job.state, job.epoch, job.attempts, held.epoch) == (JobState.LEASED, epoch, 1, epoch)
        assert (held.state, held.lease_holder) == (DeviceState.LEASED, "local")
        assert outcomes.submit(store, job.id, "box", "local", epoch, RESULT).accepted
        assert state(store, job) is JobState.DONE
        assert devices.get(store, "box").state is DeviceState.IDLE
    done = jobs.get(store, job.id)
    assert done is not None and done.result == RESULT
    assert jobs.claim(store, "box", "local") is None
    assert jobs.live(store) == []


def test_a_result_that_comes_twice_is_accepted_twice_and_kept_once(store: Store) -> None:
    put(store, "a"), put(store, "b")
    job = take(store)
    assert outcomes.submit(store, job.id, "box", "local", 1, RESULT).accepted
    take(store)
    assert outcomes.submit(store, job.id, "box", "local", 1, RoundResult(pairs=[], wall_s=9)).accepted
    done = jobs.get(store, job.id)
    assert done is not None and done.result == RESULT


def test_a_failure_reported_after_the_result_changes_nothing(store: Store) -> None:
    put(store)
    job = take(store)
    outcomes.submit(store, job.id, "box", "local", 1, RESULT)
    verdict = outcomes.fail(store, job.id, "box", "local", 1, BROKEN)
    assert not verdict.accepted and "done already" in (verdict.reason or "")
    assert state(store, job) is JobState.DONE
    assert outcomes.attempts_of_key(store, key("a")) == []


def test_an_agent_that_asks_again_gets_its_job_again_and_the_old_epoch_is_over(store: Store) -> None:
    put(store)
    first, again = take(store), take(store)
    assert (first.id, first.epoch, again.epoch) == (again.id, 1, 2)
    assert not jobs.renew(store, first.id, "box", "local", 1)
    late = outcomes.submit(store, first.id, "box", "local", 1, RESULT)
    assert not late.accepted and "epoch 1" in (late.reason or "")
    assert not outcomes.fail(store, first.id, "box", "local", 1, BROKEN).accepted
    assert jobs.renew(store, again.id, "box", "local", 2)
    assert outcomes.submit(store, again.id, "box", "local", 2, RESULT).accepted


def test_a_result_under_the_current_epoch_counts_however_late(store: Store, clock: StillClock) -> None:
    put(store)
    job = take(store)
    clock.time += jobs.LEASE_S
    assert outcomes.expire(store) == [job.id]
    assert state(store, job) is JobState.QUEUED
    clock.time += 1e6
    assert outcomes.submit(store, job.id, "box", "local", 1, RESULT).accepted
    done = jobs.get(store, job.id)
    assert done is not None and (done.state, done.message) == (JobState.DONE, None)


def test_a_result_is_too_late_once_the_device_was_leased_for_another_job(store: Store, clock: StillClock) -> None:
    late = put(store, "late")
    take(store)
    clock.time += jobs.LEASE_S
    outcomes.expire(store)
    put(store, "next", priority=1)
    assert take(store).result_key == key("next")
    verdict = outcomes.submit(store, late.id, "box", "local", 1, RESULT)
    assert not verdict.accepted and "it is at 2" in (verdict.reason or "")
    assert not jobs.renew(store, late.id, "box", "local", 1)
    assert state(store, late) is JobState.QUEUED


def test_leases_last_while_they_are_renewed_and_can_be_renewed_after_their_end(store: Store, clock: StillClock) -> None:
    put(store)
    job = take(store)
    for _ in range(3):
        clock.time += jobs.LEASE_S - 1
        assert outcomes.expire(store) == []
        assert jobs.renew(store, job.id, "box", "local", 1)
    clock.time += jobs.LEASE_S
    assert outcomes.expire(store) == [job.id]
    assert jobs.renew(store, job.id, "box", "local", 1)
    assert (state(store, job), devices.get(store, "box").state) == (JobState.LEASED, DeviceState.LEASED)


def test_a_heartbeat_of_an_older_lease_changes_nothing(store: Store, clock: StillClock) -> None:
    put(store)
    old = take(store)
    new = take(store)
    clock.time += 5
    assert not jobs.renew(store, old.id, "box", "local", old.epoch or 0)
    assert jobs.get(store, new.id) == new
    jobs.cancel(store, [new.id])
    assert not jobs.renew(store, new.id, "box", "local", new.epoch or 0)
    assert state(store, new) is JobState.CANCELLED
    assert not jobs.renew(store, "none.0", "box", "local", new.epoch or 0)


@pytest.mark.sql
def test_an_agent_holds_the_jobs_whose_results_are_expected_from_it(store: Store, clock: StillClock) -> None:
    put(store)
    job = take(store)
    clock.time += 2 * jobs.LEASE_S
    assert [held.id for held in jobs.held(store, "local")] == [job.id]
    assert jobs.held(store, "other") == []
    assert outcomes.submit(store, job.id, "box", "local", job.epoch or 0, RESULT).accepted
    assert jobs.held(store, "local") == []


def test_a_heartbeat_brings_a_device_back(store: Store, clock: StillClock) -> None:
    put(store)
    job = take(store)
    devices.register(store, "local", [], boot_id="boot")
    assert devices.get(store, "box").state is DeviceState.OFFLINE
    clock.time += 10
    assert jobs.renew(store, job.id, "box", "local", job.epoch or 0)
    row = devices.get(store, "box")
    assert (row.state, row.last_seen) == (DeviceState.LEASED, clock.time)
    assert agents.all(store)[0].last_seen == clock.time


def test_a_device_that_asks_for_work_after_a_day_is_to_be_checked(store: Store, clock: StillClock) -> None:
    devices.set_health(store, "box", Health.GOOD)
    clock.time += devices.LIMITS[DeviceState.OFFLINE] + 1
    assert jobs.claim(store, "box", "local") is None
    row = devices.get(store, "box")
    assert (row.health, row.state, row.last_seen) == (Health.UNKNOWN, DeviceState.IDLE, clock.time)


@pytest.mark.sql
def test_a_coordinator_that_was_down_gives_leases_their_time_again(store: Store, clock: StillClock) -> None:
    put(store)
    take(store)
    clock.time += 1000
    jobs.extend_leases(store)
    assert outcomes.expire(store) == []
    clock.time += jobs.LEASE_S
    assert len(outcomes.expire(store)) == 1


@pytest.mark.sql
def test_a_cancelled_job_stops_and_its_result_is_refused_until_it_is_wanted_again(store: Store) -> None:
    queued, leased = put(store, "queued", priority=-1), put(store, "leased")
    take(store)
    jobs.cancel(store, [queued.id, leased.id])
    assert not jobs.renew(store, leased.id, "box", "local", 1)
    verdict = outcomes.submit(store, leased.id, "box", "local", 1, RESULT)
    assert not verdict.accepted and "cancelled" in (verdict.reason or "")
    assert jobs.claim(store, "box", "local") is None
    assert devices.get(store, "box").state is DeviceState.IDLE
    assert put(store, "leased").state is JobState.QUEUED
    assert take(store).epoch == 2


@pytest.mark.sql
def test_a_cancelled_job_is_queued_again_as_it_is_wanted_now(store: Store, clock: StillClock) -> None:
    first, second = new_study(store, "first").id, new_study(store, "second").id
    trials.propose(store, second, [proposal(32)])
    job = put(store, trial=(first, None), priority=1)
    jobs.cancel(store, [job.id])
    clock.time += 1
    row = jobs.enqueue(store, key("a"), round_of("other"), device="box", trial=(second, 0), priority=7)
    assert (row.id, row.state, row.study, row.trial) == (job.id, JobState.QUEUED, second, 0)
    assert (row.priority, row.payload, row.updated) == (7, round_of("other"), clock.time)
    again = jobs.enqueue(store, key("a"), round_of("third"), device="box", trial=(first, None), priority=9)
    assert again == row, "one that is queued is shared as it is"


@pytest.mark.sql
def test_a_database_that_was_restored_goes_on_above_the_epochs_of_its_devices(store: Store, clock: StillClock) -> None:
    put(store)
    devices.set_health(store, "box", Health.GOOD)
    job = take(store)
    stale = Failure(kind="infrastructure", message="epoch 1 is over", phase="preparing", last_epoch=300)
    for _ in range(2):  # the answer was lost
        outcomes.fail(store, job.id, "box", "local", 1, stale)
    row = devices.get(store, "box")
    assert (row.epoch, row.health, row.state) == (300, Health.GOOD, DeviceState.IDLE)
    assert outcomes.attempts_of_key(store, job.result_key) == []
    assert devices.history(store, "box", kind=DeviceEventKind.FAILURE) == []
    again = take(store)
    assert (again.id, again.epoch, again.attempts) == (job.id, 301, 1)


@pytest.mark.sql
def test_an_epoch_that_a_device_reports_never_lowers_its_own(store: Store) -> None:
    put(store)
    job = take(store)
    older = Failure(kind="infrastructure", message="odd", phase="preparing", last_epoch=0)
    assert outcomes.fail(store, job.id, "box", "local", 1, older).accepted
    assert devices.get(store, "box").epoch == 1
    assert len(outcomes.attempts_of_key(store, job.result_key)) == 1


@pytest.mark.sql
def test_a_studys_jobs_are_cancelled_and_deleted_with_it(store: Store) -> None:
    study = new_study(store).id
    trials.propose(store, study, [proposal(32), proposal(64)])
    mine = [put(store, f"t{n}", trial=(study, n)) for n in range(2)]
    other = put(store, "other")
    assert jobs.live(store) == [*mine, other]
    jobs.cancel_study(store, study)
    assert [state(store, job) for job in mine] == [JobState.CANCELLED, JobState.CANCELLED]
    assert jobs.live(store) == [other]
    studies.delete(store, study)
    assert [jobs.get(store, job.id) for job in mine] == [None, None]
    refused = outcomes.submit(store, mine[0].id, "box", "local", 0, RESULT)
    assert not refused.accepted and "no such job" in (refused.reason or "")


def test_an_agent_acts_for_its_own_devices_only(store: Store) -> None:
    add_device(store, "phone", agent="other")
    job = put(store)
    take(store)
    for act in (
        lambda: jobs.claim(store, "box", "other"),
        lambda: jobs.renew(store, job.id, "box", "other", 1),
        lambda: outcomes.submit(store, job.id, "box", "other", 1, RESULT),
        lambda: outcomes.fail(store, job.id, "box", "other", 1, BROKEN),
    ):
        with pytest.raises(InvalidInput, match="served by agent 'local', not by 'other'"):
            act()
    assert not outcomes.submit(store, job.id, "phone", "other", 1, RESULT).accepted
    assert state(store, job) is JobState.LEASED


@pytest.mark.parametrize(
    ("health", "kinds"),
    [
        (Health.UNKNOWN, {"measure", "check"}),
        (Health.GOOD, {"measure", "check"}),
        (Health.BAD, {"check"}),
        (Health.MAINTENANCE, set()),
        (Health.RETIRED, set()),
    ],
)
def test_health_decides_what_a_device_may_do(store: Store, health: Health, kinds: set[str]) -> None:
    put(store, "measure"), put(store, "check", kind=JobKind.CHECK)
    devices.set_health(store, "box", health)
    got = set()
    while (job := jobs.claim(store, "box", "local")) is not None:
        got.add(job.kind.value)
        outcomes.submit(store, job.id, "box", "local", job.epoch or 0, RESULT)
    assert got == kinds


def test_a_draining_device_finishes_its_job(store: Store) -> None:
    put(store, "a"), put(store, "b")
    job = take(store)
    devices.set_state(store, "box", DeviceState.DRAINING)
    assert jobs.renew(store, job.id, "box", "local", 1)
    assert outcomes.submit(store, job.id, "box", "local", 1, RESULT).accepted
    assert devices.get(store, "box").state is DeviceState.DRAINING
    assert jobs.claim(store, "box", "local") is None


@pytest.mark.sql
def test_a_silent_device_is_offline_until_it_is_heard_from(store: Store, clock: StillClock) -> None:
    clock.time += OFFLINE_S
    outcomes.expire(store)
    assert devices.get(store, "box").state is DeviceState.OFFLINE
    put(store)
    take(store)
    assert devices.get(store, "box").last_seen == clock.time


def test_a_restart_of_the_host_ends_its_leases(store: Store) -> None:
    put(store)
    job = take(store)
    devices.register(store, "local", [device()], boot_id="boot")
    assert outcomes.expire(store) == []
    devices.register(store, "local", [device()], boot_id="another boot")
    assert outcomes.expire(store) == [job.id]


def test_the_files_of_a_round(store: Store) -> None:
    both = round_of("m").model_copy(update={"reference": round_of("r").candidate})
    assert round_of("m").files == {key("m"), key("runner")}
    assert both.files == {key("m"), key("r"), key("runner")}
