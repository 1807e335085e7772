"""Builds of runtimes: one folder per build id in the cache, whole once its manifest is there.

A build is made in a temporary folder next to its final one, by one process at a time, and renamed into place when it is
done. So it is there whole or not at all, whenever the process dies.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from nas.core import paths
from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed, UnknownName
from nas.core.plan import PlanFile, Runner
from nas.measure.runtimes.toolchain import EMULATION, build_environment, emulator_of, host_features, host_target, stream

Log = Callable[[str], None]

MANIFEST, DETAILS = "manifest.json", "build.json"
LOCK_S = 7200.0
_SMOKE_S = 120.0
_GLIBC_SYMBOL = re.compile(rb"\0GLIBC_2\.(\d+)(?=\0)")
_GLIBC = re.compile(r"glibc 2\.(\d+)")


@dataclass(frozen=True, slots=True)
class Variant:
    """One instruction set to build for; each runtime adds what its compiler needs.

    Args:
        name: shown to people, part of the build id.
        target: ABI.
        needs: CPU features, by the kernel's names in /proc/cpuinfo, without which a build would die of SIGILL.
    """

    name: str
    target: str
    needs: frozenset[str]


V = TypeVar("V", bound=Variant)


class BuildDetails(BaseModel):
    """The inputs of a build; its canonical hash is the build id.

    Args:
        variant: instruction set.
        target: ABI.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    variant: str
    target: str

    @property
    def files(self) -> tuple[str, ...]:
        """The files that a device needs."""
        return ("runner",)

    @property
    def runner_hash(self) -> str:
        """SHA-256 of the runner's sources."""
        raise NotImplementedError

    @property
    def preference(self) -> tuple[bool, ...]:
        """Orders builds of one instruction set: least first."""
        return ()

    @property
    def is_patched(self) -> bool:
        """Whether it carries our patches."""
        return False

    @property
    def needs_libc(self) -> bool:
        """Whether it loads the C library of the machine that it runs on."""
        return True


D = TypeVar("D", bound=BuildDetails)
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Build(Generic[D]):
    """A finished build.

    Args:
        folder: holds the runner, the libraries it loads and, where asked for, tools.
        runner: its manifest.
        details: what it was made from.
    """

    folder: Path
    runner: Runner
    details: D

    @property
    def variant(self) -> str:
        """Its instruction set."""
        return self.details.variant

    @property
    def executable(self) -> Path:
        """The measuring runner."""
        return self.folder / self.runner.main

    @property
    def glibc(self) -> str | None:
        """The version of GNU's C library that it needs; None: it brings its own."""
        return (
            needed_glibc(tuple(self.folder / name for name in self.runner.files)) if self.details.needs_libc else None
        )


