"""The cache of builds: one folder per build, named by the hash of its inputs and complete once its manifest exists.

A build is made in a temporary folder beside its final one, by one process at a time, and renamed when it is complete.
"""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from nas.core.canonical import content_hash, sha256_of
from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed
from nas.core.plan import PlanFile, Runner
from nas.core.progress import Log
from nas.measure.runtimes.toolchain import EMULATION, build_environment, emulator_of, stream

MANIFEST = "manifest.json"
"""Describes the runner's files to agents; written last."""
SPEC = "build.json"
"""The `BuildSpec` of a build."""
LOCK_S = 7200.0
_SMOKE_S = 120.0
_GLIBC_SYMBOL = re.compile(rb"\0GLIBC_2\.(\d+)(?=\0)")
_GLIBC = re.compile(r"glibc 2\.(\d+)")


@dataclass(frozen=True, slots=True)
class Variant:
    """One instruction set to build for.

    Args:
        name: shown to people, part of the build id.
        target: ABI.
        needs: CPU features, by the kernel's names in /proc/cpuinfo, without which a build would die of SIGILL.
        march: the compiler's `-march`, for builds on such a machine.
        mcpu: the processor in zig's words, for builds elsewhere.
        common: whether most machines of the target have these features: the best such variant is what is built for
            another machine unless one is named.
    """

    name: str
    target: str
    needs: frozenset[str]
    march: str = ""
    mcpu: str = ""
    common: bool = True


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What `nas runtime build` asks for.

    Args:
        target: ABI.
        patched: with our patches.
        variant: name of an instruction set; None: the best of this machine, of another one the best that
            is common.
        tools: with the library's own programs.
        static: a runner that needs no library of the device.
        images: a runner that encodes images and sounds in front of a prompt.
    """

    target: str
    patched: bool = False
    variant: str | None = None
    tools: bool = False
    static: bool = False
    images: bool = False


class BuildSpec(BaseModel):
    """All inputs of a build. A runtime adds fields of its own.

    Args:
        version: of the runtime's library.
        variant: instruction set.
        target: ABI.
        flags: of the compiler, apart from paths.
        compiler: its version.
        runner: SHA-256 of the sources of the runner or profiler.
        patches: SHA-256 of each of our patches.
        tools: SHA-256 of what the library's own programs are built by; empty: without them.
        static: whether the runner needs no library of the device, not even the C library.

    Attributes:
        libraries: names of the shared libraries that a runner loads from its own folder.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    libraries: ClassVar[tuple[str, ...]] = ()

    version: str
    variant: str
    target: str
    flags: tuple[str, ...]
    compiler: str
    runner: str
    patches: tuple[str, ...] = ()
    tools: str = ""
    static: bool = False

    @property
    def build_id(self) -> str:
        """Canonical hash of all inputs; names the folder of the build."""
        return content_hash(self.model_dump(mode="json"))

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that a device needs."""
        return ("runner",) if self.static else ("runner", *self.libraries)

    @property
    def images(self) -> bool:
        """Whether its runner encodes images and sounds in front of a prompt."""
        return False


S = TypeVar("S", bound=BuildSpec)
B = TypeVar("B")


def without_tools(spec: S) -> S:
    """Returns the spec of the same build without tools, which is made before one with them."""
    return spec.model_copy(update={"tools": ""})


@dataclass(frozen=True, slots=True)
class CachedBuild(Generic[S]):
    """A complete build.

    Args:
        folder: holds the runner, the libraries it loads and any tools.
        runner: its manifest.
        spec: its inputs.
    """

    folder: Path
    runner: Runner
    spec: S

    @property
    def variant(self) -> str:
        """Its instruction set."""
        return self.spec.variant

    @property
    def executable(self) -> Path:
        """The runner's program."""
        return self.folder / self.runner.main

    @property
    def glibc(self) -> str | None:
        """The least version of GNU's C library that it runs with; None: any C library, or none."""
        return None if self.spec.static else needed_glibc(tuple(self.folder / name for name in self.runner.files))


def write_manifest(folder: Path, runtime: str, spec: BuildSpec) -> None:
    """Writes spec and manifest of the build in `folder`; the manifest comes last and makes the build complete."""
    (folder / SPEC).write_text(spec.model_dump_json(indent=1), encoding="utf-8")
    runner = Runner(
        runtime=runtime,
        build=spec.build_id,
        target=spec.target,
        patched=bool(spec.patches),
        files={name: plan_file(folder / name) for name in spec.files},
        main="runner",
    )
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(runner.model_dump_json(indent=1, exclude={"options"}), encoding="utf-8")
    partial.replace(folder / MANIFEST)


