"""The compilers and build tools of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from nas.core.errors import InfrastructureFailed

_KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Programs by path; `version` is the compilers' first line, part of the build id."""

    cc: str
    cxx: str
    cmake: str
    ninja: str
    version: str


@dataclass(frozen=True, slots=True)
class Compiler:
    """Compilers by path; `version` is their first lines."""

    cc: str
    cxx: str
    version: str


def find_toolchain() -> Toolchain:
    """What is needed for a build; `$CC` and `$CXX` choose other compilers.

    Raises:
        InfrastructureFailed: a program is missing; the message says how to get it.
    """
    compiler = find_compiler()
    return Toolchain(compiler.cc, compiler.cxx, *find_build_tools(), compiler.version)


def find_compiler() -> Compiler:
    """The C and C++ compilers; `$CC` and `$CXX` choose others.

    Raises:
        InfrastructureFailed: one is missing or does not work; the message says how to get it.
    """
    remedy = "install a C++17 compiler, such as the package g++ (Debian, Ubuntu) or gcc-c++ (Fedora)"
    cc = _find(*_chosen("CC", "cc", "gcc", "clang"), remedy=remedy)
    cxx = _find(*_chosen("CXX", "c++", "g++", "clang++"), remedy=remedy)
    version = "; ".join(_first_line([program, "--version"]) for program in (cc, cxx))
    return Compiler(cc, cxx, version)


def find_build_tools() -> tuple[str, str]:
    """Paths of cmake and ninja.

    Raises:
        InfrastructureFailed: one is missing.
    """
    remedy = "install hilnas[build]"
    return _find("cmake", remedy=remedy), _find("ninja", remedy=remedy)


def build_environment() -> dict[str, str]:
    """Of the caller's environment only what finds programs: a stray CFLAGS would change a build behind its id."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | {"LC_ALL": "C"}


def _chosen(variable: str, *usual: str) -> tuple[str, ...]:
    """What the environment asks for and nothing else, or the usual names."""
    return (os.environ[variable],) if os.environ.get(variable) else usual


def _find(*names: str, remedy: str) -> str:
    beside_python = Path(sys.executable).parent
    for name in names:
        found = shutil.which(name, path=str(beside_python)) or shutil.which(name)
        if found:
            return found
    raise InfrastructureFailed(f"no {' or '.join(names)} on this machine: {remedy}")


def _first_line(argv: list[str]) -> str:
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        raise InfrastructureFailed(f"{argv[0]} does not work: {error}") from error
    return result.stdout.partition("\n")[0].strip()