@dataclass(frozen=True)
class BuildStore(Generic[D]):
    """The builds of one runtime.

    Args:
        runtime: its name.
        what: is built, for messages.
        below: its folder, below `runtimes` in the cache.
        details: reads build.json.
        variants: known instruction sets, best first.
        sources: of the runner.
        options: of the runner that measuring needs; the only ones that agents accept in plans.
        is_known: whether a build was made from a source of the runtime that this version of hilnas knows.
    """

    runtime: str
    what: str
    below: str
    details: type[D]
    variants: Sequence[Variant]
    sources: Sequence[Path]
    options: tuple[str, ...]
    is_known: Callable[[D], bool] = lambda details: True

    @property
    def folder(self) -> Path:
        """The folder of all builds."""
        return paths.cache() / "runtimes" / self.below

    def runner_hash(self) -> str:
        """Returns the SHA-256 of the runner's sources as they are now."""
        return hashlib.sha256(b"".join(path.read_bytes() for path in self.sources)).hexdigest()

    def every(self) -> Iterator[Build[D]]:
        """Yields every whole build, whichever runner it has."""
        for path in self.folder.glob(f"*/{MANIFEST}"):
            if (build := self._read(path.parent)) is not None:
                yield build

    def all(self) -> list[Build[D]]:
        """Returns every whole build with today's runner, best instruction set first.

        The order is fixed, so that another build of the same kind does not change what measures.
        """
        rank = {variant.name: place for place, variant in enumerate(self.variants)}
        current = [build for build in self.every() if build.details.runner_hash == self.runner_hash()]
        return sorted(current, key=lambda each: (rank[each.variant], each.details.preference, each.runner.build))

    def load(self, folder: Path) -> Build[D]:
        """Returns the build in `folder`.

        Raises:
            InfrastructureFailed: it is gone, damaged, or of another version.
        """
        if (build := self._read(folder)) is None:
            raise InfrastructureFailed(f"no whole {self.what} in {folder}: run `nas runtime build {self.runtime}`")
        return build

    def describe(self, folder: Path, details: D, build_id: str) -> None:
        """Writes the manifest of a finished build, which comes last and makes it whole."""
        (folder / DETAILS).write_text(details.model_dump_json(indent=1))
        runner = Runner(
            runtime=self.runtime,
            build=build_id,
            target=details.target,
            patched=details.is_patched,
            files={name: plan_file(folder / name) for name in details.files},
            main="runner",
        )
        partial = folder / f"{MANIFEST}.partial"
        partial.write_text(runner.model_dump_json(indent=1, exclude={"options"}))
        partial.replace(folder / MANIFEST)

    def _read(self, folder: Path) -> Build[D] | None:
        try:
            runner = Runner.model_validate_json((folder / MANIFEST).read_bytes())
            details = self.details.model_validate_json((folder / DETAILS).read_bytes())
        except (OSError, ValidationError):
            return None  # written by another version of hilnas
        known = details.variant in {variant.name for variant in self.variants} and self.is_known(details)
        whole = all(_has_size(folder / name, file.size) for name, file in runner.files.items())
        # The options are those of today's plans, whenever the build was made.
        runner = runner.model_copy(update={"options": self.options})
        return Build(folder, runner, details) if known and whole else None


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor for which a build is looked up.

    Args:
        target: ABI.
        features: by the kernel's names.
        here: whether it is this machine's, which needs no check of the C library.
        any_of_kind: whether `features` are those that every processor of the target has.
    """

    target: str
    features: frozenset[str]
    here: bool
    any_of_kind: bool

    @staticmethod
    def of(target: str | None, features: Collection[str] | None, variants: Sequence[Variant]) -> Processor:
        """Returns a processor; features default to this machine's, or to those of every processor of the target."""
        target = target or host_target()
        here = features is None and target == host_target()
        if features is None:
            features = host_features() if here else baseline(variants, target)
            return Processor(target, frozenset(features), here, not here and bool(features))
        return Processor(target, frozenset(features), here, False)

    @property
    def described(self) -> str:
        """Its ABI, and what it is taken to have where that was not given."""
        plain = f" (any, with {', '.join(sorted(self.features))})" if self.any_of_kind else ""
        return f"{self.target}{plain}"

    def runs(self, details: BuildDetails, variants: Sequence[Variant]) -> bool:
        """Returns whether it has the instructions of a build."""
        needs = {(variant.name, variant.target): variant.needs for variant in variants}
        return details.target == self.target and needs[details.variant, self.target] <= self.features

    def first(self, builds: Sequence[Build[D]], libc: str | None) -> Build[D] | None:
        """Returns the first of `builds` that runs here, or with the C library `libc` (`Device.libc`)."""
        return next(iter(builds), None) if self.here else first_that_runs(builds, libc, lambda build: build.glibc)


def variant_named(name: str, target: str, variants: Sequence[V]) -> V:
    """Returns the variant of that name for a target.

    Raises:
        UnknownName: there is none.
    """
    known = {variant.name: variant for variant in variants if variant.target == target}
    if name not in known:
        raise UnknownName(f"instruction set of {target}", name, known)
    return known[name]


def baseline(variants: Sequence[Variant], target: str) -> frozenset[str]:
    """Returns the CPU features of every processor of a target that can run a build; none for an unknown target."""
    return min((variant.needs for variant in variants if variant.target == target), key=len, default=frozenset())


