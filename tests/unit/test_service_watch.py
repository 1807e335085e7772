"""What a coordinator does once for all its agents: calls them to work, prolongs leases, takes back lost ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from store_support import StillClock, add_device, device, key, open_store, put, round_of, take

from nas.core.errors import InfrastructureFailed
from nas.service.doorbell import Doorbell
from nas.service.watch import Watch
from nas.store import agents, devices, jobs, presence, queue
from nas.store.presence import Renewal
from nas.store.rows import DeviceState, Health, JobKind, JobState
from nas.store.store import Store
from nas.store.timeouts import LIMITS, phase_limit_s


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.fixture
def store(tmp_path: Path, clock: StillClock) -> Store:
    return open_store(tmp_path, clock)


def add_remote(store: Store, name: str = "phone", agent: str = "host") -> None:
    agents.enrol(store, agents.issue_token(store), agent)
    devices.register(store, agent, [device(name)], boot_id="boot")


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(0.01)


@pytest.mark.parametrize("queued_here", [True, False], ids=["here", "by another process"])
def test_who_waits_is_called_when_there_is_work(store: Store, tmp_path: Path, queued_here: bool) -> None:
    for name in ("box", "phone"):
        add_device(store, name, agent=f"of-{name}")

    async def wait() -> list[bool]:
        bell = Doorbell()
        with Watch(store, bell, local_only=True), bell.waiting("box", "a") as box, bell.waiting("phone", "b") as phone:
            jobs.enqueue(store if queued_here else open_store(tmp_path), key(1), round_of(), device="box")
            if queued_here:
                bell.ring()
            await asyncio.wait_for(box.called.wait(), 60)
            return [box.called.is_set(), phone.called.is_set()]

    assert asyncio.run(wait()) == [True, False]


def test_work_is_what_a_claim_would_find(store: Store, clock: StillClock) -> None:
    for name in ("box", "bad", "off", "later", "checked"):
        add_device(store, name, agent=f"of-{name}")
        kind = JobKind.CHECK if name == "checked" else JobKind.MEASURE
        not_before = clock.time + 60 if name == "later" else 0.0
        jobs.enqueue(store, key(name), round_of(), device=name, kind=kind, not_before=not_before)
    for name in ("bad", "checked"):
        devices.set_health(store, name, Health.BAD, "it failed")
    devices.set_state(store, "off", DeviceState.DRAINING)
    names = ("box", "bad", "off", "later", "checked")
    assert queue.with_work(store, names) == {"box", "checked"}
    clock.time += 60
    found = {name for name in names if queue.with_work(store, [name])}
    assert found == {"box", "later", "checked"}
    assert found == {row.id for row in devices.all(store) if jobs.claim(store, row.id, row.agent)}
    assert queue.with_work(store, names) == set()


def test_nobody_waits_any_more_once_the_bell_is_closed() -> None:
    async def wait() -> bool:
        bell = Doorbell()
        with bell.waiting("box", "a") as before:
            bell.close()
            await asyncio.wait_for(before.called.wait(), 60)
        with bell.waiting("box", "a") as after:
            return after.called.is_set()

    assert asyncio.run(wait())


def test_leases_that_ran_out_are_taken_back(store: Store, clock: StillClock) -> None:
    add_device(store)
    add_remote(store)
    put(store, "a", device="box")
    put(store, "b", device="phone")
    held = {"box": take(store, "box"), "phone": take(store, "phone", "host")}
    clock.time += jobs.LEASE_S + 1

    def states() -> dict[str, JobState]:
        rows = {name: jobs.get(store, job.id) for name, job in held.items()}
        return {name: row.state for name, row in rows.items() if row}

    with Watch(store, Doorbell(), local_only=True):
        until(lambda: states()["box"] is JobState.QUEUED)
    assert states()["phone"] is JobState.LEASED  # its coordinator may be another process
    with Watch(store, Doorbell(), local_only=False):
        until(lambda: states()["phone"] is JobState.QUEUED)


def test_renewals_are_written_before_leases_are_taken_back(store: Store, clock: StillClock) -> None:
    add_device(store)
    put(store, "a")
    job = take(store)
    clock.time += jobs.LEASE_S - 1
    watch = Watch(store, Doorbell(), local_only=True)
    watch.renew(Renewal(job.id, "box", "local", job.epoch or 0))
    clock.time += 2
    with watch:
        until(lambda: devices.get(store, "box").last_seen == clock.time)
    now = jobs.get(store, job.id)
    assert now is not None
    assert (now.state, now.lease_until) == (JobState.LEASED, clock.time + jobs.LEASE_S)
    assert devices.get(store, "box").lease_until == clock.time + jobs.LEASE_S


def test_a_renewal_that_comes_too_late_changes_nothing(store: Store, clock: StillClock) -> None:
    add_device(store)
    put(store, "a")
    old = take(store)
    new = take(store)
    clock.time += 5
    presence.note(store, {}, [Renewal(old.id, "box", "local", old.epoch or 0)])
    assert jobs.get(store, new.id) == new
    jobs.cancel(store, [new.id])
    presence.note(store, {}, [Renewal(new.id, "box", "local", new.epoch or 0)])
    row = jobs.get(store, new.id)
    assert row is not None
    assert row.state is JobState.CANCELLED


def test_who_holds_a_lease(store: Store, clock: StillClock) -> None:
    add_device(store)
    put(store, "a")
    job = take(store)
    epoch = job.epoch or 0
    assert presence.held_until(store, job.id, "box", "local", epoch, "running") is None, "it says so for the first time"
    assert jobs.renew(store, job.id, "box", "local", epoch, phase="running")
    until_s = clock.time + jobs.LEASE_S
    assert presence.held_until(store, job.id, "box", "local", epoch, "running") == until_s
    for of in ((job.id, "box", "other", epoch), (job.id, "box", "local", epoch - 1), ("none.0", "box", "local", epoch)):
        assert presence.held_until(store, *of, "running") is None
    clock.time += phase_limit_s("running", job.payload)
    assert presence.held_until(store, job.id, "box", "local", epoch, "running") is None, "it runs for too long"
    assert [held.id for held in jobs.held(store, "local")] == [job.id]
    assert jobs.held(store, "other") == []


def test_a_device_that_was_away_for_long_is_to_be_checked(store: Store, clock: StillClock) -> None:
    add_device(store)
    devices.set_health(store, "box", Health.GOOD)
    clock.time += LIMITS[DeviceState.OFFLINE].seconds + 1
    presence.note(store, {"box": "local"}, [])
    assert devices.get(store, "box").health is Health.UNKNOWN


def test_a_device_that_was_heard_from_is_seen(store: Store, clock: StillClock) -> None:
    add_device(store)
    clock.time += 100
    presence.note(store, {"box": "local"}, [])
    assert devices.get(store, "box").last_seen == agents.all(store)[0].last_seen == clock.time


def test_an_older_word_of_a_device_does_not_bring_it_back(store: Store) -> None:
    """Its agent asked for work, then said that the device is unplugged; the first word is written down last."""
    add_device(store)
    devices.register(store, "local", [], boot_id="boot")
    presence.note(store, {"box": "local"}, [])
    assert devices.get(store, "box").state is DeviceState.OFFLINE
    assert jobs.claim(store, "box", "local") is None
    assert devices.get(store, "box").state is DeviceState.IDLE


def test_an_offline_device_is_brought_back_by_what_its_agent_does(store: Store, clock: StillClock) -> None:
    add_device(store)
    put(store, "a")
    job = take(store)
    devices.register(store, "local", [], boot_id="boot")
    clock.time += 10
    presence.note(store, {"box": "local"}, [])
    assert agents.all(store)[0].last_seen == clock.time
    row = devices.get(store, "box")
    assert (row.state, row.last_seen) == (DeviceState.OFFLINE, clock.time)
    assert presence.held_until(store, job.id, "box", "local", job.epoch or 0, "preparing") is None
    assert jobs.renew(store, job.id, "box", "local", job.epoch or 0)
    assert devices.get(store, "box").state is DeviceState.LEASED


def test_what_could_not_be_written_is_written_later(
    store: Store, clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_device(store)
    clock.time += 7
    tries: list[int] = []
    real = presence.note

    def note(*arguments: object) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise InfrastructureFailed("the disk is full")
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(presence, "note", note)
    with Watch(store, Doorbell(), local_only=True) as watch:
        watch.heard("local", "box")
        until(lambda: devices.get(store, "box").last_seen == clock.time)
    assert len(tries) >= 2
