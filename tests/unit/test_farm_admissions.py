"""Which runners get signed: those whose files are what their records say, under serials that only grow."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from nas.core.clock import SystemClock
from nas.core.errors import InfrastructureFailed
from nas.core.plan import PlanFile, Runner
from nas.core.trust import RunnerManifest
from nas.measure.devices.agent.trust import verified
from nas.measure.farm.trust import MANIFEST_FILE, Admissions, SigningKey, open_key

ADMIT = """
import sys
from pathlib import Path
from nas.core.clock import SystemClock
from nas.core.plan import Runner
from nas.measure.farm.trust import Admissions
from nas.measure.farm.trust import open_key
home, *folders = map(Path, sys.argv[1:])
for folder in folders:
    runner = Runner.model_validate_json((folder / "record").read_bytes())
    Admissions(home, open_key(home), SystemClock()).admit(runner, folder)
"""


class SetClock(SystemClock):
    """Stands still where it was set."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


class Home:
    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, SetClock()
        self.folder = root / "home"
        self.folder.mkdir()
        self.key = open_key(self.folder)

    @property
    def admissions(self) -> Admissions:
        return Admissions(self.folder, self.key, self.clock)

    def build(self, name: str) -> tuple[Runner, Path]:
        folder = self.root / name
        folder.mkdir()
        contents = {"runner": f"#!/bin/sh\necho {name}\n".encode(), "lib.so": b"the same everywhere"}
        for file, content in contents.items():
            (folder / file).write_bytes(content)
        files = {
            file: PlanFile(sha256=hashlib.sha256(content).hexdigest(), size=len(content))
            for file, content in contents.items()
        }
        return Runner(runtime="script", build=name, target="x86_64-linux", files=files, main="runner"), folder

    def manifest(self) -> RunnerManifest:
        signed = self.admissions.signed()
        assert signed is not None
        return verified(signed, self.key.public)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_what_is_admitted_is_signed_and_found(home: Home) -> None:
    assert home.admissions.signed() is None
    assert home.admissions.find_file("0" * 64) is None
    runner, folder = home.build("a")
    home.admissions.admit(runner, folder)
    assert home.manifest() == RunnerManifest(serial=1000, issued_at=1000.0, runners=(runner,))
    assert home.admissions.find_file(runner.files["lib.so"].sha256) == folder / "lib.so"
    assert home.admissions.find_file("0" * 64) is None


def test_nothing_new_is_nothing_issued(home: Home) -> None:
    builds = [home.build(name) for name in "ab"]
    for _ in range(2):
        for runner, folder in builds:
            home.admissions.admit(runner, folder)
    assert home.manifest().serial == 1001
    assert home.manifest().runners == tuple(runner for runner, _ in builds)


@pytest.mark.parametrize("victim", ["runner", "lib.so"])
def test_a_build_that_was_changed_is_not_signed(home: Home, victim: str) -> None:
    runner, folder = home.build("a")
    (folder / victim).write_bytes(b"something else")
    with pytest.raises(InfrastructureFailed, match=f"script build a: .*{victim} is not what the build's record says"):
        home.admissions.admit(runner, folder)
    assert home.admissions.signed() is None


def test_builds_that_are_gone_or_were_changed_are_taken_out(home: Home) -> None:
    missing_build, changed, whole, last = (home.build(name) for name in ("gone", "changed", "whole", "last"))
    for runner, folder in (missing_build, changed, whole):
        home.admissions.admit(runner, folder)
    (missing_build[1] / "runner").unlink()
    (changed[1] / "lib.so").write_bytes(b"something else")
    home.admissions.admit(*last)
    assert home.manifest().runners == (last[0], whole[0])
    file = home.admissions.find_file(whole[0].files["lib.so"].sha256)
    assert file is not None
    assert file.read_bytes() == b"the same everywhere"


def test_a_build_is_listed_with_its_newest_record_only(home: Home) -> None:
    runner, folder = home.build("a")
    home.admissions.admit(runner, folder)
    newer = runner.model_copy(update={"options": ("--model",)})
    home.admissions.admit(newer, folder)
    assert home.manifest().runners == (newer,)


def test_serials_grow_whatever_the_clock_does(home: Home) -> None:
    serials = []
    for name, time in (("a", 1000.0), ("b", 1000.0), ("c", 5.0), ("d", 2000.0)):
        home.clock.time = time
        home.admissions.admit(*home.build(name))
        serials.append(home.manifest().serial)
    assert serials == [1000, 1001, 1002, 2000]


def test_a_home_that_lost_its_manifest_goes_on_above_it(home: Home) -> None:
    home.admissions.admit(*home.build("a"))
    (home.folder / MANIFEST_FILE).unlink()
    home.clock.time += 60
    home.admissions.admit(*home.build("b"))
    assert home.manifest().serial == 1060


def test_a_new_key_signs_anew(home: Home) -> None:
    build = home.build("a")
    home.admissions.admit(*build)
    home.key = SigningKey.generate()
    home.admissions.admit(*build)
    assert home.manifest().serial == 1001


def test_a_damaged_manifest_is_told(home: Home) -> None:
    (home.folder / MANIFEST_FILE).write_text("{}")
    with pytest.raises(InfrastructureFailed, match="remove it"):
        home.admissions.signed()
    with pytest.raises(InfrastructureFailed, match="remove it"):
        home.admissions.admit(*home.build("a"))


def test_processes_that_admit_at_once_lose_nothing(home: Home) -> None:
    builds = [home.build(f"{number:02}") for number in range(12)]
    for runner, folder in builds:
        (folder / "record").write_text(runner.model_dump_json())
    admitting = [
        subprocess.Popen(
            [sys.executable, "-c", ADMIT, str(home.folder), *(str(folder) for _, folder in builds[part::2])]
        )
        for part in range(2)
    ]
    assert [process.wait(60) for process in admitting] == [0, 0]
    assert home.manifest().runners == tuple(runner for runner, _ in builds)
