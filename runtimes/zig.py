"""A C and C++ compiler for other machines, without root: zig, as the package `ziglang` carries it.

It brings musl, libc++ and the symbols of every version of GNU's C library, so a program for another machine is either
one static file or links that machine's shared libraries for whichever version of the C library they need.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from pathlib import Path

from nas.core import paths
from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed
from nas.core.progress import Log
from nas.measure.runtimes.toolchain import Compiler, run_pip

PACKAGE = "ziglang"
VERSION = "0.17.0"
COMPILER = f"zig {VERSION}"
"""Part of a build's id."""

_HASHES = (
    "97079827064a7492cce5541ceb438ae8003ce1e54e399676da2d62fb7a5dc08b",  # Linux x86_64
    "d2804f94f54f7fcf8169f4b212a619ad688a4e2e6592e976f0cf2e58e2cd8af3",  # Linux aarch64
)
_LOCK_S = 1800.0


def zig_compiler(triple: str, mcpu: str, log: Log) -> Compiler:
    """Returns compilers for one kind of processor; fetches zig once.

    `triple` and `mcpu` are in zig's words, such as "aarch64-linux-gnu.2.28" and "generic+v8_2a".

    Raises:
        InfrastructureFailed: no pip or no network.
    """
    zig = _ensure_zig(log)
    programs = zig.parent / f"for-{triple}-{mcpu}"
    programs.mkdir(exist_ok=True)
    aim = f"-target {triple} -mcpu={mcpu}"
    for name, command in {"cc": f"cc {aim}", "c++": f"c++ {aim}", "ar": "ar", "ranlib": "ranlib"}.items():
        _write_program(programs / name, zig, command)
    return Compiler(str(programs / "cc"), str(programs / "c++"), COMPILER)


def zig_cmake_flags(compiler: Compiler, target: str) -> list[str]:
    """Returns cmake's options for compiling for another machine."""
    tools = Path(compiler.cc).parent
    return [
        "-DCMAKE_SYSTEM_NAME=Linux",
        f"-DCMAKE_SYSTEM_PROCESSOR={target.partition('-')[0]}",
        *(f"-DCMAKE_{variable}={tools / name}" for variable, name in (("AR", "ar"), ("RANLIB", "ranlib"))),
    ]


def _ensure_zig(log: Log) -> Path:
    folder = paths.cache() / "tools" / f"{PACKAGE}-{VERSION}"
    zig = folder / PACKAGE / "zig"
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Builds of different runtimes hold different locks.
    with locked(folder.parent / f".{PACKAGE}.lock", _LOCK_S):
        if zig.exists():
            return zig
        log(f"fetching {PACKAGE} {VERSION} (100 MB, about half a minute)")
        for dead in folder.parent.glob(f".{PACKAGE}-*"):
            shutil.rmtree(dead)
        with tempfile.TemporaryDirectory(prefix=f".{PACKAGE}-", dir=folder.parent) as fresh:
            command = ["install", "--quiet", "--only-binary", ":all:", "--target", f"{fresh}/tool"]
            run_pip(command, PACKAGE, VERSION, _HASHES, Path(fresh), "it is needed to compile for another machine")
            shutil.rmtree(folder, ignore_errors=True)
            Path(fresh, "tool").rename(folder)
    if not zig.exists():
        raise InfrastructureFailed(f"{PACKAGE} {VERSION} has no compiler at {zig}")
    return zig


def _write_program(path: Path, zig: Path, command: str) -> None:
    """Writes a program for one part of zig: cmake and ggml's build files take paths, not commands."""
    cache = shlex.quote(str(zig.parent / "cache"))
    exports = f"export ZIG_GLOBAL_CACHE_DIR={cache} ZIG_LOCAL_CACHE_DIR={cache}"
    content = f'#!/bin/sh\n{exports}\nexec {shlex.quote(str(zig))} {command} "$@"\n'
    if path.exists() and path.read_text(encoding="utf-8") == content:
        return  # another build may be running it
    partial = path.with_suffix(".partial")
    partial.write_text(content, encoding="utf-8")
    partial.chmod(0o755)
    partial.replace(path)