def build_once(final: Path, what: str, needed_bytes: int, make: Callable[[Path], Path], log: Log) -> None:
    """Makes `final` unless it is there.

    Args:
        final: the build's folder, named by its id.
        what: is built, for messages.
        needed_bytes: of free disk.
        make: builds in the temporary folder that it is handed; returns the product's folder in it.
        log: gets progress.

    Raises:
        InfrastructureFailed: the disk is full, another process never stops building, or what `make` raises.
    """
    folder = final.parent
    folder.mkdir(parents=True, exist_ok=True)
    if (final / MANIFEST).exists():
        return

    def waiting() -> None:
        log(f"another process is building {what}: waiting for it")

    with _explain_full_disk(folder, what), locked(folder / ".lock", LOCK_S, waiting=waiting):
        if (final / MANIFEST).exists():  # the one who held the lock before may have made it
            return
        for dead in folder.glob(".building-*"):  # we hold the lock: whoever made these was killed
            shutil.rmtree(dead)
        _need_disk(folder, needed_bytes)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as work:
            product = make(Path(work))
            shutil.rmtree(final, ignore_errors=True)
            product.rename(final)


def run_step(
    argv: Sequence[str], what: str, tool: str, deadline_s: float, on_line: Callable[[str], None] = lambda line: None
) -> None:
    """Runs one program of a build.

    Args:
        argv: the program and its arguments.
        what: is built, for messages.
        tool: the program, for messages.
        deadline_s: seconds after which it is killed.
        on_line: gets each line of its output.

    Raises:
        InfrastructureFailed: it failed; the message ends with its output.
        OSError: the disk is full, which `build_once` reports.
    """
    code, tail = stream(argv, deadline_s=deadline_s, env=build_environment(), on_line=on_line)
    if "No space left on device" in tail:
        raise OSError(errno.ENOSPC, "No space left on device")
    if code != 0:
        raise InfrastructureFailed(f"building {what}: {tool} failed (exit code {code})\n{tail}")


def smoke_test(
    runner: Path, target: str, what: str, cases: Callable[[Path], Iterable[tuple[Path, Sequence[str]]]], log: Log
) -> None:
    """Runs a fresh runner on tiny models, in processes of its own: a wrong instruction set ends in a signal.

    A runner for another machine is run by qemu where that is installed, else not at all.

    Args:
        runner: the program.
        target: its ABI.
        what: is built, for messages.
        cases: (folder to write models to) -> models and options of the runner.
        log: gets progress.

    Raises:
        InfrastructureFailed: it died or gave no finite logits.
    """
    emulator = emulator_of(target, runner)
    if emulator is None:
        log(f"no smoke test: nothing on this machine runs programs for {target} (Debian: {EMULATION})")
        return
    log("smoke test: a tiny random model")
    with tempfile.TemporaryDirectory() as folder:
        for model, options in cases(Path(folder)):
            argv = [*emulator, str(runner), "--model", str(model), "--prompt", "32", "--gen", "4", *options]
            code, tail = stream(argv, deadline_s=_SMOKE_S, env=build_environment())
            if code != 0 or '"finite":true' not in tail:
                raise InfrastructureFailed(
                    f"the fresh {what} build does not work on this machine (exit code {code}):\n{tail}"
                )


def plan_file(path: Path) -> PlanFile:
    """Returns hash and size of a file."""
    with path.open("rb") as file:
        return PlanFile(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=path.stat().st_size)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _need_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{free >> 20} MB free, a build needs {needed >> 20}")


@contextmanager
def _explain_full_disk(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise InfrastructureFailed(
            f"building {what}: the disk of {folder} is full ({error.strerror}); free space or set NAS_CACHE"
        ) from error


@lru_cache(maxsize=256)
def needed_glibc(files: tuple[Path, ...]) -> str | None:
    """Returns the newest version of GNU's C library that a file needs, such as "2.36"; None: none needs it."""
    minors = [int(minor) for path in files for minor in _GLIBC_SYMBOL.findall(path.read_bytes())]
    return f"2.{max(minors)}" if minors else None


def has_glibc(libc: str | None, needed: str | None) -> bool | None:
    """Returns whether a device with the C library `libc` (`Device.libc`) runs what needs version `needed` of GNU's.

    None where it does not report one.
    """
    if needed is None:
        return True
    if libc is None:
        return None
    found = _GLIBC.fullmatch(libc)
    return found is not None and int(found[1]) >= int(needed.removeprefix("2."))


def first_that_runs(builds: Iterable[B], libc: str | None, needed: Callable[[B], str | None]) -> B | None:
    """Returns the first build that runs with this C library, else the first of which that is unknown."""
    unknown: B | None = None
    for build in builds:
        runs = has_glibc(libc, needed(build))
        if runs:
            return build
        if runs is None and unknown is None:
            unknown = build
    return unknown
