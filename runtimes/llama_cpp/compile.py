"""The compile commands of a build: llama.cpp's libraries by cmake, our runner by one line."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nas.core.errors import InfrastructureFailed
from nas.runtimes.llama_cpp import source
from nas.runtimes.llama_cpp.builds import RUNNER_SOURCE, TOOLS, BuildDetails
from nas.runtimes.llama_cpp.isa import Variant
from nas.runtimes.process import stream
from nas.runtimes.toolchain import Toolchain, build_environment

Log = Callable[[str], None]

_CONFIGURE_S, _COMPILE_S, _RUNNER_S = 600.0, 7200.0, 300.0
_STEP = re.compile(r"\[(\d+)/(\d+)\]")

_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    # Plain names, so that a runner is five files without links, and libraries found beside it.
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
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "SERVER", "APP", "UI", "MTMD")),
)
_STATIC = ("libllama.a", "libggml.a", "libggml-cpu.a", "libggml-base.a")
"""In the order in which they need each other."""


def library_flags(variant: Variant, *, tools: bool, static: bool) -> tuple[str, ...]:
    """What cmake is told, apart from paths; part of the build id."""
    parts = (f"-DLLAMA_BUILD_{part}={'ON' if tools else 'OFF'}" for part in ("COMMON", "TOOLS"))
    linking = ("-DBUILD_SHARED_LIBS=OFF",) if static else ()
    return (*_FLAGS, *parts, *linking, *variant.cmake_flags(cross=static))


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
    # Without the prefix map __FILE__ would carry the temporary folder's name into the libraries.
    prefix_map = f"-ffile-prefix-map={tree}=llama.cpp"
    configure = [
        *(toolchain.cmake, "-G", "Ninja", "-S", str(tree), "-B", str(out)),
        *(f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja}", f"-DCMAKE_C_COMPILER={toolchain.cc}"),
        *(f"-DCMAKE_CXX_COMPILER={toolchain.cxx}", f"-DCMAKE_C_FLAGS={prefix_map}", f"-DCMAKE_CXX_FLAGS={prefix_map}"),
        *(*details.flags, f"-DCMAKE_ARCHIVE_OUTPUT_DIRECTORY={out / 'bin'}", *extra),
    ]
    log("configuring (about 10 seconds)")
    _step(configure, "cmake", _CONFIGURE_S)
    targets = ("llama", *(TOOLS if details.tools else ()))
    _step([toolchain.ninja, "-C", str(out), *targets], "the compiler", _COMPILE_S, _progress(log))
    return out / "bin"


def compile_runner(tree: Path, product: Path, toolchain: Toolchain) -> None:
    """Compiles the runner beside the shared libraries in `product`, where it will look for them."""
    libraries = [f"-L{product}", "-lllama", "-lggml", "-lggml-cpu", "-lggml-base", "-lm"]
    found_at = ["-Wl,-rpath,$ORIGIN", f"-Wl,-rpath-link,{product}"]
    output = ["-o", str(product / "runner"), str(RUNNER_SOURCE)]
    _step([toolchain.cc, *_runner_flags(tree), *output, *libraries, *found_at], toolchain.cc, _RUNNER_S)


def compile_static_runner(tree: Path, library: Path, product: Path, toolchain: Toolchain) -> None:
    """Compiles the runner with everything in it, C++ runtime and libc included, into `product`."""
    compiled = library / "runner.o"
    _step([toolchain.cc, *_runner_flags(tree), "-c", "-o", str(compiled), str(RUNNER_SOURCE)], toolchain.cc, _RUNNER_S)
    archives = [str(library / name) for name in _STATIC]
    output = ["-static", "-s", "-o", str(product / "runner")]
    _step([toolchain.cxx, *output, str(compiled), *archives], toolchain.cxx, _RUNNER_S)


def _runner_flags(tree: Path) -> list[str]:
    includes = [f"-I{tree / 'include'}", f"-I{tree / 'ggml' / 'include'}"]
    return ["-std=c11", "-O2", "-Wall", "-Wextra", *includes]


def _step(argv: list[str], what: str, deadline_s: float, on_line: Callable[[str], None] = lambda line: None) -> None:
    code, tail = stream(argv, deadline_s=deadline_s, env=build_environment(), on_line=on_line)
    if "No space left on device" in tail:
        raise OSError(errno.ENOSPC, "No space left on device")
    if code != 0:
        raise InfrastructureFailed(f"building llama.cpp: {what} failed (exit code {code})\n{tail}")


def _progress(log: Log) -> Callable[[str], None]:
    """Turns ninja's '[12/78]' into a line for every tenth of the way, with the time that is left."""
    begun, told = time.monotonic(), 0

    def on_line(line: str) -> None:
        nonlocal told
        match = _STEP.match(line)
        if match is None:
            return
        done, total = int(match[1]), int(match[2])
        if done * 10 // total > told:
            told = done * 10 // total
            left = (time.monotonic() - begun) * (total - done) / done
            log(f"compiling: {done} of {total}, about {left:.0f} s left")

    return on_line
