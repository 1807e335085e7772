"""Runs tests with the package in tests/plugin_package installed by pip, in a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import setup_venv

PACKAGE = Path(__file__).with_name("plugin_package")


def run_with_plugin(tests: str, folder: Path, timeout_s: float, package: Path = PACKAGE) -> None:
    """Runs the file `tests` of a package that is installed for it.

    The package is built from a copy of its folder, and what is imported is what was installed, not the folder.

    Args:
        tests: file in `package`.
        folder: empty; for the copy and the installed package.
        timeout_s: of the tests.
        package: folder of a package.

    Raises:
        AssertionError: the package could not be installed, or a test failed; with the output.
    """
    source, site = folder / "source", folder / "site"
    shutil.copytree(package, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    install = [setup_venv.ensure_uv(), "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation"]
    _run([*install, "--python", sys.executable, "--target", str(site), str(source)], dict(os.environ), timeout_s)
    # Options for the outer run (CI's reruns and its skip plugin) are not for this one, which has its own.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(site)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(package / tests)]
    options = ["-o", "addopts=-p no:schemathesis", "--timeout", str(int(timeout_s))]
    # Importing test files as modules keeps their folder, where the package lies too, out of the import path.
    _run([*argv, *options, "--import-mode=importlib"], environment, timeout_s)


def _run(argv: list[str], environment: dict[str, str], timeout_s: float) -> None:
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
