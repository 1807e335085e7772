"""Compiles the pinned llama.cpp and our runner: libraries by cmake, the runner by one call of the compiler."""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nas.core.layout import Layout
from nas.core.progress import Log
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.build_cache import Variant, run_step
from nas.measure.runtimes.llama_cpp import source
from nas.measure.runtimes.llama_cpp.patches import VULKAN_HEADERS, apply_diff, apply_patches
from nas.measure.runtimes.llama_cpp.variants import (
    IMAGES,
    NAME,
    TOOLS,
    TOOLS_SOURCE,
    VULKAN,
    LlamaCppSpec,
    instruction_flags,
    variant_of,
)
from nas.measure.runtimes.llama_cpp.writer import write_gguf
from nas.measure.runtimes.toolchain import Compiler, find_build_tools, find_compiler
from nas.measure.runtimes.zig import zig_cmake_flags, zig_compiler

TRIPLES = {"aarch64-linux": "aarch64-linux-musl", "x86_64-linux": "x86_64-linux-musl"}
"""Target of a static build -> zig's name."""
RUNNER_FLAGS = {
    False: (
        ("-std=c11", "-O2", "-Wall", "-Wextra"),
        ("-lllama", "-lggml", "-lggml-cpu", "-lggml-base", "-lm", "-Wl,-rpath,$ORIGIN"),
    ),
    True: (("-std=c11", "-O2", "-Wall", "-Wextra"), ("-static", "-s")),
}
"""Whether a build is static -> options of the runner's compiler and linker, apart from paths."""

