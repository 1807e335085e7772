"""The child agent as real processes: no process outlives the one that it serves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nas.core.plan import Runner
from nas.core.trust import RunnerManifest
from nas.measure.devices.agent.agent import child_arguments
from nas.measure.farm.trust import SigningKey
from tests.support.fake_coordinator import FakeCoordinator, served
from tests.support.waiting import until

LAUNCHER = """
import subprocess, sys, time
from nas.measure.devices.agent.agent import child_arguments
url, cache, lock, state, key = sys.argv[1:]
arguments = child_arguments(url, cache=cache, lock=lock, state=state, key=key)
with subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE) as process:
    print(process.pid, flush=True)
    time.sleep(3600)
"""


@contextlib.contextmanager
def child_agent(server: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs an agent that serves `server` while the context is open."""
    process = subprocess.Popen([sys.executable, *child_arguments(server, **options)], stdin=subprocess.PIPE)
    with process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


class Place:
    """A coordinator on a socket, and the folders of an agent."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "served").mkdir()
        self.coordinator = FakeCoordinator(root / "served", local_paths=True)
        self.key = SigningKey.generate()
        self.runners: list[Runner] = []
        self.url = ""

    def offer(self, script: str, name: str = "job") -> None:
        self.runners.append(self.coordinator.script(script))
        self.issue(self.key)
        self.coordinator.offer_script(script, name, deadline_s=600)

    def issue(self, key: SigningKey) -> None:
        serial = len(self.runners)
        self.coordinator.manifest = key.sign(RunnerManifest(serial=serial, issued_at=0.0, runners=tuple(self.runners)))

    def offer_endless(self) -> Callable[[], int]:
        """A runner that notes its pid and never ends. The result waits for the pid."""
        mark = self.root / "pid"
        self.offer(f"echo $$ > {mark}.new; mv {mark}.new {mark}; exec sleep 3600")

        def pid() -> int:
            until(mark.exists)
            return int(mark.read_text())

        return pid

    @property
    def options(self) -> dict[str, Any]:
        return {name: self.root / name for name in ("cache", "lock", "state")} | {"key": self.key.public}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    with served(place.coordinator, tmp_path / "s") as url:
        place.url = url
        yield place


def is_dead(pid: int) -> bool:
    """Dead: no such process, or one that only waits for its parent to take note."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_serves_a_job_over_a_socket(place: Place) -> None:
    place.offer("echo measured")
    with child_agent(place.url, **place.options):
        place.coordinator.wait_for(results=1)
    result = place.coordinator.results["job"].result
    assert result is not None
    assert result.pairs[0].candidate.stdout == "measured\n"
    assert place.coordinator.registered[0].devices[0].target.endswith("-linux")


def test_runs_nothing_that_another_key_signed(place: Place) -> None:
    mark = place.root / "ran"
    place.offer(f"touch {mark}")
    place.issue(SigningKey.generate())
    with child_agent(place.url, **place.options):
        place.coordinator.wait_for(results=1)
    failure = place.coordinator.results["job"].failure
    assert failure is not None
    assert failure.kind == "refused"
    assert "trusts only" in failure.message
    assert not mark.exists()


def test_a_restarted_agent_takes_no_older_manifest(place: Place) -> None:
    for name in ("1", "2"):
        place.offer(f"echo {name}", name)
    with child_agent(place.url, **place.options):
        place.coordinator.wait_for(results=2)
    place.runners.clear()
    place.offer("echo 3", "3")
    with child_agent(place.url, **place.options):
        place.coordinator.wait_for(results=3)
    failure = place.coordinator.results["3"].failure
    assert failure is not None
    assert failure.kind == "refused"
    assert "sent number 1, but this agent saw another one, number 2" in failure.message


def test_kill_9_of_the_agent_takes_the_runner_down(place: Place) -> None:
    pid = place.offer_endless()
    with child_agent(place.url, **place.options) as agent:
        runner = pid()
        agent.send_signal(signal.SIGKILL)
        until(lambda: is_dead(runner))


def test_kill_9_of_the_launch_takes_agent_and_runner_down(place: Place) -> None:
    pid = place.offer_endless()
    arguments = [place.url, *map(str, place.options.values())]
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, *arguments], stdout=subprocess.PIPE) as launch:
        assert launch.stdout is not None
        agent = int(launch.stdout.readline())
        runner = pid()
        launch.kill()
        until(lambda: is_dead(runner))
        until(lambda: is_dead(agent))


def test_kill_9_of_the_supervisor_kills_the_runner_and_is_reported(place: Place) -> None:
    pid = place.offer_endless()
    with child_agent(place.url, **place.options):
        runner = pid()
        supervisor = int(Path(f"/proc/{runner}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(supervisor, signal.SIGKILL)
        until(lambda: is_dead(runner))
        place.coordinator.wait_for(results=1)
    failure = place.coordinator.results["job"].failure
    assert failure is not None
    assert failure.kind == "infrastructure"


def test_kill_9_of_the_agent_does_not_cost_a_result(place: Place) -> None:
    """A finished result is submitted by the next agent, under its epoch, and not measured again."""
    runs, outbox = place.root / "runs", place.root / "state" / "outbox"
    place.offer(f"echo run >> {runs}; echo measured")
    place.coordinator.refuses_results = True
    with child_agent(place.url, **place.options) as agent:
        until(lambda: outbox.is_dir() and any(outbox.glob("*.json")))
        agent.send_signal(signal.SIGKILL)
    place.coordinator.refuses_results = False
    with child_agent(place.url, **place.options):
        place.coordinator.wait_for(results=1)
        until(lambda: not any(outbox.glob("*.json")))
    result = place.coordinator.results["job"].result
    assert result is not None
    assert result.pairs[0].candidate.stdout == "measured\n"
    assert runs.read_text() == "run\n"


def test_sigterm_lets_the_job_finish_and_then_ends_cleanly(place: Place) -> None:
    mark = place.root / "started"
    place.offer(f"touch {mark}; sleep 1; echo finished")
    with child_agent(place.url, **place.options) as agent:
        until(mark.exists)
        agent.terminate()
        assert agent.wait(60) == 0
    result = place.coordinator.results["job"].result
    assert result is not None
    assert result.pairs[0].candidate.stdout == "finished\n"


def test_a_second_sigterm_ends_it_at_once(place: Place) -> None:
    pid = place.offer_endless()
    with child_agent(place.url, **place.options) as agent:
        runner = pid()
        agent.terminate()
        time.sleep(0.2)
        agent.terminate()
        assert agent.wait(60) == 0
        assert is_dead(runner)
    assert place.coordinator.results == {}


def test_the_end_of_the_context_ends_an_idle_agent(place: Place) -> None:
    with child_agent(place.url, **place.options) as agent:
        until(lambda: bool(place.coordinator.registered))
    assert agent.returncode == 0


def test_a_coordinator_that_refuses_is_the_agents_exit_code(place: Place) -> None:
    place.coordinator.trouble.append(httpx.Response(401, text="token revoked"))
    with child_agent(place.url, **place.options) as agent:
        assert agent.wait(60) == 1
