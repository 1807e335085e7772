"""The agent of this machine as a real process below a real coordinator: it comes back, and goes with its parent."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from nas.core.errors import InfrastructureFailed
from nas.core.plan import Plan, PlanFile, Round, Runner
from nas.infra.store.store import Store
from nas.measure.farm.farm import Farm, LocalAgent, open_farm
from tests.support.waiting import until

LAUNCH = """
import sys, time
from nas.measure.farm.farm import open_farm
from nas.infra.store.store import Store
with open_farm(Store.open()) as farm:
    farm.device("local")
    print(farm.agent.pid, flush=True)
    time.sleep(3600)
"""


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    store = Store.open()
    yield store
    store.close()


def agent(tmp_path: Path, argv: list[str]) -> LocalAgent:
    """Returns a `LocalAgent` that keeps another program running in place of the agent."""
    local_agent = LocalAgent(
        tmp_path / "socket", cache=tmp_path, lock=tmp_path, state=tmp_path, key="0" * 64, lock_file=tmp_path / "turn",
        log=tmp_path / "log",
    )  # fmt: skip
    local_agent._argv = argv
    return local_agent


def script(folder: Path, word: str) -> Runner:
    """A runner that prints the word."""
    content = f"#!/bin/sh\necho {word}\n".encode()
    sha256 = hashlib.sha256(content).hexdigest()
    (folder / word).write_bytes(content)
    files = {word: PlanFile(sha256=sha256, size=len(content))}
    return Runner(runtime="script", build=sha256, target="x86_64-linux", files=files, main=word)


def printed(farm: Farm, device: str, runner: Runner) -> str:
    plan = Plan(runner=runner, inputs={}, args=(), deadline_s=30)
    result = asyncio.run(farm.jobs(None).run(runner.build, 0, device, Round(candidate=plan, repetitions=1)))
    return result.pairs[0].candidate.stdout


def test_it_runs_what_was_admitted_and_nothing_else(store: Store, tmp_path: Path) -> None:
    runner, other = script(tmp_path, "known"), script(tmp_path, "other")
    with open_farm(store) as farm:
        device = farm.device("local").id
        farm.runners.admit(runner, tmp_path)
        assert printed(farm, device, runner) == "known\n"
        with pytest.raises(InfrastructureFailed, match="not in the coordinator's runner manifest"):
            printed(farm, device, other)
        farm.runners.admit(other, tmp_path)  # the agent asks again when it meets it again
        assert printed(farm, device, other) == "other\n"


def test_a_killed_agent_is_started_again_and_registers(store: Store) -> None:
    with open_farm(store) as farm:
        device = farm.device("local")
        first = farm.agent.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)  # a device that has registered is not waited for again
        assert farm.device("local") == device
        os.kill(first, signal.SIGKILL)
        until(lambda: farm.agent.pid not in (None, first))
        assert farm.device("local") == device
        farm.agent.check()
        second = farm.agent.pid
        assert second is not None
    until(lambda: not alive(second))


def test_the_log_of_the_agent_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.core.logs.LOG_BYTES", 1000)
    text = "import sys; sys.stderr.write('x' * 3000); sys.stderr.flush(); sys.stdin.read()"
    with agent(tmp_path, [sys.executable, "-c", text]):
        until((tmp_path / "log.1").exists)
    assert (tmp_path / "log.1").read_bytes() == b"x" * 500


def test_two_launches_share_one_agent_and_the_second_takes_over(store: Store) -> None:
    stack = ExitStack()
    first = stack.enter_context(open_farm(store))
    device = first.device("local")
    assert first.agent.pid is not None
    with open_farm(store) as second:
        until(lambda: second.agent.on_standby)
        os.kill(first.agent.pid, signal.SIGSTOP)  # the second asks the database, not the agent
        assert second.device("local") == device
        os.kill(first.agent.pid, signal.SIGCONT)
        assert second.agent.pid is None
        stack.close()
        until(lambda: second.agent.pid is not None)
        assert not second.agent.on_standby
        assert second.device("local") == device


def test_it_ends_when_its_parent_is_killed(store: Store) -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCH], stdout=subprocess.PIPE, text=True) as launch:
        assert launch.stdout is not None
        pid = int(launch.stdout.readline())
        assert alive(pid)
        launch.kill()
    until(lambda: not alive(pid))
    with open_farm(store) as farm:
        farm.device("local")


def test_a_program_that_ends_at_once_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.measure.farm.farm._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("nas.measure.farm.farm._LONGEST_PAUSE_S", 0.01)
    with agent(tmp_path, [sys.executable, "-c", "print('why not')"]) as broken:

        def failed() -> bool:
            try:
                broken.check()
            except InfrastructureFailed as error:
                return "ended 5 times right after its start" in str(error)
            return False

        until(failed)
    assert (tmp_path / "log").read_text().splitlines() == ["why not"] * 5


def test_a_program_that_does_not_heed_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.measure.farm.farm._STOP_S", 0.5)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
    )
    with agent(tmp_path, [sys.executable, "-c", deaf]) as local_agent:
        until(lambda: (tmp_path / "log").exists() and "on" in (tmp_path / "log").read_text())
        pid = local_agent.pid
        assert pid is not None
    until(lambda: not alive(pid))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    local_agent = agent(tmp_path / "missing", ["true"])
    with local_agent:

        def is_reported() -> bool:
            try:
                local_agent.check()
            except InfrastructureFailed as error:
                return "No such file or directory" in str(error)
            return False

        until(is_reported)