_TINY = Layout.parse("d256 v512 ffn=swiglu:512 [C3 A4/2]")
_PATCHED_TINY = Layout.parse("d256 v512 ffn=swiglu:512 [C3 M16 A4/2]")
_CONFIGURE_S = 600.0
_COMPILE_S = 7200.0
_RUNNER_S = 300.0
_STEP = re.compile(r"\[(\d+)/(\d+)\]")
_LIBRARY_FLAGS = (
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
_ARCHIVES = ("libmtmd.a", "libllama.a", "libggml.a", "libggml-cpu.a", "libggml-base.a")
"""In the order in which they need each other."""


def library_flags(variant: Variant, *, static: bool, images: bool = False) -> tuple[str, ...]:
    """Returns the options of cmake, apart from paths; with `images` those of a build that reads them, and sound."""
    linking = ("-DBUILD_SHARED_LIBS=OFF",) if static else ()
    gpu = ("-DGGML_VULKAN=ON", f"-DHILNAS_HEADERS={_headers_hash()}") if VULKAN in variant.needs else ()
    seeing = (IMAGES, "-DMTMD_VIDEO=OFF") if images else ()
    return (*_LIBRARY_FLAGS, *linking, *gpu, *seeing, *instruction_flags(variant, cross=static))


def _headers_hash() -> str:
    """Returns the SHA-256 of `VULKAN_HEADERS`, which is part of a build's id as an option that cmake does not use."""
    return hashlib.sha256(VULKAN_HEADERS.read_bytes()).hexdigest()


def unpacked_source(spec: LlamaCppSpec, work: Path, log: Log) -> Path:
    """Returns the root of llama.cpp's source, unpacked below `work` and patched if the build is."""
    sdist = source.fetch(log)
    log("unpacking")
    tree = source.unpack(sdist, work / "source")
    if spec.patches:
        apply_patches(tree)
    if spec.gpu:
        apply_diff(VULKAN_HEADERS, tree)
    return tree


def compile_shared(
    spec: LlamaCppSpec, tree: Path, program: Path, work: Path, product: Path, libraries: Path | None, log: Log
) -> None:
    """Compiles libraries, tools and `program`, the runner or profiler, for this machine into `product`.

    The folder `libraries` of a build with the same libraries and tools has them to copy; None: they are compiled.
    """
    compiler, out = find_compiler(), work / "cmake"
    folders = [libraries or compile_library(tree, out, spec, compiler, (), log)]
    if spec.tools and not (folders[0] / TOOLS[0]).exists():
        folders.append(_compile_tools(tree, out, folders[0], compiler, log))
    for folder in folders:
        for name in (*spec.files[1:], *(TOOLS if spec.tools else ())):
            if (folder / name).exists():
                shutil.copy2(folder / name, product)
    compiling, linking = RUNNER_FLAGS[False]
    search = [f"-L{product}", *linking, f"-Wl,-rpath-link,{product}"]
    if not spec.images:
        argv = [compiler.cc, *compiling, *_includes(tree), "-o", str(product / "runner"), str(program), *search]
        run_step(argv, NAME, compiler.cc, _RUNNER_S)
        return
    objects = _objects(tree, work, compiler, spec, program)
    argv = [compiler.cxx, "-o", str(product / "runner"), *map(str, objects), "-lmtmd", *search]
    run_step(argv, NAME, compiler.cxx, _RUNNER_S)


def compile_static(spec: LlamaCppSpec, tree: Path, program: Path, work: Path, product: Path, log: Log) -> None:
    """Compiles `program` with all libraries in it, C library included, by zig into `product`."""
    compiler = zig_compiler(TRIPLES[spec.target], variant_of(spec).mcpu, log)
    library = compile_library(tree, work / "cmake", spec, compiler, zig_cmake_flags(compiler, spec.target), log)
    compile_static_runner(tree, library, product, compiler, spec, program)


def compile_library(
    tree: Path, out: Path, spec: LlamaCppSpec, compiler: Compiler, extra: Sequence[str], log: Log
) -> Path:
    """Compiles the source in `tree` and returns the folder of the libraries; `extra` is not in the build id."""
    options = [*spec.flags, f"-DCMAKE_ARCHIVE_OUTPUT_DIRECTORY={out / 'bin'}", *extra]
    _compile(tree, tree, out, options, ("llama", "mtmd") if spec.images else ("llama",), compiler, log)
    return out / "bin"


def compile_static_runner(
    tree: Path, library: Path, product: Path, compiler: Compiler, spec: LlamaCppSpec, program: Path
) -> None:
    """Compiles the runner with everything in it, C++ runtime and C library included, into `product`."""
    objects = _objects(tree, library, compiler, spec, program)
    archives = [str(library / name) for name in _ARCHIVES[not spec.images :]]
    argv = [compiler.cxx, *RUNNER_FLAGS[True][1], "-o", str(product / "runner"), *map(str, objects), *archives]
    run_step(argv, NAME, compiler.cxx, _RUNNER_S)


def _objects(tree: Path, folder: Path, compiler: Compiler, spec: LlamaCppSpec, program: Path) -> list[Path]:
    """Compiles `program`, and what encodes images and sounds where the build does, to object files in `folder`."""
    compiled, (compiling, _) = [folder / "runner.o"], RUNNER_FLAGS[spec.static]
    seeing = ["-DHILNAS_MEDIA", f"-I{tree / 'tools' / 'mtmd'}"] if spec.images else []
    argv = [compiler.cc, *compiling, *seeing, *_includes(tree), "-c", "-o", str(compiled[0]), str(program)]
    run_step(argv, NAME, compiler.cc, _RUNNER_S)
    if spec.images:
        compiled.append(folder / "media.o")
        flags = ["-std=c++17", *compiling[1:], "-Wno-unused-parameter"]
        argv = [compiler.cxx, *flags, *seeing, *_includes(tree), "-c", "-o", str(compiled[1])]
        run_step([*argv, str(program.with_name("media.cpp"))], NAME, compiler.cxx, _RUNNER_S)
    return compiled


def _compile_tools(tree: Path, out: Path, libraries: Path, compiler: Compiler, log: Log) -> Path:
    """Compiles `TOOLS` from the source in `tree` for the shared libraries in `libraries`; returns their folder."""
    options = [
        *(f"-DLLAMA_TREE={tree}", f"-DLLAMA_LIBRARIES={libraries}", f"-DLLAMA_BUILD_COMMIT={source.COMMIT}"),
        f"-DCMAKE_RUNTIME_OUTPUT_DIRECTORY={out / 'bin'}",
    ]
    _compile(TOOLS_SOURCE.parent, tree, out, options, TOOLS, compiler, log)
    return out / "bin"


def _compile(
    project: Path, tree: Path, out: Path, options: Sequence[str], targets: Sequence[str], compiler: Compiler, log: Log
) -> None:
    cmake, ninja = find_build_tools()
    # Without the prefix map __FILE__ would carry the temporary folder's name into the libraries.
    prefix_map = f"-ffile-prefix-map={tree}=llama.cpp"
    configure = [
        *(cmake, "-G", "Ninja", "-S", str(project), "-B", str(out)),
        *(f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DCMAKE_C_COMPILER={compiler.cc}"),
        *(f"-DCMAKE_CXX_COMPILER={compiler.cxx}", f"-DCMAKE_C_FLAGS={prefix_map}", f"-DCMAKE_CXX_FLAGS={prefix_map}"),
        *options,
    ]
    log("configuring (about 10 seconds)")
    run_step(configure, NAME, "cmake", _CONFIGURE_S)
    run_step([ninja, "-C", str(out), *targets], NAME, "the compiler", _COMPILE_S, _progress(log))


def _includes(tree: Path) -> list[str]:
    return [f"-I{tree / 'include'}", f"-I{tree / 'ggml' / 'include'}"]


def _progress(log: Log) -> Callable[[str], None]:
    """Turns ninja's '[12/78]' into a line for every tenth of the way, with the estimated remaining time."""
    start, logged = time.monotonic(), 0

    def on_line(line: str) -> None:
        nonlocal logged
        match = _STEP.match(line)
        if match is None:
            return
        done, total = int(match[1]), int(match[2])
        if done * 10 // total > logged:
            logged = done * 10 // total
            remaining = (time.monotonic() - start) * (total - done) / done
            log(f"compiling: {done} of {total}, about {remaining:.0f} s left")

    return on_line


def tiny_models(spec: LlamaCppSpec, folder: Path) -> Iterator[tuple[Path, Sequence[str]]]:
    """Yields Q4_0 models, to be run with and without repacked weights."""
    model = folder / "tiny.gguf"
    for layout in (_TINY, _PATCHED_TINY) if spec.patches and not spec.gpu else (_TINY,):
        write_gguf(layout, "q4_0", RandomWeights(), model)
        for options in [("--gpu", "1")] if spec.gpu else [("--repack", "1"), ("--repack", "0")]:
            yield model, options
