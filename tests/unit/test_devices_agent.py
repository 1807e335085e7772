"""The agent against a coordinator in memory, with scripts for runners."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from nas.core.errors import InfrastructureFailed
from nas.core.wire import Failure, ResultRequest
from nas.measure.devices.agent.agent import Agent
from nas.measure.devices.agent.client import Downloads, JobClient, NotAdmitted, NotReached
from nas.measure.devices.agent.connection import NOBODY_THERE_S, Backoff
from nas.measure.devices.agent.run_plan import KnownRunner
from nas.measure.devices.attachments import THIS_MACHINE
from nas.measure.devices.describe import boot_id
from nas.measure.devices.files import ContentFolder
from nas.measure.devices.host_lock import HostLock
from nas.measure.devices.transports.base import Lease
from nas.measure.devices.transports.local import LocalTransport
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.waiting import until

Start = Callable[..., Agent]


@pytest.fixture
def coordinator(tmp_path: Path) -> FakeCoordinator:
    files = tmp_path / "served"
    files.mkdir()
    return FakeCoordinator(files)


@pytest.fixture
def lock(tmp_path: Path) -> HostLock:
    return HostLock(tmp_path / "lock")


def make(
    coordinator: FakeCoordinator, folder: Path, lock: HostLock, is_known: KnownRunner = lambda runner: True
) -> Agent:
    """An agent of this machine."""
    client, cache = JobClient(coordinator.client()), folder / "cache"
    return Agent(
        "a",
        client,
        lambda: (THIS_MACHINE,),
        lambda attachment: LocalTransport(cache),
        Downloads(client, ContentFolder(cache)),
        is_known,
        lock=lock,
        outbox=folder / "outbox",
        boot_id=boot_id(LocalTransport(cache)),
    )


@pytest.fixture
def start(tmp_path: Path, coordinator: FakeCoordinator, lock: HostLock) -> Iterator[Start]:
    """Starts an agent in a thread; aborts and joins it at the end."""
    running: list[tuple[Agent, threading.Thread]] = []

    def begin(is_known: KnownRunner = lambda runner: True) -> Agent:
        agent = make(coordinator, tmp_path, lock, is_known)
        running.append((agent, threading.Thread(target=agent.run)))
        running[-1][1].start()
        return agent

    yield begin
    for agent, thread in running:
        agent.abort()
        thread.join(30)
        assert not thread.is_alive()


def failure(request: ResultRequest) -> Failure:
    assert request.failure is not None
    return request.failure


def test_registers_works_and_submits(coordinator: FakeCoordinator, start: Start) -> None:
    for name in ("1", "2"):
        coordinator.offer_script(f"echo {name}", name)
    start()
    coordinator.wait_for(results=2)
    assert [device.cores for device in coordinator.registered[0].devices] == [os.cpu_count()]
    outputs = {
        name: request.result and request.result.pairs[0].candidate.stdout
        for name, request in coordinator.results.items()
    }
    assert outputs == {"1": "1\n", "2": "2\n"}
    assert {request.epoch for request in coordinator.results.values()} == {7}


def test_what_the_runner_did_is_a_result(coordinator: FakeCoordinator, start: Start) -> None:
    coordinator.offer_script("kill -SEGV $$")
    start()
    coordinator.wait_for(results=1)
    result = coordinator.results["1"].result
    assert result is not None
    assert result.pairs[0].candidate.exit_code == -11


def test_an_unknown_runner_is_refused(coordinator: FakeCoordinator, start: Start) -> None:
    coordinator.offer_script("exit 0")
    start(is_known=lambda runner: False)
    coordinator.wait_for(results=1)
    assert failure(coordinator.results["1"]).kind == "refused"


def test_wrong_bytes_are_an_infrastructure_failure(coordinator: FakeCoordinator, start: Start) -> None:
    coordinator.offer_script("exit 0")
    for path in coordinator.files.iterdir():
        path.write_bytes(b"x" * path.stat().st_size)
    start()
    coordinator.wait_for(results=1)
    reason = failure(coordinator.results["1"])
    assert (reason.kind, reason.phase, reason.overdue) == ("infrastructure", "preparing", False)


def test_a_defect_of_the_agent_is_the_reason_of_the_job_and_not_its_end(
    coordinator: FakeCoordinator, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    claim, claims = LocalTransport.claim, []

    def broken_once(self: LocalTransport, lease: Lease) -> None:
        claims.append(lease)
        if len(claims) == 1:
            raise KeyError("no such thing")
        claim(self, lease)

    monkeypatch.setattr(LocalTransport, "claim", broken_once)
    coordinator.offer_script("exit 0", "1")
    coordinator.offer_script("exit 0", "2")
    start()
    coordinator.wait_for(results=2)
    reason = failure(coordinator.results["1"])
    assert reason.kind == "infrastructure" and "unexpected error of the agent" in reason.message
    assert "KeyError: 'no such thing'" in reason.message and "Traceback" in caplog.text
    assert coordinator.results["2"].result is not None


@pytest.mark.parametrize(("recorded", "expected"), [(300, 300), (1 << 40, None)])
def test_a_device_that_knows_a_newer_epoch_tells_the_coordinator(
    coordinator: FakeCoordinator, start: Start, tmp_path: Path, recorded: int, expected: int | None
) -> None:
    """As it is after the coordinator's database was restored from a backup."""
    LocalTransport(tmp_path / "cache").claim(Lease("fake", recorded))
    coordinator.offer_script("exit 0")
    start()
    coordinator.wait_for(results=1)
    failed = failure(coordinator.results["1"])
    assert (failed.kind, failed.phase, failed.last_epoch) == ("infrastructure", "preparing", expected)


