"""A C and C++ compiler for other machines: zig, as the package `ziglang` on the index carries it.

One download compiles for every device: it brings musl and libc++, so a runner is one static file that needs nothing of
the phone or board it runs on.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from nas.core import paths
from nas.core.errors import InfrastructureFailed
from nas.runtimes.llama_cpp.isa import Variant
from nas.runtimes.pip import run_pip
from nas.runtimes.toolchain import Toolchain, find_build_tools

PACKAGE, VERSION = "ziglang", "0.17.0"
HASHES = (
    "97079827064a7492cce5541ceb438ae8003ce1e54e399676da2d62fb7a5dc08b",  # Linux x86_64
    "d2804f94f54f7fcf8169f4b212a619ad688a4e2e6592e976f0cf2e58e2cd8af3",  # Linux aarch64
)
COMPILER = f"zig {VERSION}"
"""Part of a build's id."""

TRIPLES = {"aarch64-linux": "aarch64-linux-musl", "x86_64-linux": "x86_64-linux-musl"}
"""Targets of static builds -> zig's name."""


def zig_toolchain(variant: Variant, log: Callable[[str], None]) -> Toolchain:
    """Compilers for `variant`, fetched where they are not at hand. The caller holds the build lock.

    Raises:
        InfrastructureFailed: no pip, no network, cmake or ninja is missing.
    """
    zig = _ensure_zig(log)
    wrappers = zig.parent / f"for-{variant.name}"
    wrappers.mkdir(exist_ok=True)
    aim = f"-target {TRIPLES[variant.target]} -mcpu={variant.mcpu}"
    for name, command in {"cc": f"cc {aim}", "c++": f"c++ {aim}", "ar": "ar", "ranlib": "ranlib"}.items():
        _write_wrapper(wrappers / name, zig, command)
    cmake, ninja = find_build_tools()
    return Toolchain(str(wrappers / "cc"), str(wrappers / "c++"), cmake, ninja, COMPILER)


def cmake_flags(toolchain: Toolchain, target: str) -> list[str]:
    """What tells cmake that it does not compile for this machine."""
    tools = Path(toolchain.cc).parent
    return [
        "-DCMAKE_SYSTEM_NAME=Linux",
        f"-DCMAKE_SYSTEM_PROCESSOR={target.partition('-')[0]}",
        *(f"-DCMAKE_{variable}={tools / name}" for variable, name in (("AR", "ar"), ("RANLIB", "ranlib"))),
    ]


def _ensure_zig(log: Callable[[str], None]) -> Path:
    folder = paths.cache() / "tools" / f"{PACKAGE}-{VERSION}"
    zig = folder / PACKAGE / "zig"
    if zig.exists():
        return zig
    log(f"fetching {PACKAGE} {VERSION} (100 MB, about half a minute)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for dead in folder.parent.glob(f".{PACKAGE}-*"):
        shutil.rmtree(dead)
    with tempfile.TemporaryDirectory(prefix=f".{PACKAGE}-", dir=folder.parent) as fresh:
        command = ["install", "--quiet", "--only-binary", ":all:", "--target", f"{fresh}/tool"]
        run_pip(command, PACKAGE, VERSION, HASHES, Path(fresh), "it is needed to compile for another machine")
        shutil.rmtree(folder, ignore_errors=True)
        Path(fresh, "tool").rename(folder)
    if not zig.exists():
        raise InfrastructureFailed(f"{PACKAGE} {VERSION} has no compiler at {zig}")
    return zig


def _write_wrapper(path: Path, zig: Path, command: str) -> None:
    """A program of its own for each part of zig: cmake and ggml's build files take paths, not commands."""
    cache = shlex.quote(str(zig.parent / "cache"))
    exports = f"export ZIG_GLOBAL_CACHE_DIR={cache} ZIG_LOCAL_CACHE_DIR={cache}"
    path.write_text(f'#!/bin/sh\n{exports}\nexec {shlex.quote(str(zig))} {command} "$@"\n')
    path.chmod(0o755)
