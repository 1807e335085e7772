"""The pinned source of llama.cpp.

The sdist of llama-cpp-python carries it whole, so one pin fixes the library and its Python binding.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from nas.core import paths
from nas.core.errors import InfrastructureFailed
from nas.runtimes.pip import run_pip, sha256_of

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SDIST = f"llama_cpp_python-{VERSION}.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
COMMIT = "0c1e57098"
"""llama.cpp commit that the sdist vendors (its CHANGELOG)."""

_ROOT = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
_UNUSED = ("docs/", "media/", "models/", "tests/", "benches/", "examples/", "gguf-py/", "conversion/", "tools/ui/")


def fetch(log: Callable[[str], None]) -> Path:
    """The sdist in the cache, fetched once by pip, with its hash verified. The caller holds the build lock.

    Raises:
        InfrastructureFailed: no pip, no network, or other bytes than the pinned ones.
    """
    path = paths.cache() / "downloads" / SDIST
    if path.exists():
        if sha256_of(path) == SHA256:
            return path
        log(f"{path} is damaged: fetching it again")
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    log(f"fetching {PACKAGE} {VERSION} (77 MB, about half a minute)")
    for dead in path.parent.glob(".fetching-*"):
        shutil.rmtree(dead)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=path.parent) as folder:
        command = ["download", "--no-binary", PACKAGE, "-d", folder]
        run_pip(command, PACKAGE, VERSION, [SHA256], Path(folder), f"if you have {SDIST}, put it at {path}")
        fetched = Path(folder) / SDIST
        if sha256_of(fetched) != SHA256:
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