def test_sends_heartbeats_while_it_works_and_ends_when_cancelled(coordinator: FakeCoordinator, start: Start) -> None:
    coordinator.offer_script("sleep 300")
    start()
    coordinator.wait_for(heartbeats=3)
    coordinator.cancelled.add("1")
    coordinator.wait_for(results=1)
    reason = failure(coordinator.results["1"])
    assert (reason.kind, reason.phase) == ("cancelled", "running")
    assert coordinator.heartbeats[-1].phase == "running"


def test_beats_while_it_waits_for_the_host(coordinator: FakeCoordinator, start: Start, lock: HostLock) -> None:
    coordinator.offer_script("exit 0")
    with lock.shared():
        start()
        coordinator.wait_for(heartbeats=3)
        assert coordinator.results == {}
    coordinator.wait_for(results=1)
    assert coordinator.results["1"].result is not None


def test_a_host_that_does_not_yield_is_an_infrastructure_failure(
    coordinator: FakeCoordinator, start: Start, lock: HostLock
) -> None:
    coordinator.offer_script("exit 0", deadline_s=0.3)
    with lock.shared():
        start()
        coordinator.wait_for(results=1)
    assert failure(coordinator.results["1"]).kind == "infrastructure"


def test_an_overdue_job_is_an_infrastructure_failure(coordinator: FakeCoordinator, start: Start) -> None:
    coordinator.offer_script("sleep 300", deadline_s=0.3)
    start()
    coordinator.wait_for(results=1)
    assert failure(coordinator.results["1"]).kind == "infrastructure"
    assert "0.3 s" in failure(coordinator.results["1"]).message


def test_survives_trouble_and_registers_again(coordinator: FakeCoordinator, start: Start) -> None:
    coordinator.trouble += [httpx.ConnectError("down"), httpx.Response(503)]
    start()
    coordinator.offer_script("exit 0")
    coordinator.wait_for(results=1)
    coordinator.registered.clear()
    coordinator.offer_script("exit 0", name="2")
    coordinator.wait_for(results=2)
    assert len(coordinator.registered) == 1


def runs(name: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(process.name() == name for process in psutil.Process().children(recursive=True))
    return False


def test_a_result_is_handed_in_again_until_it_arrives(coordinator: FakeCoordinator, start: Start) -> None:
    coordinator.heartbeat_s = 3600
    coordinator.offer_script("sleep 1.5")
    agent = start()
    until(lambda: runs("sleep"))  # by then nothing is left to be asked of the coordinator but to take the result
    agent.stop()
    coordinator.trouble += [httpx.ReadTimeout("lost"), httpx.Response(502)]
    coordinator.wait_for(results=1)
    assert coordinator.results["1"].result is not None


def test_stop_lets_the_running_job_finish(coordinator: FakeCoordinator, start: Start) -> None:
    coordinator.offer_script("sleep 0.5; echo done")
    agent = start()
    coordinator.wait_for(heartbeats=1)
    agent.stop()
    coordinator.wait_for(results=1)
    result = coordinator.results["1"].result
    assert result is not None
    assert result.pairs[0].candidate.stdout == "done\n"


def test_abort_hands_nothing_in(coordinator: FakeCoordinator, tmp_path: Path, lock: HostLock) -> None:
    coordinator.offer_script("sleep 300")
    agent = make(coordinator, tmp_path, lock)
    thread = threading.Thread(target=agent.run, daemon=True)
    thread.start()
    coordinator.wait_for(heartbeats=1)
    agent.abort()
    thread.join(30)
    assert not thread.is_alive() and coordinator.results == {}


@pytest.mark.parametrize("refusals", [[401], [422, 422]])
def test_a_coordinator_that_refuses_the_agent_ends_it(
    coordinator: FakeCoordinator, tmp_path: Path, lock: HostLock, refusals: list[int]
) -> None:
    """Whatever it refuses with: it also refuses an agent that serves nothing."""
    coordinator.trouble += [httpx.Response(status, text="not you") for status in refusals]
    with pytest.raises(NotAdmitted, match="not you"):
        make(coordinator, tmp_path, lock).run()


def test_an_agent_that_is_revoked_ends_and_keeps_its_result(
    coordinator: FakeCoordinator, tmp_path: Path, lock: HostLock
) -> None:
    coordinator.heartbeat_s = 3600
    coordinator.offer_script(f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done")
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(make(coordinator, tmp_path, lock).run)
        until(lambda: runs("sleep"))
        coordinator.trouble.append(httpx.Response(401, text="revoked"))
        (tmp_path / "go").touch()
        with pytest.raises(NotAdmitted, match="revoked"):
            future.result(60)
    assert [path.name for path in (tmp_path / "outbox").iterdir()] == [f"fake.{device(coordinator)}.7.json"]


def device(coordinator: FakeCoordinator) -> str:
    return coordinator.registered[0].devices[0].id


def test_backoff_grows_with_jitter_and_resets() -> None:
    highest = random.Random()
    highest.random = lambda: 1.0  # type: ignore[method-assign]
    backoff, trouble = Backoff(first_s=1.0, longest_s=32.0, rng=highest), InfrastructureFailed("503")
    assert [backoff.pause_s(trouble) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 32, 32]
    assert backoff.pause_s(NotReached("connection refused")) == NOBODY_THERE_S
    backoff.reset()
    assert backoff.pause_s(trouble) == 1.0
    many = [Backoff(rng=random.Random(seed)) for seed in range(1000)]
    for _ in range(12):
        pauses = [timer.pause_s(NotReached("connection refused")) for timer in many]
    spread = [sum(second <= pause < second + 1 for pause in pauses) for second in range(int(NOBODY_THERE_S))]
    assert sum(spread) == 1000 and max(spread) < 250, "they would come back in step"
