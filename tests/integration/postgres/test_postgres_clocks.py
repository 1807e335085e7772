"""Hosts that share a database on a server, and whose clocks differ by more than a lease lasts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from store_support import RESULT, add_device, device, key, new_study, put, round_of

from nas.core.clock import SystemClock
from nas.core.errors import NasError, StudyBusy
from nas.infra.store import agents, devices, jobs, leases, outcomes
from nas.infra.store.engine import ServerClock
from nas.infra.store.rows import DeviceEventKind, Health, JobState
from nas.infra.store.store import Store
from nas.measure.farm.queue import JobNotifier, LeaseMonitor
from tests.support.postgres import Server

SKEW_S = jobs.LEASE_S + 5


class WrongClock(SystemClock):
    """A machine's clock that is wrong by `ahead_s` seconds."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def now(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture
def url(postgres: Server) -> str:
    return postgres.create_empty("clocks")


@pytest.fixture
def hosts(url: str, tmp_path: Path) -> Iterator[list[Store]]:
    """Hosts whose clocks are right, ahead and behind."""
    with ExitStack() as stack:
        clocks = [None, ServerClock(WrongClock(SKEW_S)), ServerClock(WrongClock(-SKEW_S))]
        stores = [Store.open(url, clock=clock, artifacts=tmp_path) for clock in clocks]
        for store in stores:
            stack.callback(store.close)
        yield stores


def test_every_host_has_the_servers_time(hosts: list[Store]) -> None:
    times = [store.now() for store in hosts]
    assert max(times) - min(times) < 1.0


def test_a_clock_that_is_set_while_a_host_works_is_noticed(url: str, tmp_path: Path) -> None:
    clock = WrongClock(0.0)
    store = Store.open(url, clock=ServerClock(clock), artifacts=tmp_path)
    clock.ahead_s = 3600.0
    with store.read():
        pass
    assert abs(store.now() - time.time()) < 1.0
    store.close()


def test_a_live_study_is_not_taken_by_a_host_whose_clock_is_ahead(hosts: list[Store]) -> None:
    right, ahead, _ = hosts
    study = new_study(right).id
    lease = leases.acquire(right, study, "right:1:abcd")
    with pytest.raises(StudyBusy):
        leases.acquire(ahead, study, "ahead:1:abcd")
    leases.renew(right, lease)


def test_a_live_lease_is_not_taken_back_by_a_host_whose_clock_is_ahead(hosts: list[Store]) -> None:
    right, ahead, _ = hosts
    add_device(right)
    devices.set_health(right, "box", Health.GOOD)
    put(right)
    job = jobs.claim(right, "box", "local")
    assert job is not None
    assert outcomes.expire(ahead) == []
    assert jobs.renew(right, job.id, "box", "local", 1)
    assert devices.get(ahead, "box").health is Health.GOOD


def test_two_coordinators_with_agents_of_their_own_and_wrong_clocks(hosts: list[Store]) -> None:
    """Nothing is lost, done twice, or counted as a failure, while each host takes back what expired."""
    _, ahead, behind = hosts
    agents_of = {store: [f"agent-{side}-{n}" for n in range(4)] for side, store in enumerate((ahead, behind))}
    for store, names in agents_of.items():
        for name in names:
            agents.register_local(store, name)
            devices.register(store, name, [device(f"of-{name}", transport="local")], boot_id="boot")
            devices.set_health(store, f"of-{name}", Health.GOOD)
    boxes = [f"of-{name}" for names in agents_of.values() for name in names]
    for number in range(160):
        other = (ahead, behind)[number % 2]
        jobs.enqueue(other, key(number), round_of(), device=boxes[number % len(boxes)], priority=number % 3)
    done: list[str] = []
    problems: list[object] = []
    end = time.monotonic() + 40

    def work(store: Store, name: str) -> None:
        try:
            while time.monotonic() < end:
                job = jobs.claim(store, f"of-{name}", name)
                if job is None:
                    return
                who = (job.id, f"of-{name}", name, job.epoch or 0)
                assert jobs.renew(store, *who), "the lease was taken back"
                assert outcomes.submit(store, *who, RESULT).accepted
                done.append(job.id)
            problems.append("too slow")
        except (NasError, AssertionError) as error:
            problems.append(error)

    with LeaseMonitor(ahead, JobNotifier(), agent=None), LeaseMonitor(behind, JobNotifier(), agent=None):
        threads = [
            threading.Thread(target=work, args=(store, name)) for store in agents_of for name in agents_of[store]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert problems == []
    assert len(done) == len(set(done)) == 160
    for number in range(160):
        (job,) = jobs.of_key(ahead, key(number))
        assert (job.state, job.attempts) == (JobState.DONE, 1)
        assert outcomes.attempts_of_key(ahead, job.result_key) == []
    for box in boxes:
        assert devices.get(behind, box).health is Health.GOOD
        assert devices.history(behind, box, kind=DeviceEventKind.FAILURE) == []
