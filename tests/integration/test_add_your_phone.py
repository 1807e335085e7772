"""The commands of docs/tutorial/add-your-phone.md work, in their order, against a real adbd with a phone's tools.

In place of the phone's address stands that of a machine here, and in place of arm64 this machine's own x86-64.
Commands that end by themselves run in this process, launches without Ray; `nas serve` and `nas agent run` as processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
from cli_runner import Outcome, nas
from device_lab import Machine, adbd
from study_lab import LIMIT_S, NAS

from nas.measure.devices.transports.adb_device import AdbKey
from nas.measure.runtimes.llama_cpp.variants import Build
from tests.support.local_compute import without_ray
from tests.support.waiting import until

pytestmark = [pytest.mark.needs("devices"), pytest.mark.usefixtures("short_reference_runs")]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial/add-your-phone.md").read_text(encoding="utf-8")
LOCAL_PART, REMOTE_PART = PAGE.split("## The phone is attached to another computer")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(part: str) -> list[str]:
    """The commands of the page, in its order."""
    return [line for language, text in FENCE.findall(part) if language == "sh" for line in text.splitlines()]


@dataclass
class Computer:
    """A computer with a home of its own, on which commands of the page are given."""

    folder: Path
    names: dict[str, str]
    running: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"NAS_HOME": str(self.folder), "OMP_NUM_THREADS": "1"}

    def arguments(self, command: str) -> list[str]:
        """Of a command of the page, with the replacements."""
        for name, real in self.names.items():
            command = command.replace(name, real)
        program, *arguments = shlex.split(command)
        assert program == "nas"
        return arguments

    def start(self, command: str) -> None:
        """A command of the page, running; it is ended as people end it."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [*NAS, *self.arguments(command)], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=pipe, stderr=pipe, text=True,
        )  # fmt: skip
        self.running.callback(interrupt, process)

    def give(self, command: str, code: int = 0) -> Outcome:
        """A command of the page, to its end."""
        with contextlib.chdir(self.folder), mock.patch.dict(os.environ, self.environment), without_ray():
            done = nas(*self.arguments(command))
        assert done.code == code, f"{command}: {done.code}: {done.err[-2000:]}"
        assert "Traceback" not in done.err
        return done


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, which every command of the page takes for a request to end well."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with adbd(tmp_path_factory.mktemp("phone"), "a key of somebody else's") as machine:
        (machine.root / "etc/machine-id").write_text("phone")
        yield machine


def accept(phone: Machine, computer: Path) -> None:
    """Accepts the key, as a person does on the phone's screen."""
    with (phone.root / "data/misc/adb/adb_keys").open("a") as keys:
        keys.write(f"{AdbKey.load(computer / 'keys' / 'adb').public()}\n")


@pytest.fixture
def names(phone: Machine, llama_build: Build) -> dict[str, str]:
    """Words of the page, and their replacements here."""
    address = f"adb:{phone.address}:{phone.port}"
    return {"adb:R5CT1234567": address, "aarch64-linux": llama_build.runner.target}


def test_a_phone_on_this_computer(
    phone: Machine, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computer = Computer(tmp_path, names)
    build, add, see, bench, launch, study, show = commands(LOCAL_PART)
    (tmp_path / "phone.yaml").write_text(
        next(text for language, text in FENCE.findall(LOCAL_PART) if language == "yaml")
    )
    with computer.running:
        computer.give(build)
        with monkeypatch.context() as patch:
            patch.setattr(
                "nas.measure.devices.transports.adb_device.CONNECT_S", 1.0
            )  # a phone has ten seconds to accept a key
            assert "accept it on the device's screen" in computer.give(add, code=3).err
        accept(phone, tmp_path)
        assert re.search(r"^tags +phone$", computer.give(add).out, re.MULTILINE)
        assert "\tattached\t" in computer.give(see).out
        outcome = computer.give(f"{bench} --json")
        report = json.loads(outcome.out)
        assert report["ttft_ms"]["value"] > 0 and len(report["reps"]) == 3
        computer.names["DEVICE"] = report["device"]["id"]
        assert f"{report['device']['id']}\t\toffline\tgood" in computer.give(see).out
        out = computer.give(launch).out
        assert "published" in out and "attention" in out
        assert "complete" in computer.give(study).out
        assert "reference [ms]" in computer.give(show).out


def test_a_phone_on_another_computer(phone: Machine, names: dict[str, str], tmp_path: Path) -> None:
    serve, token, enrol, add, run, see = commands(REMOTE_PART)
    for name in ("coordinator", "shelf"):
        (tmp_path / name).mkdir()
    coordinator, shelf = Computer(tmp_path / "coordinator", names), Computer(tmp_path / "shelf", names)
    accept(phone, shelf.folder)
    with coordinator.running, shelf.running:
        coordinator.start(f"{serve} --port 0")
        until(lambda: (coordinator.folder / "serve.json").exists(), LIMIT_S)
        shelf.names["LINE"] = coordinator.give(token).out.strip()
        assert "enrolled as shelf" in shelf.give(enrol).err
        refused = shelf.give(enrol.replace("shelf", "thief") + " --replace", code=3)
        assert "used or too old" in refused.err
        shelf.give(add)
        shelf.start(run)
        until(lambda: "\tidle\t" in (listed := coordinator.give(see).out) and "\tshelf\t" in listed, LIMIT_S)
