"""Compiles our runner against the libraries of ExecuTorch's wheel, once per build id.

For this machine against the installed package; for another one against that machine's wheel, by zig. The libraries were
compiled with GCC's libstdc++ and load it; zig's runner has libc++ inside. So nothing of the standard library may cross
the border between them whose form differs: runner.cpp says what does cross.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nas.core.canonical import content_hash
from nas.core.errors import InfrastructureFailed, InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.core.plan import Runner
from nas.measure.runtimes import zig
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.build_cache import Log, build_once, run_step, smoke_test
from nas.measure.runtimes.executorch.variants import (
    BUILDS,
    LIBRARIES,
    NAME,
    PROFILER_SOURCE,
    PROFILERS,
    SOURCES,
    Build,
    BuildDetails,
    Variant,
    variant_for,
)
from nas.measure.runtimes.executorch.writer import write_artifact
from nas.measure.runtimes.toolchain import fetched, find_compiler, host_features, host_target, sha256_of

_DISK_BYTES = 100 << 20
_COMPILE_S = 600.0
_WHAT = "ExecuTorch runner"
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-Wall", "-Wextra")
_GLIBC = "2.28"
"""The version of GNU's C library that the wheels for other machines are for."""
_ACROSS = ("-DLIBRARIES_OF_LIBSTDCXX", "-D_LIBCPP_ABI_VARIANT_INDEX_TYPE_OPTIMIZATION", "-s")
"""Make the runner understand libraries that were compiled with libstdc++: for compilers with libc++."""
_TINY = Layout.parse("d64 v128 ffn=swiglu:64 [C3 A2/1]")
PACKAGE, VERSION = "executorch", "1.5.1"
"""The version that pyproject.toml pins."""


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
        """The licence of all of it, which is copied with the libraries."""
        return self.folder.parent / f"{PACKAGE}-{self.version}.dist-info" / "licenses" / "LICENSE"

    def library(self, name: str) -> Path:
        """Returns the path of one of `LIBRARIES`."""
        return self.folder / "lib" / name

    def library_hashes(self) -> tuple[str, ...]:
        """Returns the SHA-256 of each of `LIBRARIES`."""
        return tuple(sha256_of(self.library(name)) for name in LIBRARIES)


