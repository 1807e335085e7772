"""Downloads for builds of llama.cpp: its pinned source, and a compiler for other machines.

The sdist of llama-cpp-python carries llama.cpp whole, so one pin fixes the library and its Python binding. The compiler
is zig, as the package `ziglang` carries it: it brings musl and libc++, so a runner is one static file that needs
nothing of the phone or board it runs on.
"""

from __future__ import annotations

import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from nas.core import paths
from nas.core.errors import InfrastructureFailed
from nas.runtimes.toolchain import Toolchain, fetched, find_build_tools, run_pip

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SDIST = f"llama_cpp_python-{VERSION}.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
COMMIT = "0c1e57098"
"""llama.cpp commit that the sdist vendors (its CHANGELOG)."""

_ROOT = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
# ".git" is the pointer of a submodule to a repository that is not there: `git apply` stops at it.
_UNUSED = (
    ".git",
    "docs/",
    "media/",
    "models/",
    "tests/",
    "benches/",
    "examples/",
    "gguf-py/",
    "conversion/",
    "tools/ui/",
)


def fetch(log: Callable[[str], None]) -> Path:
    """Fetches the sdist into the cache once and verifies its hash; the caller holds the build lock.

    Raises:
        InfrastructureFailed: no pip, no network, or other bytes than the pinned ones.
    """
    return fetched(PACKAGE, VERSION, SDIST, SHA256, ["--no-binary", PACKAGE], 77, log)


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks what a build needs of `sdist` below `folder`; returns the root of the llama.cpp tree."""
    with tarfile.open(sdist) as archive:
        wanted = [
            member
            for member in archive
            if member.name.startswith(_ROOT) and not member.name.removeprefix(_ROOT).startswith(_UNUSED)
        ]
        archive.extractall(folder, members=wanted, filter="data")
    return folder / _ROOT


ZIG, ZIG_VERSION = "ziglang", "0.17.0"
_ZIG_HASHES = (
    "97079827064a7492cce5541ceb438ae8003ce1e54e399676da2d62fb7a5dc08b",  # Linux x86_64
    "d2804f94f54f7fcf8169f4b212a619ad688a4e2e6592e976f0cf2e58e2cd8af3",  # Linux aarch64
)
ZIG_COMPILER = f"zig {ZIG_VERSION}"
"""Part of a build's id."""

TRIPLES = {"aarch64-linux": "aarch64-linux-musl", "x86_64-linux": "x86_64-linux-musl"}
"""Targets of static builds -> zig's name."""


def zig_toolchain(target: str, name: str, mcpu: str, log: Callable[[str], None]) -> Toolchain:
    """Returns compilers for one instruction set, fetched where they are missing. The caller holds the build lock.

    Raises:
        InfrastructureFailed: no pip, no network, cmake or ninja is missing.
    """
    zig = _ensure_zig(log)
    wrappers = zig.parent / f"for-{name}"
    wrappers.mkdir(exist_ok=True)
    aim = f"-target {TRIPLES[target]} -mcpu={mcpu}"
    for name, command in {"cc": f"cc {aim}", "c++": f"c++ {aim}", "ar": "ar", "ranlib": "ranlib"}.items():
        _write_wrapper(wrappers / name, zig, command)
    cmake, ninja = find_build_tools()
    return Toolchain(str(wrappers / "cc"), str(wrappers / "c++"), cmake, ninja, ZIG_COMPILER)


def zig_cmake_flags(toolchain: Toolchain, target: str) -> list[str]:
    """Returns cmake's options for compiling for another machine."""
    tools = Path(toolchain.cc).parent
    return [
        "-DCMAKE_SYSTEM_NAME=Linux",
        f"-DCMAKE_SYSTEM_PROCESSOR={target.partition('-')[0]}",
        *(f"-DCMAKE_{variable}={tools / name}" for variable, name in (("AR", "ar"), ("RANLIB", "ranlib"))),
    ]


def _ensure_zig(log: Callable[[str], None]) -> Path:
    folder = paths.cache() / "tools" / f"{ZIG}-{ZIG_VERSION}"
    zig = folder / ZIG / "zig"
    if zig.exists():
        return zig
    log(f"fetching {ZIG} {ZIG_VERSION} (100 MB, about half a minute)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for dead in folder.parent.glob(f".{ZIG}-*"):
        shutil.rmtree(dead)
    with tempfile.TemporaryDirectory(prefix=f".{ZIG}-", dir=folder.parent) as fresh:
        command = ["install", "--quiet", "--only-binary", ":all:", "--target", f"{fresh}/tool"]
        run_pip(command, ZIG, ZIG_VERSION, _ZIG_HASHES, Path(fresh), "it is needed to compile for another machine")
        shutil.rmtree(folder, ignore_errors=True)
        Path(fresh, "tool").rename(folder)
    if not zig.exists():
        raise InfrastructureFailed(f"{ZIG} {ZIG_VERSION} has no compiler at {zig}")
    return zig


def _write_wrapper(path: Path, zig: Path, command: str) -> None:
    """Writes a program for one part of zig: cmake and ggml's build files take paths, not commands."""
    cache = shlex.quote(str(zig.parent / "cache"))
    exports = f"export ZIG_GLOBAL_CACHE_DIR={cache} ZIG_LOCAL_CACHE_DIR={cache}"
    path.write_text(f'#!/bin/sh\n{exports}\nexec {shlex.quote(str(zig))} {command} "$@"\n')
    path.chmod(0o755)
