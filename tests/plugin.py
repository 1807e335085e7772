"""Runs tests with the package in tests/plugin_package installed, as pip would install it, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).with_name("plugin_package")


def run_with_plugin(tests: str, site: Path, timeout_s: float) -> None:
    """Runs the file `tests` of the package; `site` is a folder for what pip would write.

    Raises:
        AssertionError: a test failed; with pytest's output.
    """
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = site / f"hilnas_plugin-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        "\n".join((f"[{group}]", *(f"{name} = {target}" for name, target in points.items())))
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    (site / "hilnas_plugin").symlink_to(PACKAGE / "hilnas_plugin")
    # Options for the outer run (CI's reruns and its skip plugin) are not for this one, which has its own.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(site)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(PACKAGE / tests)]
    options = ["-o", "addopts=-p no:schemathesis", "--timeout", str(int(timeout_s))]
    done = subprocess.run([*argv, *options], env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
