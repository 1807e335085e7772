"""Builds the pinned llama.cpp and our runner, once per build id: libraries by cmake, our runner by one line.

A fresh build is put into place when it has decoded a tiny random model; `nas.measure.runtimes.build_cache` says how.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.core.plan import Runner
from nas.measure.runtimes import zig
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.build_cache import Log, build_once, run_step, smoke_test, variant_named
from nas.measure.runtimes.llama_cpp import source
from nas.measure.runtimes.llama_cpp.patches import apply_patches, patch_hashes
from nas.measure.runtimes.llama_cpp.variants import (
    BUILDS,
    PROFILER_SOURCE,
    PROFILERS,
    RUNNER_FLAGS,
    RUNNER_SOURCE,
    TOOLS,
    TOOLS_SOURCE,
    VARIANTS,
    Build,
    BuildDetails,
    Variant,
    best_variant,
    recorded_runner_flags,
    tools_hash,
)
from nas.measure.runtimes.llama_cpp.writer import write_gguf
from nas.measure.runtimes.toolchain import Toolchain, find_build_tools, find_toolchain, host_features, host_target

_WHAT = "llama.cpp"
_TINY = Layout.parse("d256 v512 ffn=swiglu:512 [C3 A4/2]")
_PATCHED_TINY = Layout.parse("d256 v512 ffn=swiglu:512 [C3 M16 A4/2]")
_CONFIGURE_S, _COMPILE_S, _RUNNER_S = 600.0, 7200.0, 300.0
_STEP = re.compile(r"\[(\d+)/(\d+)\]")

_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    # Plain names, so that a runner is five files without links, and libraries found in its folder.
    "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
    "-DGGML_NATIVE=OFF",
    "-DGGML_OPENMP=OFF",
    "-DGGML_CPU_REPACK=ON",
    "-DGGML_LLAMAFILE=ON",
    "-DGGML_BACKEND_DL=OFF",
    "-DGGML_CCACHE=OFF",
    "-DGIT_EXE=GIT_EXE-NOTFOUND",
    "-DLLAMA_BUILD_NUMBER=0",
    f"-DLLAMA_BUILD_COMMIT={source.COMMIT}",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "SERVER", "APP", "UI", "MTMD", "COMMON", "TOOLS")),
)
_STATIC = ("libllama.a", "libggml.a", "libggml-cpu.a", "libggml-base.a")
"""In the order in which they need each other."""
_TRIPLES = {"aarch64-linux": "aarch64-linux-musl", "x86_64-linux": "x86_64-linux-musl"}
"""Targets of static builds -> zig's name."""
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
    """Returns the build for a machine, and makes it unless the cache has it.

    Args:
        target: "host", this machine's ABI, or another that can be compiled for here (static, by zig).
        log: gets progress, a line at a time.
        patched: with our patches, for layouts that no stock architecture holds.
        variant: instruction set to build for; `None`: the best of this machine, of another one the best in the table.
        tools: also build llama.cpp's own programs; for this machine only.
        static: also for this machine's ABI one file that needs nothing, for devices with an older C library or none of
            GNU's.

    Raises:
        InfrastructureFailed: compiler, cmake, network or disk space is missing, or a step failed; with the remedy.
        InvalidInput: unknown target or variant, no instruction set in the table fits, or tools for another machine.
    """
    details = _details(host_target() if target == "host" else target, patched, variant, tools, static)
    if tools:
        build(target, log=log, patched=patched, variant=variant)
    final = _folder(details)
    build_once(final, _WHAT, _DISK_BYTES, lambda work: _make(work, details, final.name, log), log)
    log(f"{'patched ' * patched}llama.cpp {source.COMMIT} for {details.target} ({details.variant}): {final}")
    return BUILDS.load(final)


def build_profiler(runner: Runner, log: Log) -> Build:
    """Returns the profiler for the build that `runner` measures with, and makes it unless the cache has it.

    A shared build's libraries are copied, which takes seconds; a static build is compiled again, which takes minutes.

    Args:
        runner: of a build in the cache.
        log: gets progress, a line at a time.

    Raises:
        InfrastructureFailed: the build is gone, a compiler, network or disk space is missing, or a step failed.
    """
    measuring = BUILDS.load(BUILDS.folder / runner.build).details
    details = measuring.model_copy(update={"runner_c": PROFILERS.runner_hash(), "tools": False, "tools_cmake": None})
    final = _folder(details)
    build_once(final, "llama.cpp's profiler", _DISK_BYTES, lambda work: _make(work, details, final.name, log), log)
    return PROFILERS.load(final)


