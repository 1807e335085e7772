"""Builds the pinned llama.cpp and our runner, once per build id.

A build is made in a temporary folder beside its final one and renamed into place when it has passed a smoke test, so a
build is there whole or not at all, whenever the process dies.
"""

from __future__ import annotations

import errno
import fcntl
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nas.core.canonical import content_hash
from nas.core.errors import InfrastructureFailed
from nas.runtimes.llama_cpp import source
from nas.runtimes.llama_cpp.builds import (
    RUNNER_SOURCE,
    TOOLS,
    Build,
    BuildDetails,
    builds_folder,
    every_build,
    load_build,
    runner_source_hash,
    write_manifest,
)
from nas.runtimes.llama_cpp.isa import best_variant, host_features, host_target
from nas.runtimes.llama_cpp.process import stream
from nas.runtimes.llama_cpp.smoke import smoke_test
from nas.runtimes.llama_cpp.toolchain import Toolchain, build_environment, find_toolchain

Log = Callable[[str], None]

_CONFIGURE_S, _COMPILE_S, _LOCK_S = 600.0, 7200.0, 7200.0
_DISK_BYTES = 600 << 20
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


def build(target: str = "host", *, log: Log, tools: bool = False) -> Build:
    """The build for this machine, made now unless the cache has it.

    Args:
        target: "host" or this machine's ABI.
        log: gets progress, a line at a time.
        tools: also build llama-bench and llama-quantize.

    Raises:
        InfrastructureFailed: compiler, cmake, network or disk space is missing, or a step failed; with the remedy.
        Unsupported: no instruction set in the table fits.
    """
    abi = host_target() if target == "host" else target
    if abi != host_target():
        raise InfrastructureFailed(f"this machine ({host_target()}) cannot build for {abi}: build it on such a machine")
    toolchain = find_toolchain()
    details = _details(abi, toolchain, tools)
    build_id = content_hash(details.model_dump(mode="json"))
    final = builds_folder() / build_id
    builds_folder().mkdir(parents=True, exist_ok=True)
    with _full_disk_told(), _one_builder(log):
        if not (final / "manifest.json").exists():
            _make(final, details, build_id, toolchain, log)
    log(f"llama.cpp {source.COMMIT} ({details.variant}): {final}")
    return load_build(final)


def _details(target: str, toolchain: Toolchain, tools: bool) -> BuildDetails:
    variant = best_variant(target, host_features())
    flags = (*_FLAGS, *(f"-DLLAMA_BUILD_{part}={'ON' if tools else 'OFF'}" for part in ("COMMON", "TOOLS")))
    return BuildDetails(
        sdist=source.SHA256,
        runner_c=runner_source_hash(),
        variant=variant.name,
        target=target,
        flags=(*flags, *variant.cmake_flags()),
        compiler=toolchain.version,
        tools=tools,
    )


def _make(final: Path, details: BuildDetails, build_id: str, toolchain: Toolchain, log: Log) -> None:
    for dead in builds_folder().glob(".building-*"):  # we hold the lock: whoever made these was killed
        shutil.rmtree(dead)
    _need_disk(builds_folder())
    sdist = source.fetch(log)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=builds_folder()) as folder:
        work = Path(folder)
        log("unpacking")
        tree = source.unpack(sdist, work / "source")
        product = work / "product"
        product.mkdir()
        sibling = _same_but_for_runner(details)
        if sibling is None:
            _compile_library(tree, work / "cmake", details, toolchain, log)
        library = sibling or work / "cmake" / "bin"
        for file in (*library.glob("*.so"), *(library / tool for tool in TOOLS if details.tools)):
            shutil.copy2(file, product)
        shutil.copy2(tree / "LICENSE", product / "LICENSE.llama.cpp")
        _compile_runner(tree, product, toolchain)
        log("smoke test: a tiny random model")
        smoke_test(product / "runner")
        write_manifest(product, details, build_id)
        shutil.rmtree(final, ignore_errors=True)
        product.rename(final)


def _same_but_for_runner(details: BuildDetails) -> Path | None:
    """A whole build that needs no new libraries: only our runner is another one."""
    for build in every_build():
        if build.details.model_copy(update={"runner_c": details.runner_c}) == details:
            return build.folder
    return None


def _compile_library(tree: Path, out: Path, details: BuildDetails, toolchain: Toolchain, log: Log) -> None:
    # Without the prefix map __FILE__ would carry the temporary folder's name into the libraries.
    prefix_map = f"-ffile-prefix-map={tree}=llama.cpp"
    configure = [
        *(toolchain.cmake, "-G", "Ninja", "-S", str(tree), "-B", str(out)),
        *(f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja}", f"-DCMAKE_C_COMPILER={toolchain.cc}"),
        *(f"-DCMAKE_CXX_COMPILER={toolchain.cxx}", f"-DCMAKE_C_FLAGS={prefix_map}", f"-DCMAKE_CXX_FLAGS={prefix_map}"),
        *details.flags,
    ]
    log("configuring (about 10 seconds)")
    _step(configure, "cmake", _CONFIGURE_S)
    targets = ("llama", *(TOOLS if details.tools else ()))
    _step([toolchain.ninja, "-C", str(out), *targets], "the compiler", _COMPILE_S, _progress(log))


def _compile_runner(tree: Path, product: Path, toolchain: Toolchain) -> None:
    """The project's one compile command for the runner; the same line, by another compiler, makes it for phones."""
    includes = [f"-I{tree / 'include'}", f"-I{tree / 'ggml' / 'include'}"]
    libraries = [f"-L{product}", "-lllama", "-lggml", "-lggml-base", "-lm"]
    found_at = ["-Wl,-rpath,$ORIGIN", f"-Wl,-rpath-link,{product}"]
    output = ["-o", str(product / "runner"), str(RUNNER_SOURCE)]
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra"]
    _step([toolchain.cc, *flags, *includes, *output, *libraries, *found_at], toolchain.cc, 300.0)


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


def _need_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _DISK_BYTES:
        raise OSError(errno.ENOSPC, f"{free >> 20} MB free, a build needs {_DISK_BYTES >> 20}")


@contextmanager
def _full_disk_told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise InfrastructureFailed(
            f"building llama.cpp: the disk of {builds_folder()} is full ({error.strerror}); free space or set NAS_CACHE"
        ) from error


@contextmanager
def _one_builder(log: Log) -> Iterator[None]:
    """Holds the build lock; the kernel drops it when its holder dies."""
    deadline, told = time.monotonic() + _LOCK_S, False
    with (builds_folder() / ".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InfrastructureFailed(f"another process never stops building in {builds_folder()}") from None
                if not told:
                    log("another process is building llama.cpp: waiting for it")
                told = True
                time.sleep(0.5)
        yield
