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

SOURCES = tuple(Path(__file__).with_name(name) for name in ("runner.cpp", "attention.h"))
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
    """What a build was made from; its canonical hash is the build id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    executorch: str
    libraries: tuple[str, ...]
    runner: str
    variant: str
    target: str
    flags: tuple[str, ...]
    compiler: str


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


def find_build(target: str | None = None, features: Collection[str] | None = None) -> Build:
    """The best build at hand that the processor can run.

    Args:
        target: ABI; `None`: this machine's.
        features: CPU features by the kernel's names; `None`: this machine's.

    Raises:
        InfrastructureFailed: none; the message names the command that makes one.
    """
    target = target or host_target()
    at_hand = frozenset(host_features() if features is None else features)
    needs = {variant.name: variant.needs for variant in VARIANTS}
    for build in all_builds():
        if build.runner.target == target and needs[build.details.variant] <= at_hand:
            return build
    option = "" if target == host_target() else f" --target {target}"
    raise InfrastructureFailed(f"no ExecuTorch runner for {target} at hand: run `nas runtime build {NAME}{option}`")


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
    files = {name: plan_file(folder / name) for name in ("runner", *LIBRARIES)}
    write_runner(folder, Runner(runtime=NAME, build=build_id, target=details.target, files=files, main="runner"))


def _load(folder: Path) -> Build | None:
    try:
        runner = Runner.model_validate_json((folder / MANIFEST).read_bytes())
        details = BuildDetails.model_validate_json((folder / DETAILS).read_bytes())
    except (OSError, ValidationError):
        return None  # written by another version of hilnas
    known = details.variant in {variant.name for variant in VARIANTS}
    return Build(folder, runner, details) if known and is_whole(folder, runner) else None
