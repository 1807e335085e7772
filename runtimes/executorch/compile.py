"""Compiles our runner against the libraries of ExecuTorch's wheel.

For this machine the installed package is used; for another one that machine's wheel, by zig. The libraries were
compiled with GCC's libstdc++ and load it; zig's runner has libc++ inside. So nothing of the standard library may cross
the border between them whose form differs: runner.cpp says what does cross.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nas.core.canonical import sha256_of
from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.core.progress import Log
from nas.measure.runtimes import zig
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.build_cache import Variant, run_step
from nas.measure.runtimes.executorch.variants import LIBRARIES, NAME, ExecuTorchSpec
from nas.measure.runtimes.executorch.writer import write_artifact
from nas.measure.runtimes.toolchain import fetched, find_compiler, host_target

PACKAGE = "executorch"
VERSION = "1.5.1"
"""The version that pyproject.toml pins."""
_COMPILE_S = 600.0
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-Wall", "-Wextra")
_GLIBC = "2.28"
"""The version of GNU's C library that the wheels for other machines are for."""
_CROSS_FLAGS = ("-DLIBRARIES_OF_LIBSTDCXX", "-D_LIBCPP_ABI_VARIANT_INDEX_TYPE_OPTIMIZATION", "-s")
"""Make the runner understand libraries that were compiled with libstdc++: for compilers with libc++."""
_TINY = Layout.parse("d64 v128 ffn=swiglu:64 [C3 A2/1]")


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
        c10 = include / "executorch" / "runtime" / "core" / "portable_type" / "c10"
        return ["-isystem", str(include), "-isystem", str(c10), "-DC10_USING_CUSTOM_GENERATED_MACROS"]

    @property
    def licence(self) -> Path:
        """The licence of all of it, which is copied with the libraries."""
        return self.folder.parent / f"{PACKAGE}-{self.version}.dist-info" / "licenses" / "LICENSE"

    def library(self, name: str) -> Path:
        """Returns the path of one of `LIBRARIES`."""
        return self.folder / "lib" / name

    def library_hashes(self) -> tuple[str, ...]:
        """Returns the SHA-256 of each of `LIBRARIES`."""
        return tuple(sha256_of(self.library(name)) for name in LIBRARIES)


def fetched_sdk(target: str, folder: Path, log: Log) -> Sdk:
    """Returns the SDK in another machine's wheel, unpacked below `folder`. The caller holds the build lock.

    Raises:
        InfrastructureFailed: no pip, no network, or other bytes than the pinned ones.
    """
    wheel = WHEELS[target]
    python = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
    options = ["--only-binary", ":all:", "--platform", wheel.tag, *python]
    file = fetched(PACKAGE, VERSION, wheel.file, wheel.sha256, options, wheel.megabytes, log)
    sdk = Sdk(folder / PACKAGE, VERSION)
    needed = (*(sdk.library(name) for name in LIBRARIES), sdk.licence)
    prefixes = (f"{PACKAGE}/include/", *(str(path.relative_to(folder)) for path in needed))
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(prefixes)])
    return sdk


def installed_sdk() -> Sdk:
    """Returns the SDK of the installed package, for this machine; imports nothing of it.

    Raises:
        InfrastructureFailed: it is not installed, or without its libraries.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise InfrastructureFailed("ExecuTorch is not installed here: pip install '.[executorch]' in a checkout")
    sdk = Sdk(Path(folders[0]), importlib.metadata.version(PACKAGE))
    missing = [name for name in LIBRARIES if not sdk.library(name).exists()]
    if missing:
        raise InfrastructureFailed(f"the installed ExecuTorch {sdk.version} lacks {', '.join(missing)}")
    return sdk


def build_spec(variant: Variant, runner: str) -> ExecuTorchSpec:
    """Returns the inputs of a build of a program whose sources have the SHA-256 `runner`.

    Raises:
        InfrastructureFailed: this machine's build needs ExecuTorch or a compiler, and it is missing.
    """
    flags: tuple[str, ...]
    if variant.target == host_target():
        sdk = installed_sdk()
        version, libraries = sdk.version, sdk.library_hashes()
        flags, compiler = (*_FLAGS, f"-march={variant.march}"), find_compiler().version
    else:
        version, libraries = VERSION, (WHEELS[variant.target].sha256,)
        flags = (*_FLAGS, *_CROSS_FLAGS, f"-mcpu={variant.mcpu}")
        compiler = f"{zig.COMPILER} for {_triple(variant.target)}"
    return ExecuTorchSpec(
        variant=variant.name,
        target=variant.target,
        flags=flags,
        compiler=compiler,
        runner=runner,
        version=version,
        library_hashes=libraries,
    )


def compile_runner(spec: ExecuTorchSpec, mcpu: str, program: Path, work: Path, product: Path, log: Log) -> None:
    """Copies the libraries and compiles `program` into `product`; `mcpu` is the processor in zig's words."""
    if spec.target == host_target():
        sdk, cxx = installed_sdk(), find_compiler().cxx
    else:
        sdk = fetched_sdk(spec.target, work / "sdk", log)
        cxx = zig.zig_compiler(_triple(spec.target), mcpu, log).cxx
    for name in LIBRARIES:
        shutil.copy2(sdk.library(name), product)
    shutil.copy2(sdk.licence, product / "LICENSE.executorch")
    log("compiling the runner (about 10 seconds; for another machine a minute the first time)")
    libraries = [f"-l{name.removeprefix('lib').removesuffix('.so')}" for name in LIBRARIES]
    # Kernels and backends register themselves when they are loaded, so none may be left out as unused.
    linking = [f"-L{product}", "-Wl,--no-as-needed", *libraries, "-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined"]
    argv = [cxx, *spec.flags, *sdk.include_flags, str(program), "-o", str(product / "runner"), *linking]
    run_step(argv, NAME, cxx, _COMPILE_S)


def tiny_models(folder: Path, log: Log) -> Iterator[tuple[Path, Sequence[str]]]:
    """Yields a model, to be run with either format of the cache."""
    log("lowering the blocks of the model (half a minute the first time)")
    model = folder / "tiny"
    write_artifact(_TINY, RandomWeights(), model)
    for kv in ("f16", "f32"):
        yield model, ("--kv", kv)


def _triple(target: str) -> str:
    return f"{target}-gnu.{_GLIBC}"
