"""Fetching pinned packages with the user's own pip, which knows their proxies and indexes."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from nas.core.errors import InfrastructureFailed
from nas.runtimes.process import stream

_DEADLINE_S = 1800.0


def run_pip(
    command: Sequence[str], package: str, version: str, hashes: Sequence[str], folder: Path, remedy: str
) -> None:
    """Runs `pip COMMAND` on one package at one version.

    Args:
        command: "download" or "install" and options that say where to.
        package: its name.
        version: the only one wanted.
        hashes: SHA-256 of the files that are accepted. pip refuses other bytes before it runs any code of them.
        folder: holds the requirement while pip runs.
        remedy: what helps where pip cannot.

    Raises:
        InfrastructureFailed: no pip, no network, or other bytes than the pinned ones.
    """
    pin = folder / "requirements.txt"
    pin.write_text(f"{package}=={version} {' '.join(f'--hash=sha256:{sha256}' for sha256 in hashes)}\n")
    argv = [*_pip(f"{package} {version}", remedy), *command, "--no-deps", "--require-hashes", "--progress-bar", "off"]
    code, tail = stream([*argv, "-r", str(pin)], deadline_s=_DEADLINE_S, env=dict(os.environ))
    pin.unlink()
    if code != 0:
        raise InfrastructureFailed(f"pip could not fetch {package} {version} (exit code {code}); {remedy}\n{tail}")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip(what: str, remedy: str) -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise InfrastructureFailed(f"no pip to fetch {what} with: run `{sys.executable} -m ensurepip`; {remedy}")