def build_once(
    final: Path,
    name: str,
    needed_bytes: int,
    make: Callable[[Path], Path],
    log: Log,
    is_complete: Callable[[], bool],
) -> None:
    """Makes the folder `final`, named by a build's id, unless it is complete.

    `make` builds in a temporary folder and returns the product's folder in it.

    Raises:
        InfrastructureFailed: the disk is full, another process never stops building, or what `make` raises.
    """
    folder = final.parent
    folder.mkdir(parents=True, exist_ok=True)
    if is_complete():
        return

    def waiting() -> None:
        log(f"another process is building {name}: waiting for it")

    with _explain_full_disk(folder, name), locked(folder / ".lock", LOCK_S, waiting=waiting):
        if is_complete():  # made by the process that held the lock before
            return
        for abandoned in folder.glob(".building-*"):  # their makers were killed: this process holds the lock
            shutil.rmtree(abandoned, ignore_errors=True)  # programs that they started may still write
        free = shutil.disk_usage(folder).free
        if free < needed_bytes:
            raise OSError(errno.ENOSPC, f"{free >> 20} MB free, a build needs {needed_bytes >> 20}")
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as work:
            product = make(Path(work))
            shutil.rmtree(final, ignore_errors=True)
            product.rename(final)


def run_step(
    argv: Sequence[str], name: str, tool: str, deadline_s: float, on_line: Callable[[str], None] = lambda line: None
) -> None:
    """Runs one program of a build; `name` (what is built) and `tool` (the program) are for messages.

    Raises:
        InfrastructureFailed: it failed, or ran longer than `deadline_s`; the message ends with its output.
        OSError: the disk is full, which `build_once` reports.
    """
    code, tail = stream(argv, deadline_s=deadline_s, env=build_environment(), on_line=on_line)
    if "No space left on device" in tail:
        raise OSError(errno.ENOSPC, "No space left on device")
    if code != 0:
        raise InfrastructureFailed(f"building {name}: {tool} failed (exit code {code})\n{tail}")


def smoke_test(
    runner: Path, target: str, name: str, models: Callable[[Path], Iterable[tuple[Path, Sequence[str]]]], log: Log
) -> None:
    """Runs a fresh runner on tiny models, each in a process: a wrong instruction set ends in a signal.

    A runner for another machine is run by qemu if that is installed, otherwise not at all. `models` writes models to a
    folder and returns them with options of the runner.

    Raises:
        InfrastructureFailed: it died or gave no finite logits.
    """
    emulator = emulator_of(target, runner)
    if emulator is None:
        log(f"no smoke test: nothing on this machine runs programs for {target} (Debian: {EMULATION})")
        return
    log("smoke test: a tiny random model")
    with tempfile.TemporaryDirectory() as folder:
        for model, options in models(Path(folder)):
            argv = [*emulator, str(runner), "--model", str(model), "--prompt", "32", "--gen", "4", *options]
            code, tail = stream(argv, deadline_s=_SMOKE_S, env=build_environment())
            if code != 0 or '"finite":true' not in tail:
                raise InfrastructureFailed(
                    f"the fresh {name} build does not work on this machine (exit code {code}):\n{tail}"
                )


def plan_file(path: Path) -> PlanFile:
    """Returns hash and size of a file."""
    return PlanFile(sha256=sha256_of(path), size=path.stat().st_size)


@contextmanager
def _explain_full_disk(folder: Path, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise InfrastructureFailed(
            f"building {name}: the disk of {folder} is full ({error.strerror}); free space or set NAS_CACHE"
        ) from error


@lru_cache(maxsize=256)
def needed_glibc(files: tuple[Path, ...]) -> str | None:
    """Returns the newest version of GNU's C library that a file needs, such as "2.36"; None: none needs it."""
    minors = [int(minor) for path in files for minor in _GLIBC_SYMBOL.findall(path.read_bytes())]
    return f"2.{max(minors)}" if minors else None


def has_glibc(libc: str | None, needed: str | None) -> bool | None:
    """Returns whether a device's C library (`Device.libc`) is GNU's and no older than `needed`; None: unknown."""
    if needed is None:
        return True
    if libc is None:
        return None
    version = _GLIBC.fullmatch(libc)
    return version is not None and int(version[1]) >= int(needed.removeprefix("2."))


def first_that_runs(builds: Iterable[B], libc: str | None, needed: Callable[[B], str | None]) -> B | None:
    """Returns the first build that runs with this C library, otherwise the first for which that is unknown."""
    unknown: B | None = None
    for build in builds:
        runs = has_glibc(libc, needed(build))
        if runs:
            return build
        if runs is None and unknown is None:
            unknown = build
    return unknown
