"""Which groups of tests a machine has the tools for, what is installed, and that a test is left out only by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tools_for_tests

ROOT = Path(__file__).parents[2]
EVERY_TOOL = (*tools_for_tests.DEVICE_TOOLS, "chromium", "initdb", "nginx", "espeak-ng", "qemu-aarch64")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH, empty: a machine without any of the tools."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(tools_for_tests, "POSTGRESQL", tmp_path / "postgresql")
    monkeypatch.setattr(tools_for_tests, "ARM64", tmp_path / "libstdc++.so.6")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.delenv("CI", raising=False)
    return folder


def put(folder: Path, name: str, body: str = "exit 0") -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test_a_bare_machine_has_no_group(programs: Path) -> None:
    assert tools_for_tests.absent() == {
        "browser": "chromium",
        "postgresql": "initdb",
        "nginx": "nginx",
        "speech": "espeak-ng",
        "arm64": "qemu-aarch64, libstdc++.so.6",
        "devices": ", ".join(tools_for_tests.DEVICE_TOOLS),
    }


def test_a_whole_machine_has_all(programs: Path) -> None:
    for name in EVERY_TOOL:
        put(programs, name)
    tools_for_tests.ARM64.touch()
    assert tools_for_tests.absent() == {}
    assert tools_for_tests.main("report") == 0


def test_groups_are_apart(programs: Path) -> None:
    put(programs, "google-chrome")
    (tools_for_tests.POSTGRESQL / "15/bin").mkdir(parents=True)
    (tools_for_tests.POSTGRESQL / "15/bin/initdb").touch()
    assert set(tools_for_tests.absent()) == {"nginx", "speech", "arm64", "devices"}


def test_what_no_package_mends(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EVERY_TOOL:
        put(programs, name)
    tools_for_tests.ARM64.touch()
    put(programs, "unshare", "exit 1")
    assert tools_for_tests.absent() == {"devices": "the right to make namespaces"}
    assert tools_for_tests.remedy(tools_for_tests.absent()) == ""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert tools_for_tests.absent() == {"devices": "root"}
    assert tools_for_tests.remedy(tools_for_tests.absent()) == "run make test as root"


def test_the_report_names_one_line_that_adds_them(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*tools_for_tests.DEVICE_TOOLS, "initdb", "nginx", "espeak-ng"):
        put(programs, name)
    assert tools_for_tests.main("report") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [re.findall(r"group (\w+)", line) for line in lines] == [["browser"], ["arm64"], []]
    assert lines[-1].endswith(": apt install chromium qemu-user-static libstdc++6-arm64-cross")
    monkeypatch.setenv("CI", "true")
    assert tools_for_tests.main("report") == 1


def test_root_on_debian_installs_what_is_missing_and_says_so(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One package that apt does not have keeps nothing else away."""
    for name in (*tools_for_tests.DEVICE_TOOLS, "initdb", "nginx", "espeak-ng"):
        put(programs, name)
    calls = tmp_path / "calls"
    qemu = f": > {programs}/qemu-aarch64; : > {tools_for_tests.ARM64}"
    body = f'echo "$*" >> {calls}; case "$*" in *chromium*) exit 100;; *qemu*) {qemu};; esac'
    put(programs, "apt-get", body)
    (programs / "qemu-aarch64").touch(0o755)
    assert tools_for_tests.main("install") == 0
    assert calls.read_text().splitlines() == [
        "-qq update",
        "-qq install -y chromium",
        "-qq install -y qemu-user-static libstdc++6-arm64-cross",
    ]
    output = capsys.readouterr().err
    assert "installing chromium (apt-get), for tests that look at pages" in output
    assert "left out: those that look at pages in Chromium" in output and "arm64)" not in output


def test_others_install_nothing(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(programs, "apt-get", f"echo called > {tmp_path}/calls")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert tools_for_tests.main("install") == 0
    assert not (tmp_path / "calls").exists()


NEEDY = """
import pytest

@pytest.mark.needs("devices")
def test_reaches_a_device(): ...

def test_looks_at_a_page(browser): ...
"""


def collected(file: Path, **environment: str) -> str:
    """What pytest says that it would run of a file, by the settings and the rules of all tests."""
    rules = ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest"]
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *rules, str(file)]
    env = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS", "HILNAS_TEST_ALL")}
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / folder) for folder in (".", "scripts", "tests/unit"))
    return subprocess.run(argv, cwd=ROOT, env=env | environment, capture_output=True, text=True, check=False).stdout


def test_tests_without_their_tools_are_deselected_and_counted(tmp_path: Path) -> None:
    """By the marker, and by a fixture; in CI they are kept, to fail."""
    file = tmp_path / "test_needy.py"
    file.write_text(NEEDY)
    listed = collected(file, PATH=str(tmp_path))
    assert "::" not in listed
    assert re.search(r"^1 tests left out that reach real adbd", listed, re.MULTILINE)
    assert re.search(r"^1 tests left out that look at pages", listed, re.MULTILINE)
    listed = collected(file, PATH=str(tmp_path), CI="true")
    assert listed.count("::") == 2 and "left out that" not in listed


@pytest.mark.parametrize(
    ("used", "group"), [("from device_lab import", "devices"), (r"build\((TARGET|target), log", "arm64")]
)
def test_every_test_with_such_a_need_names_its_group(used: str, group: str) -> None:
    files = [path for path in (ROOT / "tests/integration").glob("test_*.py") if re.search(used, path.read_text())]
    unnamed = [path.name for path in files if f'needs("{group}")' not in path.read_text()]
    assert files and unnamed == []
