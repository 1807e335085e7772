"""The host lock among real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from nas.core.clock import SystemClock
from nas.core.errors import InfrastructureFailed
from nas.measure.devices.host_lock import HostLock, host_lock_folder
from nas.measure.devices.transports.base import Cancelled
from tests.support.waiting import until

_SPAWN = multiprocessing.get_context("spawn")
Start = Callable[..., BaseProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes and ends them all."""
    running: list[BaseProcess] = []

    def run(target: Callable[..., None], *args: object) -> BaseProcess:
        process = _SPAWN.Process(target=target, args=args)
        process.start()
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.join()


def _note(log: Path, kind: str, event: str) -> None:
    """One O_APPEND write per event, so that the order of lines is the order of events."""
    line = json.dumps({"kind": kind, "event": event, "pid": os.getpid()}) + "\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def _compute(folder: Path, log: Path, stop: Path) -> None:
    with HostLock(folder).shared() as hold:
        while not stop.exists():
            _note(log, "compute", "in")
            time.sleep(0.002)
            _note(log, "compute", "out")
            hold.yield_if_wanted()


def _measure(folder: Path, log: Path, times: int) -> None:
    lock = HostLock(folder)
    for _ in range(times):
        with lock.exclusive(deadline_s=60):
            _note(log, "measure", "in")
            time.sleep(0.005)
            _note(log, "measure", "out")


def _hold_for_ever(folder: Path, exclusive: bool, ready: Path) -> None:
    lock = HostLock(folder)
    with lock.exclusive(60) if exclusive else lock.shared():
        ready.touch()
        time.sleep(3600)


def _events(log: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_measurement_is_alone_and_nobody_starves(tmp_path: Path, start: Start) -> None:
    folder, log, stop = tmp_path / "lock", tmp_path / "log", tmp_path / "stop"
    trainers = [start(_compute, folder, log, stop) for _ in range(3)]
    measurers = [start(_measure, folder, log, 15) for _ in range(2)]
    for process in measurers:
        process.join(60)
        assert process.exitcode == 0
    stop.touch()
    for process in trainers:
        process.join(60)
        assert process.exitcode == 0

    inside = {"compute": 0, "measure": 0}
    measurements = 0
    for event in _events(log):
        inside[event["kind"]] += 1 if event["event"] == "in" else -1
        assert inside["measure"] <= 1
        assert not (inside["measure"] and inside["compute"]), event
        measurements += event["kind"] == "measure" and event["event"] == "in"
    assert measurements == 30


def test_a_stream_of_measurements_lets_waiting_compute_step(tmp_path: Path, start: Start) -> None:
    """One process re-enters at once for ever; compute that waits still gets in."""
    folder, log, stop = tmp_path / "lock", tmp_path / "log", tmp_path / "stop"
    start(_measure, folder, log, 1_000_000)
    until(log.exists)
    trainers = [start(_compute, folder, log, stop) for _ in range(2)]
    deadline = time.monotonic() + 60
    pids = {str(process.pid) for process in trainers}
    while {str(event["pid"]) for event in _events(log) if event["kind"] == "compute"} != pids:
        assert time.monotonic() < deadline, "compute starved"
        time.sleep(0.05)


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_killed_holder_frees_the_lock(tmp_path: Path, start: Start, exclusive: bool) -> None:
    ready = tmp_path / "ready"
    holder = start(_hold_for_ever, tmp_path, exclusive, ready)
    until(ready.exists)
    lock = HostLock(tmp_path)
    with pytest.raises(InfrastructureFailed), lock.exclusive(deadline_s=0.05):
        pass
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    with lock.exclusive(deadline_s=30):
        pass
    with lock.shared(deadline_s=30):
        pass


def test_compute_gives_up_at_its_deadline(tmp_path: Path, start: Start) -> None:
    ready = tmp_path / "ready"
    start(_hold_for_ever, tmp_path, True, ready)
    until(ready.exists)
    with pytest.raises(InfrastructureFailed, match="kept this machine"), HostLock(tmp_path).shared(deadline_s=0.05):
        pass


def test_a_measurer_that_gave_up_is_not_in_the_way(tmp_path: Path) -> None:
    lock = HostLock(tmp_path)
    with lock.shared() as hold:
        with pytest.raises(InfrastructureFailed), lock.exclusive(deadline_s=0):
            pass
        assert hold.yield_if_wanted() == 0.0
        with lock.shared(deadline_s=0):
            pass


class ParkedClock(SystemClock):
    """Its first sleep lasts until `go`."""

    def __init__(self) -> None:
        self.asleep, self.go = threading.Event(), threading.Event()

    def sleep(self, seconds: float) -> None:
        self.asleep.set()
        self.go.wait(60)


def test_a_measurement_goes_behind_compute_that_already_waits(tmp_path: Path) -> None:
    """Compute sleeps between two attempts while the lock is free: a newcomer must not overtake it."""
    clock, entered = ParkedClock(), threading.Event()

    def compute() -> None:
        with HostLock(tmp_path, clock).shared():
            entered.set()

    lock, thread = HostLock(tmp_path), threading.Thread(target=compute)
    with lock.exclusive(deadline_s=0):
        thread.start()
        assert clock.asleep.wait(60)
    with pytest.raises(InfrastructureFailed), lock.exclusive(deadline_s=0):
        pass
    clock.go.set()
    assert entered.wait(60)
    thread.join(60)
    with lock.exclusive(deadline_s=0):
        pass


def test_a_measurement_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    lock = HostLock(tmp_path)
    with lock.shared(), pytest.raises(Cancelled), lock.exclusive(60, cancelled=lambda: True):
        pass


def test_yield_is_free_when_nobody_waits(tmp_path: Path) -> None:
    with HostLock(tmp_path).shared() as hold:
        assert [hold.yield_if_wanted() for _ in range(100)] == [0.0] * 100


def test_a_lock_in_use_does_not_look_old(tmp_path: Path) -> None:
    """systemd-tmpfiles removes what is ten days old from /tmp: the next process would lock another file."""
    lock = HostLock(tmp_path)
    with lock.shared():
        pass
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    with lock.exclusive(60):
        assert all(path.stat().st_mtime > 0 for path in tmp_path.iterdir())


def test_the_environment_says_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (tmp_path / "shared", tmp_path / "new" / "shared"):
        monkeypatch.setenv("NAS_LOCK", str(place))
        assert host_lock_folder() == place
        assert place.stat().st_mode & 0o777 == 0o700
