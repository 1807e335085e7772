"""The wheel: built from the sdist, installed outside the checkout, with everything that the packages need."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", ".coverage")
DEADLINE_S = 240


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S, check=False
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
    venv = tmp_path_factory.mktemp("outside") / "venv"
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
    wanted = {
        str(Path("nas") / path.relative_to(ROOT / "nas"))
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == wanted


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
