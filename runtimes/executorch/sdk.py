"""ExecuTorch's C++ libraries and headers, as its wheels carry them: the installed one, or another machine's."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nas.core.errors import InfrastructureFailed
from nas.runtimes.pip import fetched

PACKAGE, VERSION = "executorch", "1.5.1"
"""The version that pyproject.toml pins."""
LIBRARIES = (
    "libexecutorch.so",
    "libexecutorch_kernels_optimized.so",
    "libexecutorch_kernels_quantized.so",
    "libexecutorch_backend_xnnpack.so",
    "libexecutorch_threadpool.so",
)
"""What a runner loads from beside it; none of them needs torch."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel for another machine.

    Args:
        tag: of the platform it is for.
        sha256: of the file.
        megabytes: its size.
    """

    tag: str
    sha256: str
    megabytes: int

    @property
    def file(self) -> str:
        """Its name; of the Python that it is for nothing is used."""
        return f"{PACKAGE}-{VERSION}-cp311-cp311-{self.tag}.whl"


WHEELS = {
    "aarch64-linux": Wheel(
        "manylinux_2_28_aarch64", "8ee02348a3ea80ddf770822911ebf78da616b73afce0fbaaa79f23311c88c66a", 18
    ),
}
"""Targets that are compiled for from elsewhere."""


@dataclass(frozen=True, slots=True)
class Sdk:
    """One unpacked wheel.

    Args:
        folder: its package folder.
        version: the package's.
    """

    folder: Path
    version: str

    @property
    def include_flags(self) -> list[str]:
        """For a compiler; the headers are not ours to warn about."""
        include = self.folder / "include"
        own_c10 = include / "executorch" / "runtime" / "core" / "portable_type" / "c10"
        return ["-isystem", str(include), "-isystem", str(own_c10), "-DC10_USING_CUSTOM_GENERATED_MACROS"]

    @property
    def licence(self) -> Path:
        """Of all of it; goes where the libraries go."""
        return self.folder.parent / f"{PACKAGE}-{self.version}.dist-info" / "licenses" / "LICENSE"

    def library(self, name: str) -> Path:
        """Path of one of `LIBRARIES`."""
        return self.folder / "lib" / name

    def library_hashes(self) -> tuple[str, ...]:
        """SHA-256 of each of `LIBRARIES`."""
        return tuple(hashlib.sha256(self.library(name).read_bytes()).hexdigest() for name in LIBRARIES)


def fetched_sdk(target: str, folder: Path, log: Callable[[str], None]) -> Sdk:
    """That of another machine's wheel, unpacked below `folder`. The caller holds the build lock.

    Raises:
        InfrastructureFailed: no pip, no network, or other bytes than the pinned ones.
    """
    wheel = WHEELS[target]
    python = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
    options = ["--only-binary", ":all:", "--platform", wheel.tag, *python]
    file = fetched(PACKAGE, VERSION, wheel.file, wheel.sha256, options, wheel.megabytes, log)
    sdk = Sdk(folder / PACKAGE, VERSION)
    named = (*(sdk.library(name) for name in LIBRARIES), sdk.licence)
    wanted = (f"{PACKAGE}/include/", *(str(path.relative_to(folder)) for path in named))
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(wanted)])
    return sdk


def installed_sdk() -> Sdk:
    """That of the installed package, for this machine; nothing of it is imported.

    Raises:
        InfrastructureFailed: it is not installed, or without its libraries.
    """
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise InfrastructureFailed("ExecuTorch is not installed here: install hilnas[executorch]")
    sdk = Sdk(Path(places[0]), importlib.metadata.version(PACKAGE))
    missing = [name for name in LIBRARIES if not sdk.library(name).exists()]
    if missing:
        raise InfrastructureFailed(f"the installed ExecuTorch {sdk.version} lacks {', '.join(missing)}")
    return sdk