def fetched_sdk(target: str, folder: Path, log: Callable[[str], None]) -> Sdk:
    """Returns the SDK in another machine's wheel, unpacked below `folder`. The caller holds the build lock.

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
    """Returns the SDK of the installed package, for this machine; imports nothing of it.

    Raises:
        InfrastructureFailed: it is not installed, or without its libraries.
    """
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise InfrastructureFailed("ExecuTorch is not installed here: pip install '.[executorch]' in the checkout")
    sdk = Sdk(Path(places[0]), importlib.metadata.version(PACKAGE))
    missing = [name for name in LIBRARIES if not sdk.library(name).exists()]
    if missing:
        raise InfrastructureFailed(f"the installed ExecuTorch {sdk.version} lacks {', '.join(missing)}")
    return sdk


def build(
    target: str = "host",
    *,
    log: Log,
    patched: bool = False,
    variant: str | None = None,
    tools: bool = False,
    static: bool = False,
) -> Build:
    """Returns the runner for a machine, and makes it unless the cache has it.

    Args:
        target: "host", this machine's ABI, or another that can be compiled for here.
        log: gets progress, a line at a time.
        patched: there is no such build.
        variant: instruction set of our own kernels; `None`: the best of this machine, of another one the best in the
            table.
        tools: there are none.
        static: there is none: ExecuTorch's own libraries are shared ones.

    Raises:
        InfrastructureFailed: ExecuTorch or a compiler is missing, or a step failed; with the remedy.
        InvalidInput: unknown target or variant, or a build that does not exist.
    """
    if patched or tools or static:
        raise InvalidInput("ExecuTorch has one build: its own shared libraries and our runner")
    target = host_target() if target == "host" else target
    kit = _for_this_machine(variant) if target == host_target() else _for_another(target, variant)
    build_id = content_hash(kit.details.model_dump(mode="json"))
    final = BUILDS.folder / build_id
    build_once(final, _WHAT, _DISK_BYTES, lambda work: _make(work, kit, build_id, log), log)
    log(f"ExecuTorch {kit.details.executorch} for {target} ({kit.details.variant}): {final}")
    built = BUILDS.load(final)
    log(f"a device needs the GNU C library {built.glibc} or newer and libstdc++; all else is in that folder")
    return built


def build_profiler(runner: Runner, log: Log) -> Build:
    """Returns the profiler on the libraries that `runner` loads, and makes it unless the cache has it.

    Args:
        runner: of a build in the cache.
        log: gets progress, a line at a time.

    Raises:
        InfrastructureFailed: the build is gone or of another ExecuTorch or compiler than are installed here, or a step
            failed.
    """
    measuring = BUILDS.load(BUILDS.folder / runner.build).details
    here = measuring.target == host_target()
    kit = _for_this_machine(measuring.variant) if here else _for_another(measuring.target, measuring.variant)
    if kit.details != measuring:
        raise InfrastructureFailed(
            f"build {runner.build[:12]} was made by another compiler or of another ExecuTorch than are installed here: "
            f"run `nas runtime build {NAME}{'' if here else f' --target {measuring.target}'}`"
        )
    kit = replace(kit, details=measuring.model_copy(update={"runner": PROFILERS.runner_hash()}))
    build_id = content_hash(kit.details.model_dump(mode="json"))
    build_once(BUILDS.folder / build_id, _WHAT, _DISK_BYTES, lambda work: _make(work, kit, build_id, log), log)
    return PROFILERS.load(BUILDS.folder / build_id)


@dataclass(frozen=True, slots=True)
class _Kit:
    """The inputs of one build.

    Args:
        details: of the build.
        cxx: gives the C++ compiler, when it is needed.
        sdk: gives headers and libraries, when they are needed.
    """

    details: BuildDetails
    cxx: Callable[[Log], str]
    sdk: Callable[[Path, Log], Sdk]


def _for_this_machine(variant: str | None) -> _Kit:
    sdk, compiler = installed_sdk(), find_compiler()
    chosen = variant_for(host_target(), host_features(), variant)
    flags = (*_FLAGS, f"-march={chosen.march}")
    details = _details(chosen, sdk.version, sdk.library_hashes(), flags, compiler.version)
    return _Kit(details, lambda log: compiler.cxx, lambda work, log: sdk)


def _for_another(target: str, variant: str | None) -> _Kit:
    if target not in WHEELS:
        raise UnknownName("target to build for on this machine", target, (host_target(), *WHEELS))
    chosen = variant_for(target, None, variant)
    triple = f"{target}-gnu.{_GLIBC}"
    flags = (*_FLAGS, *_ACROSS, f"-mcpu={chosen.mcpu}")
    details = _details(chosen, VERSION, (WHEELS[target].sha256,), flags, f"{zig.COMPILER} for {triple}")
    return _Kit(details, lambda log: zig.zig_compiler(triple, chosen.mcpu, log).cxx, partial(fetched_sdk, target))


def _details(
    variant: Variant, version: str, libraries: tuple[str, ...], flags: tuple[str, ...], compiler: str
) -> BuildDetails:
    return BuildDetails(
        executorch=version,
        libraries=libraries,
        runner=BUILDS.runner_hash(),
        variant=variant.name,
        target=variant.target,
        flags=flags,
        compiler=compiler,
    )


def _make(work: Path, kit: _Kit, build_id: str, log: Log) -> Path:
    product = work / "product"
    product.mkdir()
    sdk, cxx = kit.sdk(work / "sdk", log), kit.cxx(log)
    for name in LIBRARIES:
        shutil.copy2(sdk.library(name), product)
    shutil.copy2(sdk.licence, product / "LICENSE.executorch")
    log("compiling the runner (about 10 seconds; for another machine a minute the first time)")
    _compile(sdk, cxx, kit.details, product)
    smoke_test(product / "runner", kit.details.target, _WHAT, partial(_tiny_models, log), log)
    BUILDS.describe(product, kit.details, build_id)
    return product


def _compile(sdk: Sdk, cxx: str, details: BuildDetails, product: Path) -> None:
    libraries = [f"-l{name.removeprefix('lib').removesuffix('.so')}" for name in LIBRARIES]
    # Kernels and backends register themselves when they are loaded, so none may be left out as unused.
    linking = [f"-L{product}", "-Wl,--no-as-needed", *libraries, "-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined"]
    source = str(PROFILER_SOURCE if details.runner == PROFILERS.runner_hash() else SOURCES[0])
    argv = [cxx, *details.flags, *sdk.include_flags, source, "-o", str(product / "runner"), *linking]
    run_step(argv, _WHAT, cxx, _COMPILE_S)


def _tiny_models(log: Log, folder: Path) -> Iterator[tuple[Path, Sequence[str]]]:
    log("lowering the blocks of the model (half a minute the first time)")
    model = folder / "tiny"
    write_artifact(_TINY, RandomWeights(), model)
    for kv in ("f16", "f32"):
        yield model, ("--kv", kv)