def _folder(details: BuildDetails) -> Path:
    return BUILDS.folder / content_hash(details.model_dump(mode="json"))


def _details(target: str, patched: bool, variant: str | None, tools: bool, static: bool) -> BuildDetails:
    cross = target != host_target()
    static = static or cross
    if static and target not in _TRIPLES:
        raise UnknownName("target to build for on this machine", target, dict.fromkeys((host_target(), *_TRIPLES)))
    if static and tools:
        raise InvalidInput(f"{', '.join(TOOLS)} are built for {host_target()} only, with shared libraries")
    if variant:
        chosen = variant_named(variant, target, VARIANTS)
    elif cross:
        chosen = next(one for one in VARIANTS if one.target == target)
    else:
        chosen = best_variant(target, host_features())
    return BuildDetails(
        sdist=source.SHA256,
        patches=patch_hashes() if patched else (),
        runner_c=BUILDS.runner_hash(),
        variant=chosen.name,
        target=target,
        flags=library_flags(chosen, static=static),
        compiler=zig.COMPILER if static else find_toolchain().version,
        tools=tools,
        tools_cmake=tools_hash() if tools else None,
        static=static,
        runner_flags=recorded_runner_flags(static=static),
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
    smoke_test(product / "runner", details.target, _WHAT, partial(_tiny_models, details), log)
    BUILDS.describe(product, details, build_id)
    return product


def _make_shared(tree: Path, work: Path, product: Path, details: BuildDetails, log: Log) -> None:
    toolchain, out, same = find_toolchain(), work / "cmake", _same_but_for_runner(details)
    if same is not None:
        library = tools = same
    elif details.tools:
        library = _folder(details.model_copy(update={"tools": False, "tools_cmake": None}))
        tools = compile_tools(tree, out, library, toolchain, log)
    else:
        library = tools = compile_library(tree, out, details, toolchain, (), log)
    for file in (*library.glob("*.so"), *(tools / tool for tool in TOOLS if details.tools)):
        shutil.copy2(file, product)
    compile_runner(tree, product, toolchain, _code(details))


def _make_static(tree: Path, work: Path, product: Path, details: BuildDetails, log: Log) -> None:
    chosen = variant_named(details.variant, details.target, VARIANTS)
    compiler = zig.zig_compiler(_TRIPLES[details.target], chosen.mcpu, log)
    toolchain = Toolchain(compiler.cc, compiler.cxx, *find_build_tools(), compiler.version)
    extra = zig.zig_cmake_flags(compiler, details.target)
    library = compile_library(tree, work / "cmake", details, toolchain, extra, log)
    compile_static_runner(tree, library, product, toolchain, _code(details))


def _code(details: BuildDetails) -> Path:
    return PROFILER_SOURCE if details.runner_c == PROFILERS.runner_hash() else RUNNER_SOURCE


def _same_but_for_runner(details: BuildDetails) -> Path | None:
    """Returns the folder of a build that differs only in our runner, so its libraries can be copied."""
    same = {"runner_c": details.runner_c, "runner_flags": details.runner_flags}
    for build in BUILDS.every():
        if build.details.model_copy(update=same) == details:
            return build.folder
    return None


def library_flags(variant: Variant, *, static: bool) -> tuple[str, ...]:
    """Returns the options of cmake, apart from paths; part of the build id."""
    linking = ("-DBUILD_SHARED_LIBS=OFF",) if static else ()
    return (*_FLAGS, *linking, *variant.cmake_flags(cross=static))


def compile_library(
    tree: Path, out: Path, details: BuildDetails, toolchain: Toolchain, extra: Sequence[str], log: Log
) -> Path:
    """Compiles the source in `tree`.

    Args:
        tree: root of llama.cpp.
        out: cmake's build folder.
        details: the flags.
        toolchain: the compilers.
        extra: more for cmake that is no part of the build id.
        log: gets progress.

    Returns:
        The folder that holds libraries and tools.

    Raises:
        InfrastructureFailed: a step failed; with the compiler's words.
    """
    options = [*details.flags, f"-DCMAKE_ARCHIVE_OUTPUT_DIRECTORY={out / 'bin'}", *extra]
    _compile(tree, tree, out, options, ("llama",), toolchain, log)
    return out / "bin"


def compile_tools(tree: Path, out: Path, libraries: Path, toolchain: Toolchain, log: Log) -> Path:
    """Compiles `TOOLS` from the source in `tree` for the shared libraries in `libraries`; returns their folder.

    Raises:
        InfrastructureFailed: a step failed; with the compiler's words.
    """
    options = [
        *(f"-DLLAMA_TREE={tree}", f"-DLLAMA_LIBRARIES={libraries}", f"-DLLAMA_BUILD_COMMIT={source.COMMIT}"),
        f"-DCMAKE_RUNTIME_OUTPUT_DIRECTORY={out / 'bin'}",
    ]
    _compile(TOOLS_SOURCE, tree, out, options, TOOLS, toolchain, log)
    return out / "bin"


def _compile(
    project: Path, tree: Path, out: Path, options: Sequence[str], targets: Sequence[str], toolchain: Toolchain, log: Log
) -> None:
    # Without the prefix map __FILE__ would carry the temporary folder's name into the libraries.
    prefix_map = f"-ffile-prefix-map={tree}=llama.cpp"
    configure = [
        *(toolchain.cmake, "-G", "Ninja", "-S", str(project), "-B", str(out)),
        *(f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja}", f"-DCMAKE_C_COMPILER={toolchain.cc}"),
        *(f"-DCMAKE_CXX_COMPILER={toolchain.cxx}", f"-DCMAKE_C_FLAGS={prefix_map}", f"-DCMAKE_CXX_FLAGS={prefix_map}"),
        *options,
    ]
    log("configuring (about 10 seconds)")
    run_step(configure, _WHAT, "cmake", _CONFIGURE_S)
    run_step([toolchain.ninja, "-C", str(out), *targets], _WHAT, "the compiler", _COMPILE_S, _progress(log))


def compile_runner(tree: Path, product: Path, toolchain: Toolchain, code: Path = RUNNER_SOURCE) -> None:
    """Compiles the runner into the folder of the shared libraries in `product`, where it will look for them."""
    compiling, linking = RUNNER_FLAGS[False]
    output = ["-o", str(product / "runner"), str(code)]
    found_at = [f"-L{product}", *linking, f"-Wl,-rpath-link,{product}"]
    argv = [toolchain.cc, *compiling, *_includes(tree), *output, *found_at]
    run_step(argv, _WHAT, toolchain.cc, _RUNNER_S)


def compile_static_runner(
    tree: Path, library: Path, product: Path, toolchain: Toolchain, code: Path = RUNNER_SOURCE
) -> None:
    """Compiles the runner with everything in it, C++ runtime and libc included, into `product`."""
    compiled = library / "runner.o"
    compiling, linking = RUNNER_FLAGS[True]
    argv = [toolchain.cc, *compiling, *_includes(tree), "-c", "-o", str(compiled), str(code)]
    run_step(argv, _WHAT, toolchain.cc, _RUNNER_S)
    archives = [str(library / name) for name in _STATIC]
    output = [*linking, "-o", str(product / "runner")]
    run_step([toolchain.cxx, *output, str(compiled), *archives], _WHAT, toolchain.cxx, _RUNNER_S)


def _includes(tree: Path) -> list[str]:
    return [f"-I{tree / 'include'}", f"-I{tree / 'ggml' / 'include'}"]


def _progress(log: Log) -> Callable[[str], None]:
    """Turns ninja's '[12/78]' into a line for every tenth of the way, with the time that is left."""
    begun, logged = time.monotonic(), 0

    def on_line(line: str) -> None:
        nonlocal logged
        match = _STEP.match(line)
        if match is None:
            return
        done, total = int(match[1]), int(match[2])
        if done * 10 // total > logged:
            logged = done * 10 // total
            left = (time.monotonic() - begun) * (total - done) / done
            log(f"compiling: {done} of {total}, about {left:.0f} s left")

    return on_line


def _tiny_models(details: BuildDetails, folder: Path) -> Iterator[tuple[Path, Sequence[str]]]:
    """Yields Q4_0 models, to be run with and without repacked weights."""
    model = folder / "tiny.gguf"
    for layout in (_TINY, _PATCHED_TINY) if details.patches else (_TINY,):
        write_gguf(layout, "q4_0", RandomWeights(), model)
        for repack in ("1", "0"):
            yield model, ("--repack", repack)
