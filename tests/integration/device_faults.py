"""Faults that a transport to another machine must survive. Test modules subclass `RemoteFaults` and add fixtures."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from device_lab import Machine, within

from nas.core.clock import SystemClock
from nas.core.errors import InfrastructureFailed
from nas.core.plan import InputFile, Plan, PlanFile, Round, Runner
from nas.measure.devices.agent.run_plan import Observer, run_round
from nas.measure.devices.describe import describe
from nas.measure.devices.transports import wire
from nas.measure.devices.transports.base import CommandResult, Lease, StaleLease
from nas.measure.devices.transports.shell import ShellTransport
from nas.testing.transport_contract import device_hash, run

LATEST_S = 60.0
"""A runner that nothing ends would still run by then; how soon it ends is not asserted."""

RUNNER = ("sleep", "3217")
BIG = 64 << 20


class RemoteFaults:
    """Subclass it and give these fixtures.

    `device`: a machine. `transport`, `another`: two transports to it, for an empty folder there. `folder`: that
    folder, from the machine's root. `daemon`: words that find what serves a connection there. `code`: a Python
    expression for a transport like these, with its imports.
    """

    @contextmanager
    def running(self, device: Machine, transport: ShellTransport, deadline_s: float) -> Iterator[Future[CommandResult]]:
        """A runner that does not end by itself."""
        with ThreadPoolExecutor(1) as threads:
            result = threads.submit(transport.run, RUNNER, env={}, deadline_s=deadline_s, output_limit=100)
            assert within(60, lambda: bool(device.processes(*RUNNER))), result.result()
            yield result

    def has_ended(self, device: Machine, seconds: float = LATEST_S) -> bool:
        return within(seconds, lambda: not device.processes(*RUNNER))

    def test_the_connection_breaks_during_a_run(self, device: Machine, transport: ShellTransport, daemon: str) -> None:
        with self.running(device, transport, 300) as result:
            device.kill(daemon)
            assert self.has_ended(device)
            with pytest.raises(InfrastructureFailed):
                result.result()
        assert within(60, lambda: reached(transport))
        assert run(transport, "exit 0").exit_code == 0

    def test_the_link_is_down_at_the_deadline(self, device: Machine, transport: ShellTransport) -> None:
        with self.running(device, transport, 4) as result:
            with device.cut():
                assert self.has_ended(device, 4 + LATEST_S)
            assert result.result().timed_out

    def test_a_silent_network_is_noticed(
        self, device: Machine, transport: ShellTransport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The device knows nothing of it; the next lease finds the runner there and ends it."""
        monkeypatch.setattr(wire, "SILENT_S", 3)
        transport.close()
        transport.claim(Lease("coordinator", 6))
        with self.running(device, transport, 300) as result, device.cut(), pytest.raises(InfrastructureFailed):
            result.result(timeout=60)
        transport.claim(Lease("coordinator", 7))
        assert not device.processes(*RUNNER)

    def test_the_agent_is_killed(self, device: Machine, transport: ShellTransport, code: str) -> None:
        begin = f"{code}.run({RUNNER!r}, env={{}}, deadline_s=300, output_limit=100)"
        with subprocess.Popen([sys.executable, "-c", begin]) as agent:
            assert within(60, lambda: bool(device.processes(*RUNNER)))
            agent.send_signal(signal.SIGKILL)
            assert self.has_ended(device)

    def test_the_supervisor_is_killed(self, device: Machine, transport: ShellTransport) -> None:
        """Both sides notice it long before the deadline."""
        with self.running(device, transport, 300) as result:
            device.kill("sh", "content/", "run")
            with pytest.raises(InfrastructureFailed):
                result.result(timeout=60)
            assert self.has_ended(device)
        assert run(transport, "exit 0").exit_code == 0

    def test_the_supervisor_is_killed_and_the_link_is_down(self, device: Machine, transport: ShellTransport) -> None:
        """Nobody but the second process group is left to end the run."""
        with self.running(device, transport, 4) as result, device.cut():
            device.kill("sh", "content/", "run")
            assert self.has_ended(device, 4 + LATEST_S)
        with pytest.raises(InfrastructureFailed):
            result.result()

    def test_a_newer_epoch_ends_what_an_older_one_runs(
        self, device: Machine, transport: ShellTransport, another: ShellTransport
    ) -> None:
        transport.claim(Lease("coordinator", 7))
        with self.running(device, transport, 300) as result:
            another.claim(Lease("coordinator", 8))
            assert not device.processes(*RUNNER)
            with pytest.raises(StaleLease):
                result.result()
        assert run(another, "exit 0").exit_code == 0
        with pytest.raises(StaleLease):
            run(transport, "exit 0")

    def test_somebody_elses_runner_is_left_alone(
        self, device: Machine, transport: ShellTransport, another: ShellTransport
    ) -> None:
        transport.claim(Lease("coordinator", 7))
        with self.running(device, transport, 300) as result:
            with pytest.raises(InfrastructureFailed, match="in use"):
                another.claim(Lease("another-coordinator", 8))
            assert device.processes(*RUNNER)
            device.kill(*RUNNER)
            assert result.result().exit_code == -9

    def test_the_connection_breaks_during_a_push(
        self, device: Machine, transport: ShellTransport, daemon: str, folder: str, tmp_path: Path
    ) -> None:
        path, sha256 = big_file(tmp_path, 3 * BIG)
        with ThreadPoolExecutor(1) as threads:
            pushing = threads.submit(transport.push, path, sha256)
            assert within(60, lambda: pushing.done() or any((device.root / folder / "tmp").glob("*/file")))
            assert not pushing.done(), pushing.result()
            device.kill(daemon)
            with pytest.raises(InfrastructureFailed):
                pushing.result()
        assert not (device.root / folder / "content" / sha256).exists()
        assert within(60, lambda: reached(transport))
        assert device_hash(transport, transport.push(path, sha256)) == sha256

    def test_a_full_disk_is_reported(
        self, device: Machine, transport: ShellTransport, folder: str, tmp_path: Path
    ) -> None:
        path, sha256 = big_file(tmp_path)
        with device.small_disk(folder, megabytes=2):
            transport.connect()
            with pytest.raises(InfrastructureFailed, match="MB are free"):
                transport.push(path, sha256)
            assert run(transport, "exit 0").exit_code == 0
            assert not any((device.root / folder / "tmp").iterdir())

    def test_damage_on_the_device_is_found_and_repaired(
        self, device: Machine, transport: ShellTransport, folder: str, tmp_path: Path
    ) -> None:
        path, sha256 = tmp_path / "runner", hashlib.sha256(b"#!/bin/sh\n").hexdigest()
        path.write_bytes(b"#!/bin/sh\n")
        remote = transport.push(path, sha256)
        bundle = transport.bundle({"runner": sha256})
        for place in (remote, f"{bundle}/runner"):
            (device.root / place.lstrip("/")).chmod(0o755)
            (device.root / place.lstrip("/")).write_bytes(b"#!/bin/sh\nrm -rf .\n")
        with pytest.raises(InfrastructureFailed, match="damaged"):
            transport.bundle({"runner": sha256})
        assert device_hash(transport, transport.push(path, sha256)) == sha256
        assert device_hash(transport, f"{transport.bundle({'runner': sha256})}/runner") == sha256

    def test_much_on_both_streams(self, transport: ShellTransport) -> None:
        script = f"head -c {BIG} /dev/zero >&2 & head -c {BIG} /dev/zero; wait; echo end >&2"
        result = run(transport, script, output_limit=BIG)
        assert (len(result.stdout), result.exit_code, result.truncated) == (BIG, 0, False)
        assert result.stderr_tail.endswith(b"\0end\n")

    def test_the_runner_is_pinned(self, transport: ShellTransport) -> None:
        result = run(transport, "grep Cpus_allowed_list /proc/self/status", cpu_affinity=[1])
        assert result.stdout.split()[1] == b"1"

    def test_a_descendant_that_left_the_group_is_killed_too(self, device: Machine, transport: ShellTransport) -> None:
        run(transport, f"setsid {' '.join(RUNNER)} & sleep 0.2")
        assert not device.processes(*RUNNER)

    def test_cpu_time_is_reported(self, transport: ShellTransport) -> None:
        result = run(transport, "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
        assert result.cpu_s is not None and result.cpu_s > 0

    def test_a_round_is_delivered_and_run(self, transport: ShellTransport, tmp_path: Path) -> None:
        """The runner has two files, finds its library next to it, makes one input itself and is observed."""
        script = b"""#!/bin/sh
        [ "$1" = --recipe ] && { sed s/recipe/RECIPE/ <"$2" >"$4"; exit; }
        cat "${0%/*}/library" "$1"
        """
        contents = [script, b"library ", b"recipe", b"RECIPE"]
        hashes = [hashlib.sha256(content).hexdigest() for content in contents]
        main, library, recipe = (
            PlanFile(sha256=sha256, size=len(content)) for content, sha256 in zip(contents[:3], hashes[:3], strict=True)
        )
        model = InputFile(sha256=hashes[3], size=6, recipe=recipe)
        for content, sha256 in zip(contents, hashes, strict=True):
            (tmp_path / sha256).write_bytes(content)
        files = {"main": main, "library": library}
        runner = Runner(runtime="script", build="b" * 64, target="x86_64-linux", files=files, main="main")
        plan = Plan(runner=runner, inputs={"model": model}, args=("{model}",), deadline_s=30)
        done = run_round(
            Round(candidate=plan, reference=plan, repetitions=2),
            transport,
            InFolder(tmp_path),
            lambda runner: True,
            observer=Observer(transport),
            clock=SystemClock(),
        )
        outputs = [raw.stdout for pair in done.pairs for raw in (pair.reference, pair.candidate) if raw]
        assert outputs == ["library RECIPE"] * 4
        assert done.pairs[0].candidate.conditions.free_memory_mb

    def test_the_device_is_described(self, transport: ShellTransport) -> None:
        device = describe(transport, "x86_64", "remote")
        assert device.cores == os.cpu_count()
        assert device.memory_mb > 100


@dataclass(frozen=True)
class InFolder:
    """Files that lie under their hashes."""

    folder: Path

    def fetch(self, file: PlanFile) -> Path:
        return self.folder / file.sha256

    def doubt(self, file: PlanFile) -> None:
        pass


def reached(transport: ShellTransport) -> bool:
    """Returns whether the device answers (again)."""
    try:
        transport.connect()
    except InfrastructureFailed:
        return False
    return True


def big_file(folder: Path, size: int = BIG) -> tuple[Path, str]:
    """A file whose transfer takes a moment, and its hash."""
    path = folder / "big"
    path.write_bytes(bytes(range(256)) * (size // 256))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()
