"""ExecuTorch's C++ libraries and headers, as its wheel carries them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from nas.core.errors import InfrastructureFailed

PACKAGE = "executorch"
LIBRARIES = (
    "libexecutorch.so",
    "libexecutorch_kernels_optimized.so",
    "libexecutorch_kernels_quantized.so",
    "libexecutorch_backend_xnnpack.so",
    "libexecutorch_threadpool.so",
)
"""What a runner loads from beside it; none of them needs torch."""


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

    def library(self, name: str) -> Path:
        """Path of one of `LIBRARIES`."""
        return self.folder / "lib" / name

    def library_hashes(self) -> tuple[str, ...]:
        """SHA-256 of each of `LIBRARIES`."""
        return tuple(hashlib.sha256(self.library(name).read_bytes()).hexdigest() for name in LIBRARIES)


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
