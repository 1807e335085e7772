"""Builds the pinned llama.cpp and our runner, once per build id.

A build is put into place when it has passed a smoke test; `nas.runtimes.building` says how.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput, UnknownName
from nas.runtimes.building import build_once
from nas.runtimes.host import host_features, host_target
from nas.runtimes.llama_cpp import source, zig
from nas.runtimes.llama_cpp.builds import (
    TOOLS,
    Build,
    BuildDetails,
    builds_folder,
    every_build,
    load_build,
    runner_source_hash,
    write_manifest,
)
from nas.runtimes.llama_cpp.compile import Log, compile_library, compile_runner, compile_static_runner, library_flags
from nas.runtimes.llama_cpp.isa import VARIANTS, best_variant, variant_called
from nas.runtimes.llama_cpp.patches import apply_patches, patch_hashes
from nas.runtimes.llama_cpp.smoke import smoke_test
from nas.runtimes.toolchain import Toolchain, find_toolchain

_DISK_BYTES = 600 << 20


def build(
    target: str = "host",
    *,
    log: Log,
    patched: bool = False,
    variant: str | None = None,
    tools: bool = False,
    static: bool = False,
) -> Build:
    """The build for a machine, made now unless the cache has it.

    Args:
        target: "host", this machine's ABI, or another that can be compiled for here (static, by zig).
        log: gets progress, a line at a time.
        patched: with our patches, for layouts that no stock architecture holds.
        variant: instruction set to build for; `None`: the best of this machine, of another one the best in the table.
        tools: also build llama-bench and llama-quantize; for this machine only.
        static: also for this machine's ABI one file that needs nothing, for devices with an older C library or none of
            GNU's.

    Raises:
        InfrastructureFailed: compiler, cmake, network or disk space is missing, or a step failed; with the remedy.
        InvalidInput: unknown target or variant, no instruction set in the table fits, or tools for another machine.
    """
    details = _details(host_target() if target == "host" else target, patched, variant, tools, static)
    build_id = content_hash(details.model_dump(mode="json"))
    final = builds_folder() / build_id
    build_once(final, "llama.cpp", _DISK_BYTES, lambda work: _make(work, details, build_id, log), log)
    log(f"{'patched ' * patched}llama.cpp {source.COMMIT} for {details.target} ({details.variant}): {final}")
    return load_build(final)


def _details(target: str, patched: bool, variant: str | None, tools: bool, static: bool) -> BuildDetails:
    cross = target != host_target()
    static = static or cross
    if static and target not in zig.TRIPLES:
        raise UnknownName("target to build for on this machine", target, dict.fromkeys((host_target(), *zig.TRIPLES)))
    if static and tools:
        raise InvalidInput(f"llama-bench and llama-quantize are built for {host_target()} only, with shared libraries")
    if variant:
        chosen = variant_called(variant, target)
    elif cross:
        chosen = next(one for one in VARIANTS if one.target == target)
    else:
        chosen = best_variant(target, host_features())
    return BuildDetails(
        sdist=source.SHA256,
        patches=patch_hashes() if patched else (),
        runner_c=runner_source_hash(),
        variant=chosen.name,
        target=target,
        flags=library_flags(chosen, tools=tools, static=static),
        compiler=zig.COMPILER if static else find_toolchain().version,
        tools=tools,
        static=static,
    )


def _make(work: Path, details: BuildDetails, build_id: str, log: Log) -> Path:
    sdist = source.fetch(log)
    log("unpacking")
    tree = source.unpack(sdist, work / "source")
    if details.patches:
        apply_patches(tree)
    product = work / "product"
    product.mkdir()
    (_make_static if details.static else _make_shared)(tree, work, product, details, log)
    shutil.copy2(tree / "LICENSE", product / "LICENSE.llama.cpp")
    smoke_test(product / "runner", details, log)
    write_manifest(product, details, build_id)
    return product


def _make_shared(tree: Path, work: Path, product: Path, details: BuildDetails, log: Log) -> None:
    toolchain = find_toolchain()
    library = _same_but_for_runner(details) or compile_library(tree, work / "cmake", details, toolchain, (), log)
    for file in (*library.glob("*.so"), *(library / tool for tool in TOOLS if details.tools)):
        shutil.copy2(file, product)
    compile_runner(tree, product, toolchain)


def _make_static(tree: Path, work: Path, product: Path, details: BuildDetails, log: Log) -> None:
    toolchain: Toolchain = zig.zig_toolchain(variant_called(details.variant, details.target), log)
    extra = zig.cmake_flags(toolchain, details.target)
    library = compile_library(tree, work / "cmake", details, toolchain, extra, log)
    compile_static_runner(tree, library, product, toolchain)


def _same_but_for_runner(details: BuildDetails) -> Path | None:
    """A whole build that needs no new libraries: only our runner is another one."""
    for build in every_build():
        if build.details.model_copy(update={"runner_c": details.runner_c}) == details:
            return build.folder
    return None
