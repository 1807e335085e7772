"""Compiles our runner against the libraries of ExecuTorch's wheel, once per build id.

For another machine: against that machine's wheel, with Debian's cross compiler, whose C++ library goes along.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nas.core.canonical import content_hash
from nas.core.errors import InfrastructureFailed, InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.runtimes.base import RandomWeights
from nas.runtimes.building import Log, build_once
from nas.runtimes.executorch.builds import (
    NAME,
    SOURCES,
    Build,
    BuildDetails,
    Variant,
    builds_folder,
    load_build,
    runner_source_hash,
    variant_for,
    write_manifest,
)
from nas.runtimes.executorch.sdk import LIBRARIES, VERSION, WHEELS, Sdk, fetched_sdk, installed_sdk
from nas.runtimes.executorch.writer import write_artifact
from nas.runtimes.host import emulator_of, host_features, host_target
from nas.runtimes.pip import sha256_of
from nas.runtimes.process import stream
from nas.runtimes.toolchain import (
    Compiler,
    build_environment,
    compilers_library,
    find_compiler,
    find_cross_compiler,
)

_DISK_BYTES = 100 << 20
_COMPILE_S, _SMOKE_S = 600.0, 120.0
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-Wall", "-Wextra")
_CARRIED = ("libstdc++.so.6", "libgcc_s.so.1")
_TINY = Layout.parse("d64 v128 ffn=swiglu:64 [C3 A2/1]")


def build(
    target: str = "host",
    *,
    log: Log,
    patched: bool = False,
    variant: str | None = None,
    tools: bool = False,
    static: bool = False,
) -> Build:
    """The runner for a machine, made now unless the cache has it.

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
    final = builds_folder() / build_id
    build_once(final, "the ExecuTorch runner", _DISK_BYTES, lambda work: _make(work, kit, build_id, log), log)
    log(f"ExecuTorch {kit.details.executorch} for {target} ({kit.details.variant}): {final}")
    built = load_build(final)
    also = "" if kit.carried else ", and libstdc++"
    log(f"a device needs the GNU C library {built.glibc} or newer{also}; all else is in that folder")
    return built


@dataclass(frozen=True, slots=True)
class _Kit:
    """What one build is made with.

    Args:
        details: of the build.
        compiler: for its target.
        sdk: gives headers and libraries, when they are needed.
        carried: the compiler's libraries that go along.
    """

    details: BuildDetails
    compiler: Compiler
    sdk: Callable[[Path, Log], Sdk]
    carried: tuple[Path, ...] = ()


def _for_this_machine(variant: str | None) -> _Kit:
    sdk, compiler = installed_sdk(), find_compiler()
    chosen = variant_for(host_target(), host_features(), variant)
    return _Kit(_details(chosen, sdk.version, sdk.library_hashes(), compiler), compiler, lambda work, log: sdk)


def _for_another(target: str, variant: str | None) -> _Kit:
    if target not in WHEELS:
        raise UnknownName("target to build for on this machine", target, (host_target(), *WHEELS))
    chosen = variant_for(target, None, variant)
    compiler = find_cross_compiler(target)
    carried = tuple(compilers_library(compiler, name) for name in _CARRIED)
    hashes = (WHEELS[target].sha256, *map(sha256_of, carried))
    details = _details(chosen, VERSION, hashes, compiler, _CARRIED)
    return _Kit(details, compiler, partial(fetched_sdk, target), carried)


def _details(
    variant: Variant, version: str, libraries: tuple[str, ...], compiler: Compiler, carried: tuple[str, ...] = ()
) -> BuildDetails:
    return BuildDetails(
        executorch=version,
        libraries=libraries,
        runner=runner_source_hash(),
        variant=variant.name,
        target=variant.target,
        flags=(*_FLAGS, f"-march={variant.march}"),
        compiler=compiler.version,
        carried=carried,
    )


def _make(work: Path, kit: _Kit, build_id: str, log: Log) -> Path:
    product = work / "product"
    product.mkdir()
    sdk = kit.sdk(work / "sdk", log)
    for name in LIBRARIES:
        shutil.copy2(sdk.library(name), product)
    for name, path in zip(kit.details.carried, kit.carried, strict=True):
        shutil.copy2(path, product / name)
    shutil.copy2(sdk.licence, product / "LICENSE.executorch")
    log("compiling the runner (about 10 seconds)")
    _compile(sdk, kit.compiler.cxx, kit.details, product)
    _smoke_test(product / "runner", kit.details.target, log)
    write_manifest(product, kit.details, build_id)
    return product


def _compile(sdk: Sdk, cxx: str, details: BuildDetails, product: Path) -> None:
    libraries = [f"-l{name.removeprefix('lib').removesuffix('.so')}" for name in LIBRARIES]
    # Kernels and backends register themselves when they are loaded, so none may be left out as unused.
    linking = [f"-L{product}", "-Wl,--no-as-needed", *libraries, "-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined"]
    source = str(SOURCES[0])
    argv = [cxx, *details.flags, *sdk.include_flags, source, "-o", str(product / "runner"), *linking]
    code, tail = stream(argv, deadline_s=_COMPILE_S, env=build_environment())
    if "No space left on device" in tail:
        raise OSError(errno.ENOSPC, "No space left on device")
    if code != 0:
        raise InfrastructureFailed(f"building the ExecuTorch runner: {cxx} failed (exit code {code})\n{tail}")


def _smoke_test(runner: Path, target: str, log: Log) -> None:
    """In a process of its own: a build for the wrong instruction set dies by a signal. A foreign one where qemu can."""
    emulator = emulator_of(target)
    if emulator is None:
        log(f"no smoke test: this machine has no qemu-user for {target} (Debian: qemu-user-static)")
        return
    log("smoke test: a tiny random model (lowering its blocks takes half a minute the first time)")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        write_artifact(_TINY, RandomWeights(), model)
        for kv in ("f16", "f32"):
            argv = [*emulator, str(runner), "--model", str(model), "--prompt", "32", "--gen", "4", "--kv", kv]
            code, tail = stream(argv, deadline_s=_SMOKE_S, env=build_environment())
            if code != 0 or '"finite":true' not in tail:
                raise InfrastructureFailed(
                    f"the fresh build of {NAME} does not work on this machine (exit code {code}):\n{tail}"
                )
