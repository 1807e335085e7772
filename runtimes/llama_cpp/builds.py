"""Builds at hand: one folder per build id in the cache, whole once its manifest is there."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from nas.core import paths
from nas.core.errors import InfrastructureFailed
from nas.core.plan import Runner
from nas.runtimes.building import MANIFEST, is_whole, plan_file, write_runner
from nas.runtimes.host import host_features, host_target
from nas.runtimes.libc import first_that_runs, needed_glibc
from nas.runtimes.llama_cpp import source
from nas.runtimes.llama_cpp.isa import VARIANTS, baseline
from nas.runtimes.llama_cpp.patches import patch_hashes

RUNNER_SOURCE = Path(__file__).with_name("runner.c")
DETAILS = "build.json"
LIBRARIES = ("libllama.so", "libggml.so", "libggml-base.so", "libggml-cpu.so")
"""What a runner loads from beside it; a static one, for machines of another kind or age, loads nothing."""
TOOLS = ("llama-bench", "llama-quantize")


class BuildDetails(BaseModel):
    """What a build was made from; its canonical hash is the build id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sdist: str
    patches: tuple[str, ...] = ()
    runner_c: str
    variant: str
    target: str
    flags: tuple[str, ...]
    compiler: str
    tools: bool
    static: bool = False

    @property
    def libraries(self) -> tuple[str, ...]:
        """The files that the runner loads."""
        return () if self.static else LIBRARIES

    @property
    def half_sums(self) -> bool:
        """Whether the processors it is for add up float16 products in float16, as Arm's with "asimdhp" do."""
        return any("asimdhp" in one.needs for one in VARIANTS if (one.name, one.target) == (self.variant, self.target))


@dataclass(frozen=True, slots=True)
class Build:
    """A finished build.

    Args:
        folder: holds the runner, the libraries it loads and, where asked for, the tools.
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
        """The version of GNU's C library that it asks for; None: it brings its own."""
        return None if self.details.static else needed_glibc(tuple(self.folder / name for name in self.runner.files))

    def tool(self, name: str) -> Path:
        """llama-bench or llama-quantize of this build, which must have been built with tools."""
        assert name in TOOLS and self.details.tools
        return self.folder / name


def builds_folder() -> Path:
    """Where builds lie."""
    return paths.cache() / "runtimes" / "llama.cpp"


def runner_source_hash() -> str:
    """SHA-256 of runner.c as it is now."""
    return hashlib.sha256(RUNNER_SOURCE.read_bytes()).hexdigest()


def all_builds() -> Iterator[Build]:
    """Every whole build of the pinned source and today's runner, best instruction set first.

    Of one instruction set, static builds and those with tools come last. The order is fixed, so that another build of
    the same kind does not change what measures.
    """
    rank = {variant.name: place for place, variant in enumerate(VARIANTS)}
    builds = [build for build in every_build() if build.details.runner_c == runner_source_hash()]

    def order(build: Build) -> tuple[int, bool, bool, str]:
        about = build.details
        return rank.get(about.variant, len(rank)), about.static, about.tools, build.runner.build

    yield from sorted(builds, key=order)


def every_build() -> Iterator[Build]:
    """Every whole build of the pinned source, whichever runner it has."""
    for path in builds_folder().glob(f"*/{MANIFEST}"):
        if (build := _load(path.parent)) is not None:
            yield build


def find_build(
    target: str | None = None,
    features: Collection[str] | None = None,
    *,
    patched: bool | None = False,
    tools: bool = False,
    libc: str | None = None,
) -> Build:
    """The best build at hand that the machine can run.

    Args:
        target: ABI; `None`: this machine's.
        features: CPU features by the kernel's names; `None`: this machine's, for use here, of which static builds are
            none; or for another ABI those of its `baseline`.
        patched: whether it carries our patches; `None`: either.
        tools: whether it must have llama-bench and llama-quantize.
        libc: the machine's C library, as `Device.libc`; `None`: not told.

    Raises:
        InfrastructureFailed: none; the message names the command that makes one.
    """
    target = target or host_target()
    here = features is None and target == host_target()
    at_hand = frozenset(features if features is not None else host_features() if here else baseline(target))
    needs = {(variant.name, variant.target): variant.needs for variant in VARIANTS}

    def fits(build: Build) -> bool:
        about = build.details
        runs = about.target == target and needs[about.variant, target] <= at_hand and not (here and about.static)
        return runs and patched in (None, build.runner.patched) and (about.tools or not tools)

    fitting = [build for build in all_builds() if fits(build)]
    found = next(iter(fitting), None) if here else first_that_runs(fitting, libc, lambda build: build.glibc)
    if found is not None:
        return found
    kind = "patched llama.cpp" if patched else "llama.cpp"
    if fitting:
        static = build_command(target, bool(patched), fitting[0].details.variant, static=True)
        raise InfrastructureFailed(
            f"the {kind} builds at hand for {target} need glibc {fitting[0].glibc} or newer, and the device has "
            f"{libc}: run `{static}` for one that needs none"
        )
    plain = f" (any, with {', '.join(sorted(at_hand))})" if features is None and not here and at_hand else ""
    command = build_command(target, bool(patched), _oldest(target) if plain else None)
    raise InfrastructureFailed(f"no {kind} build for {target}{plain} at hand: run `{command}`")


def build_command(target: str, patched: bool, variant: str | None = None, *, static: bool = False) -> str:
    """What a person types to make such a build here."""
    options = " --patched" * patched + ("" if target == host_target() else f" --target {target}")
    options += " --static" * (static and target == host_target()) + (f" --variant {variant}" if variant else "")
    return f"nas runtime build llama.cpp{options}"


def _oldest(target: str) -> str:
    """The variant that runs on every processor of a target."""
    return next(variant.name for variant in VARIANTS if (variant.target, variant.needs) == (target, baseline(target)))


def load_build(folder: Path) -> Build:
    """The build in `folder`.

    Raises:
        InfrastructureFailed: it is gone, damaged, or of another version.
    """
    build = _load(folder)
    if build is None:
        raise InfrastructureFailed(f"no whole llama.cpp build in {folder}: run `nas runtime build llama.cpp`")
    return build


def write_manifest(folder: Path, details: BuildDetails, build_id: str) -> None:
    """Describes a finished build; the manifest comes last and makes it whole."""
    (folder / DETAILS).write_text(details.model_dump_json(indent=1))
    runner = Runner(
        runtime="llama.cpp",
        build=build_id,
        target=details.target,
        patched=bool(details.patches),
        files={name: plan_file(folder / name) for name in ("runner", *details.libraries)},
        main="runner",
    )
    write_runner(folder, runner)


def _load(folder: Path) -> Build | None:
    try:
        runner = Runner.model_validate_json((folder / MANIFEST).read_bytes())
        details = BuildDetails.model_validate_json((folder / DETAILS).read_bytes())
    except (OSError, ValidationError):
        return None  # written by another version of hilnas
    known = details.variant in {variant.name for variant in VARIANTS}
    current = details.sdist == source.SHA256 and details.patches in ((), patch_hashes())
    return Build(folder, runner, details) if known and current and is_whole(folder, runner) else None
