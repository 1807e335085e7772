"""The wheel: built from the sdist, installed outside the checkout, with everything that the packages need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.main import get_command

from nas.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", ".coverage")
DEADLINE_S = 240
FORKED = """
import contextlib, importlib, json, os, pkgutil, sys, tempfile
import nas.cli
from nas.cli.main import main
for module in pkgutil.iter_modules(nas.cli.__path__):
    with contextlib.suppress(ImportError):
        module.name == "__main__" or importlib.import_module(f"nas.cli.{module.name}")
for words in json.load(sys.stdin):
    with tempfile.TemporaryFile() as output:
        if not (child := os.fork()):
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
            sys.argv = ["nas", *words]
            try:
                main()
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(end.code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(json.dumps([words, code, output.read().decode()]), flush=True)
"""
"""Runs `nas` for each list of words; imports what it can once."""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def uv() -> str:
    script = "import setup_venv; print(setup_venv.ensure_uv())"
    return run(sys.executable, "-c", script, cwd=ROOT / "scripts").strip()


@pytest.fixture(scope="module")
def built(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    run(uv, "build", "--quiet", "--offline", "--no-build-isolation", "--python", sys.executable, "-o", folder, source)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("hilnas-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(uv: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel; what it depends on is lent by this one."""
    venv = tmp_path_factory.mktemp("outside") / "with a blank"
    run(uv, "venv", "--quiet", "--offline", "--python", sys.executable, venv)
    python = venv / "bin" / "python"
    run(uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python, wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # As a path only: the .pth files in it are not read, so the checkout's editable install is not seen.
    (site / "lent.pth").write_text(sysconfig.get_path("purelib"))
    return venv / "bin"


def test_sdist_is_there(built: Path) -> None:
    assert len(list(built.glob("hilnas-*.tar.gz"))) == 1


def test_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    folders = [ROOT / "nas", *(link for link in (ROOT / "nas").rglob("*") if link.is_symlink())]
    expected = {
        str(Path("nas") / path.relative_to(ROOT / "nas"))
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        members = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert members == expected


def test_wheel_carries_the_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_command_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = run(
        installed / "python", "-c", "import nas.measure.devices; print(nas.measure.devices.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert "launch" in run(installed / "nas", "--help", cwd=tmp_path)
    spaces = json.loads(run(installed / "nas", "space", "list", "--json", cwd=tmp_path))["spaces"]
    assert {"lfm2", "lfm2-demo"} <= {space["name"] for space in spaces}
    run(installed / "nas", "space", "sample", "lfm2-demo", "-n", "1", cwd=tmp_path)


@pytest.fixture(scope="module")
def plain(uv: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment, with a blank in its path, in which the wheel is installed without extras."""
    venv = tmp_path_factory.mktemp("plain") / "device host"
    run(uv, "venv", "--quiet", "--offline", "--python", sys.executable, venv)
    python = venv / "bin" / "python"
    run(uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python, wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for needed in _needed_by("hilnas", set()):
        for name in {file.parts[0] for file in needed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(needed.locate_file(name))))
    return venv / "bin"


def _needed_by(name: str, names: set[str]) -> Iterator[Distribution]:
    """What pip would install with a distribution, as installed here."""
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        if requirement.name not in names and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
            names.add(requirement.name)
            yield distribution(requirement.name)
            yield from _needed_by(requirement.name, names)


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Each command with arguments that it requires."""
    context = command.make_context("nas", [], resilient_parsing=True)
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            yield from _commands(command.get_command(context, name), (*path, name))
        return
    required = [parameter for parameter in command.params if parameter.required]
    yield (
        path,
        [word for one in required for word in ([one.opts[0]] if one.opts[0].startswith("-") else []) + ["x"]],
    )


def test_without_extras_each_command_works_or_says_what_it_needs(plain: Path, tmp_path: Path) -> None:
    commands = list(_commands(get_command(app)))
    words = [[*path, *more] for path, required in commands for more in (["--help"], required)]
    done = subprocess.run(
        [plain / "python", "-c", FORKED],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == len(words) > 100
    refused = 0
    for line, code, output in outcomes:
        if "is not installed" in output:
            assert code == 3 and output.count("\n") == 1 and "pip install '.[search]' in a checkout" in output, (
                line,
                output,
            )
            refused += 1
        else:
            assert "Traceback" not in output, (line, output)
            assert code == 0 if line[-1] == "--help" else code in (0, 1, 2, 3, 4), (line, code, output)
    assert refused > 50


def test_without_extras_the_doctor_checks_a_host_of_devices(plain: Path, tmp_path: Path) -> None:
    report = json.loads(run(plain / "nas", "doctor", "--json", cwd=tmp_path))
    checks = {check["name"]: check for check in report["checks"]}
    assert (
        checks["packages"]["status"] == "warning"
        and "pip install '.[search]' in a checkout" in checks["packages"]["fix"]
    )
    assert "llama.cpp" not in checks and "database" not in checks
    assert not [check for check in report["checks"] if check["status"] == "failure"]
