"""Compiles our runner against the libraries of ExecuTorch's wheel, once per build id."""

from __future__ import annotations

import errno
import shutil
import tempfile
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
    builds_folder,
    load_build,
    runner_source_hash,
    variant_for,
    write_manifest,
)
from nas.runtimes.executorch.sdk import LIBRARIES, Sdk, installed_sdk
from nas.runtimes.executorch.writer import write_artifact
from nas.runtimes.host import host_features, host_target
from nas.runtimes.process import stream
from nas.runtimes.toolchain import build_environment, find_compiler

_DISK_BYTES = 100 << 20
_COMPILE_S, _SMOKE_S = 600.0, 120.0
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-Wall", "-Wextra")
_TINY = Layout.parse("d64 v128 ffn=swiglu:64 [C3 A2/1]")


def build(
    target: str = "host", *, log: Log, patched: bool = False, variant: str | None = None, tools: bool = False
) -> Build:
    """The runner for a machine, made now unless the cache has it.

    Args:
        target: "host" or this machine's ABI.
        log: gets progress, a line at a time.
        patched: there is no such build.
        variant: instruction set of our own kernels; `None`: the best of this machine.
        tools: there are none.

    Raises:
        InfrastructureFailed: ExecuTorch or a compiler is missing, or a step failed; with the remedy.
        InvalidInput: unknown target or variant, or a build that does not exist.
    """
    if patched or tools:
        raise InvalidInput("ExecuTorch has one build: its own libraries and our runner")
    if target not in ("host", host_target()):
        raise UnknownName("target to build for on this machine", target, (host_target(),))
    sdk, compiler = installed_sdk(), find_compiler()
    chosen = variant_for(host_target(), host_features(), variant)
    details = BuildDetails(
        executorch=sdk.version,
        libraries=sdk.library_hashes(),
        runner=runner_source_hash(),
        variant=chosen.name,
        target=chosen.target,
        flags=(*_FLAGS, f"-march={chosen.march}"),
        compiler=compiler.version,
    )
    build_id = content_hash(details.model_dump(mode="json"))
    final = builds_folder() / build_id
    build_once(
        final,
        "the ExecuTorch runner",
        _DISK_BYTES,
        lambda work: _make(work, sdk, compiler.cxx, details, build_id, log),
        log,
    )
    log(f"ExecuTorch {sdk.version} for {details.target} ({details.variant}): {final}")
    return load_build(final)


def _make(work: Path, sdk: Sdk, cxx: str, details: BuildDetails, build_id: str, log: Log) -> Path:
    product = work / "product"
    product.mkdir()
    for name in LIBRARIES:
        shutil.copy2(sdk.library(name), product)
    log("compiling the runner (about 10 seconds)")
    _compile(sdk, cxx, details, product)
    log("smoke test: a tiny random model (lowering its blocks takes half a minute the first time)")
    _smoke_test(product / "runner")
    write_manifest(product, details, build_id)
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


def _smoke_test(runner: Path) -> None:
    """In a process of its own: a build for the wrong instruction set dies by a signal."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        write_artifact(_TINY, RandomWeights(), model)
        for kv in ("f16", "f32"):
            argv = [str(runner), "--model", str(model), "--prompt", "32", "--gen", "4", "--kv", kv]
            code, tail = stream(argv, deadline_s=_SMOKE_S, env=build_environment())
            if code != 0 or '"finite":true' not in tail:
                raise InfrastructureFailed(
                    f"the fresh build of {NAME} does not work on this machine (exit code {code}):\n{tail}"
                )
