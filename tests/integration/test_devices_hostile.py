"""A device that answers 1 GB to what it is asked cannot fill its agent's memory: with a real sshd and a real adbd."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from device_lab import Machine, adbd, sshd

from nas.measure.devices.transports.adb_device import AdbKey
from nas.measure.devices.transports.ssh import SshAddress, host_key, pin

pytestmark = pytest.mark.needs("devices")

GIGABYTE = 1_000_000_000
LIMIT = 1 << 20
MOST_MB = 64
"""By which an agent may grow: ssh's receive window is 16 MB, and what a run may say is kept twice for a moment."""

AGENT = """
import json, re, sys
from pathlib import Path
from nas.core.errors import NasError
from nas.measure.devices.attachments import open_transport
from nas.testing.transport_contract import run

def peak_mb():
    return int(re.search("VmHWM:[^0-9]+([0-9]+)", Path("/proc/self/status").read_text())[1]) / 1000

address, script, limit = sys.argv[1:]
before, transport = peak_mb(), open_transport(address, Path("/none"))
try:
    result = run(transport, script, output_limit=int(limit))
    said = [len(result.stdout), len(result.stderr_tail), result.truncated]
except NasError as error:
    said = str(error)
print(json.dumps({"grown": peak_mb() - before, "said": said}))
"""


@dataclass(frozen=True)
class Device:
    """A machine, and what an agent needs to reach it."""

    machine: Machine
    address: str
    home: Path

    def ask(self, script: str) -> dict[str, Any]:
        """The outcome of a run in an agent process, and by how many MB it grew at most."""
        command = [sys.executable, "-c", AGENT, self.address, script, str(LIMIT)]
        env = os.environ | {"NAS_HOME": str(self.home)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
        outcome: dict[str, Any] = json.loads(done.stdout)
        return outcome

    @contextlib.contextmanager
    def lying(self, answer: str) -> Iterator[None]:
        """Its shell answers everything with `answer`, a line of bash."""
        liar, inside = self.machine.root / "liar", Path(f"/proc/{self.machine.init}/cwd").readlink()
        liar.write_text(f"#!/usr/bin/bash\n{answer}\n")
        liar.chmod(0o755)
        enter = ["nsenter", f"--target={self.machine.init}", "--mount"]
        subprocess.run([*enter, "mount", "--bind", f"{inside}/liar", f"{inside}/usr/bin/dash"], check=True)
        try:
            yield
        finally:
            subprocess.run([*enter, "umount", "--lazy", f"{inside}/usr/bin/dash"], check=True)


@pytest.fixture(scope="module", params=["ssh", "adb"])
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("device")
    if request.param == "ssh":
        with sshd(folder, home / "keys") as machine:
            address = SshAddress("root", machine.address, machine.port)
            pin(address, host_key(address), home / "keys")
            yield Device(machine, str(address), home)
    else:
        with adbd(folder, AdbKey.load(home / "keys" / "adb").public()) as machine:
            yield Device(machine, f"adb:{machine.address}:{machine.port}", home)


@pytest.mark.parametrize(("stream", "expected"), [("", [LIMIT, 0, True]), (" >&2", [0, 8192, False])])
def test_a_runner_that_says_a_gigabyte(device: Device, stream: str, expected: list[object]) -> None:
    outcome = device.ask(f"head -c {GIGABYTE} /dev/zero{stream}")
    assert outcome["said"] == expected
    assert outcome["grown"] < MOST_MB


def test_a_device_that_answers_a_gigabyte_to_everything(device: Device) -> None:
    with device.lying(f"exec head -c {GIGABYTE} /dev/zero"):
        outcome = device.ask("exit 0")
    assert "sent more than was asked for" in outcome["said"]
    assert outcome["grown"] < MOST_MB
    assert device.ask("exit 0")["said"] == [0, 0, False]
