"""What else the machine is busy with, told before a launch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cli_runner import nas

from nas.cli import preflight
from nas.cli.preflight import Load, Sample, load

BEFORE = Sample(100.0, 50.0, 1.0, {(1, 0.0): ("chrome", 10.0), (2, 0.0): ("python", 5.0), (3, 0.0): ("idle", 1.0)})
AFTER = Sample(
    102.0, 54.0, 1.4,
    {
        (1, 0.0): ("chrome", 10.8), (2, 0.0): ("python", 6.0), (3, 0.0): ("idle", 1.0),
        (4, 101.0): ("python", 0.8), (5, 101.0): ("sshd", 0.3), (6, 101.0): ("cron", 0.2),
    },
)  # fmt: skip


def test_the_three_busiest_names_are_told() -> None:
    samples, waited = [BEFORE, AFTER], list[float]()
    usage = load(lambda: samples.pop(0), waited.append)
    assert waited == [2.0]
    assert usage.cores == pytest.approx(1.8), "its own time does not count"
    assert [(name, pytest.approx(cores)) for name, cores in usage.processes] == [
        ("python", 0.9), ("chrome", 0.4), ("sshd", 0.15),
    ]  # fmt: skip
    assert usage.busy and usage.text.startswith(
        f"other processes use 1.8 of {usage.of} cores (python 0.9, chrome 0.4, "
    )


def test_all_cores_of_the_machine_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda: 64)
    samples = [BEFORE, AFTER]
    assert load(lambda: samples.pop(0), lambda seconds: None).text.startswith("other processes use 1.8 of 64 cores")


def test_a_calm_machine_has_no_names() -> None:
    samples = [BEFORE, Sample(102.0, 50.1, 1.1, BEFORE.processes)]
    usage = load(lambda: samples.pop(0), lambda seconds: None)
    assert not usage.busy and usage.processes == ()


def test_a_process_that_is_busy_is_named() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            usage = load(seconds=1.0)
        finally:
            busy.kill()
    assert usage.cores > 0.05
    assert any(name.startswith("python") for name, _ in usage.processes), usage


def test_a_launch_tells_it_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "load", lambda: Load(1.84, 2, (("python", 0.9), ("chrome", 0.6))))
    done = nas("launch", "--space", "lfm2-demo", "--dry-run")
    assert done.code == 0
    message = "other processes use 1.8 of 2 cores (python 0.9, chrome 0.6): intervals will be wider"
    assert message in " ".join(done.out.split())
