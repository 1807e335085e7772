"""The pinned source of llama.cpp.

The sdist of llama-cpp-python carries it whole, so one pin fixes the library and its Python binding.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from nas.core import paths
from nas.core.errors import InfrastructureFailed
from nas.runtimes.llama_cpp.process import stream

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SDIST = f"llama_cpp_python-{VERSION}.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
COMMIT = "0c1e57098"
"""llama.cpp commit that the sdist vendors (its CHANGELOG)."""

_ROOT = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
_UNUSED = ("docs/", "media/", "models/", "tests/", "benches/", "examples/", "gguf-py/", "conversion/", "tools/ui/")
_DOWNLOAD_S = 1800.0


def fetch(log: Callable[[str], None]) -> Path:
    """The sdist in the cache, fetched once by pip, with its hash verified. The caller holds the build lock.

    Raises:
        InfrastructureFailed: no pip, no network, or other bytes than the pinned ones.
    """
    path = paths.cache() / "downloads" / SDIST
    if path.exists():
        if _sha256(path) == SHA256:
            return path
        log(f"{path} is damaged: fetching it again")
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    log(f"fetching {PACKAGE} {VERSION} (77 MB, about half a minute)")
    for dead in path.parent.glob(".fetching-*"):
        shutil.rmtree(dead)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=path.parent) as folder:
        fetched = _download(Path(folder), path)
        if _sha256(fetched) != SHA256:
            raise InfrastructureFailed(f"{SDIST} is not the pinned file: its SHA-256 differs from {SHA256}")
        fetched.replace(path)
    return path


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks what a build needs of `sdist` below `folder`; returns the root of the llama.cpp tree."""
    with tarfile.open(sdist) as archive:
        wanted = [
            member
            for member in archive
            if member.name.startswith(_ROOT) and not member.name.removeprefix(_ROOT).startswith(_UNUSED)
        ]
        archive.extractall(folder, members=wanted, filter="data")
    return folder / _ROOT


def _download(folder: Path, final: Path) -> Path:
    pin = folder / "requirements.txt"
    # With the hash in the requirement pip refuses other bytes before it runs any code of the package.
    pin.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n")
    argv = [*_pip(final), "download", "--no-deps", "--no-binary", PACKAGE, "--require-hashes", "--progress-bar", "off"]
    code, tail = stream([*argv, "-r", str(pin), "-d", str(folder)], deadline_s=_DOWNLOAD_S, env=dict(os.environ))
    if code != 0:
        remedy = f"if you have the file, put it at {final}"
        raise InfrastructureFailed(f"pip could not fetch {PACKAGE} {VERSION} (exit code {code}); {remedy}\n{tail}")
    return folder / SDIST


def _pip(final: Path) -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise InfrastructureFailed(
        f"no pip to fetch {PACKAGE} {VERSION} with: run `{sys.executable} -m ensurepip`, or put {SDIST} at {final}"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
