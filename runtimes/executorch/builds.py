"""Builds of the runner at hand: one folder per build id in the cache, whole once its manifest is there."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from nas.core import paths
from nas.core.errors import InfrastructureFailed, UnknownName, Unsupported
from nas.core.plan import Runner
from nas.runtimes.building import MANIFEST, is_whole, plan_file, write_runner
from nas.runtimes.executorch.sdk import LIBRARIES
from nas.runtimes.host import host_features, host_target
from nas.runtimes.libc import first_that_runs, needed_glibc

SOURCES = tuple(Path(__file__).with_name(name) for name in ("runner.cpp", "attention.h", "recipe.h"))
DETAILS = "build.json"
NAME = "executorch"


@dataclass(frozen=True, slots=True)
class Variant:
    """One instruction set to compile our attention kernel for; XNNPACK chooses its own kernels when it runs.

    Args:
        name: shown to people, part of the build id.
        target: ABI.
        needs: CPU features, by the kernel's names in /proc/cpuinfo.
        march: the compiler's `-march`.
    """

    name: str
    target: str
    needs: frozenset[str]
    march: str


VARIANTS = (
    Variant("avx2", "x86_64-linux", frozenset({"avx2", "fma", "f16c", "bmi2"}), "x86-64-v3"),
    Variant("sse42", "x86_64-linux", frozenset({"sse4_2"}), "x86-64-v2"),
    Variant("armv8.2", "aarch64-linux", frozenset({"asimd", "fphp", "asimdhp"}), "armv8.2-a+fp16"),
    Variant("armv8", "aarch64-linux", frozenset({"asimd"}), "armv8-a"),
)
"""Best first."""


class BuildDetails(BaseModel):
    """What a build was made from; its canonical hash is the build id.

    Args:
        executorch: version.
        libraries: hashes of what the runner loads, or of the archive that it comes in.
        runner: hash of its sources.
        variant: instruction set.
        target: ABI.
        flags: of the compiler.
        compiler: its version.
        carried: the compiler's own libraries among the files, for machines where they may be older or missing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    executorch: str
    libraries: tuple[str, ...]
    runner: str
    variant: str
    target: str
    flags: tuple[str, ...]
    compiler: str
    carried: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """What a device needs."""
        return ("runner", *LIBRARIES, *self.carried)


@dataclass(frozen=True, slots=True)
class Build:
    """A finished build.

    Args:
        folder: holds the runner and the libraries it loads.
        runner: its manifest.
        details: what it was made from.
    """

    folder: Path
    runner: Runner
    details: BuildDetails

    @property
    def executable(self) -> Path:
        """The measuring runner."""
        return self.folder / self.runner.main

    @property
    def glibc(self) -> str | None:
        """The version of GNU's C library that it asks for."""
        return needed_glibc(tuple(self.folder / name for name in self.runner.files))


def builds_folder() -> Path:
    """Where builds lie."""
    return paths.cache() / "runtimes" / NAME / "builds"


def runner_source_hash() -> str:
    """SHA-256 of the runner's sources as they are now."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()


def variant_for(target: str, features: Collection[str] | None, name: str | None = None) -> Variant:
    """The best variant of a target, or the one called `name`.

    Args:
        target: ABI.
        features: of the processor; `None`: whichever the best variant needs.
        name: wanted; `None`: the best that fits.

    Raises:
        UnknownName: no variant has that name.
        Unsupported: none fits.
    """
    of_target = {variant.name: variant for variant in VARIANTS if variant.target == target}
    if name is not None:
        if name not in of_target:
            raise UnknownName(f"instruction set of {target}", name, of_target)
        return of_target[name]
    for variant in of_target.values():
        if features is None or variant.needs <= set(features):
            return variant
    raise Unsupported(f"the ExecuTorch runner has no build for such a {target} processor")


def all_builds() -> Iterator[Build]:
    """Every whole build of today's runner, best instruction set first."""
    rank = {variant.name: place for place, variant in enumerate(VARIANTS)}
    found = [load for path in builds_folder().glob(f"*/{MANIFEST}") if (load := _load(path.parent)) is not None]
    current = [build for build in found if build.details.runner == runner_source_hash()]
    yield from sorted(current, key=lambda build: (rank.get(build.details.variant, len(rank)), build.runner.build))


def find_build(target: str | None = None, features: Collection[str] | None = None, *, libc: str | None = None) -> Build:
    """The best build at hand that the machine can run.

    Args:
        target: ABI; `None`: this machine's.
        features: CPU features by the kernel's names; `None`: this machine's, or for another ABI those that the least
            of its variants needs.
        libc: the machine's C library, as `Device.libc`; `None`: not told.

    Raises:
        InfrastructureFailed: none; the message names the command that makes one, or what the device lacks.
    """
    target = target or host_target()
    here = features is None and target == host_target()
    at_hand = frozenset(features if features is not None else host_features() if here else _baseline(target))
    needs = {(variant.name, variant.target): variant.needs for variant in VARIANTS}
    fitting = [
        build
        for build in all_builds()
        if build.runner.target == target and needs[build.details.variant, target] <= at_hand
    ]
    found = next(iter(fitting), None) if here else first_that_runs(fitting, libc, lambda build: build.glibc)
    if found is not None:
        return found
    if fitting:
        raise InfrastructureFailed(
            f"the ExecuTorch runner for {target} needs glibc {fitting[0].glibc} or newer, and the device has {libc}; "
            "it loads ExecuTorch's own libraries, so there is none without that: update the device's system, or "
            "measure it with llama.cpp"
        )
    plain = f" (any, with {', '.join(sorted(at_hand))})" if features is None and not here and at_hand else ""
    option = "" if target == host_target() else f" --target {target}"
    raise InfrastructureFailed(
        f"no ExecuTorch runner for {target}{plain} at hand: run `nas runtime build {NAME}{option}`"
    )


def _baseline(target: str) -> frozenset[str]:
    return min((variant.needs for variant in VARIANTS if variant.target == target), key=len, default=frozenset())


def load_build(folder: Path) -> Build:
    """The build in `folder`.

    Raises:
        InfrastructureFailed: it is gone, damaged, or of another version.
    """
    build = _load(folder)
    if build is None:
        raise InfrastructureFailed(f"no whole ExecuTorch runner in {folder}: run `nas runtime build {NAME}`")
    return build


def write_manifest(folder: Path, details: BuildDetails, build_id: str) -> None:
    """Describes a finished build; the manifest comes last and makes it whole."""
    (folder / DETAILS).write_text(details.model_dump_json(indent=1))
    files = {name: plan_file(folder / name) for name in details.files}
    write_runner(folder, Runner(runtime=NAME, build=build_id, target=details.target, files=files, main="runner"))


def _load(folder: Path) -> Build | None:
    try:
        runner = Runner.model_validate_json((folder / MANIFEST).read_bytes())
        details = BuildDetails.model_validate_json((folder / DETAILS).read_bytes())
    except (OSError, ValidationError):
        return None  # written by another version of hilnas
    known = details.variant in {variant.name for variant in VARIANTS}
    return Build(folder, runner, details) if known and is_whole(folder, runner) else None
