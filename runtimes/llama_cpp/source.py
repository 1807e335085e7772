"""The pinned source of llama.cpp.

The sdist of llama-cpp-python carries llama.cpp whole, so one pin fixes the library and its Python binding.
"""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath

from nas.core.errors import InfrastructureFailed
from nas.core.progress import Log
from nas.measure.runtimes.toolchain import fetched

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SDIST = f"llama_cpp_python-{VERSION}.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
COMMIT = "0c1e57098"
"""llama.cpp commit that the sdist vendors (its CHANGELOG)."""

_ROOT = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
# ".git" is the pointer of a submodule to a repository that is not there: git commands of a build would stop at it.
_UNUSED = (
    ".git",
    "docs/",
    "media/",
    "models/",
    "tests/",
    "benches/",
    "examples/",
    "gguf-py/",
    "conversion/",
    "tools/ui/",
)


def fetch(log: Log) -> Path:
    """Fetches the sdist into the cache once and verifies its hash; the caller holds the build lock."""
    return fetched(PACKAGE, VERSION, SDIST, SHA256, ["--no-binary", PACKAGE], 77, log)


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks what a build needs of `sdist` below `folder`; returns the root of the llama.cpp tree.

    Raises:
        InfrastructureFailed: the archive names a file outside of `folder`.
    """
    with tarfile.open(sdist) as archive:
        members = [
            member
            for member in archive
            if member.name.startswith(_ROOT) and not member.name.removeprefix(_ROOT).startswith(_UNUSED)
        ]
        if outside := [member.name for member in members if ".." in PurePosixPath(member.name).parts]:
            raise InfrastructureFailed(f"{sdist.name} names a file outside of its folder: {outside[0]}")
        # Python 3.11.2, which Debian 12 has, knows no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder, members=members)
    return folder / _ROOT
