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
from nas.runtimes.llama_cpp import source
from nas.runtimes.llama_cpp.isa import VARIANTS
from nas.runtimes.llama_cpp.patches import patch_hashes

RUNNER_SOURCE = Path(__file__).with_name("runner.c")
DETAILS = "build.json"
LIBRARIES = ("libllama.so", "libggml.so", "libggml-base.so", "libggml-cpu.so")
"""What a runner loads from beside it; a static one, for another kind of machine, loads nothing."""
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
    """Every whole build of the pinned source and today's runner, best instruction set first, then without tools.

    The order is fixed, so that another build of the same kind does not change what measures.
    """
    rank = {variant.name: place for place, variant in enumerate(VARIANTS)}
    builds = [build for build in every_build() if build.details.runner_c == runner_source_hash()]

    def order(build: Build) -> tuple[int, bool, str]:
        return rank.get(build.details.variant, len(rank)), build.details.tools, build.runner.build

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
) -> Build:
    """The best build at hand that the processor can run.

    Args:
        target: ABI; `None`: this machine's.
        features: CPU features by the kernel's names; `None`: this machine's.
        patched: whether it carries our patches; `None`: either.
        tools: whether it must have llama-bench and llama-quantize.

    Raises:
        InfrastructureFailed: none; the message names the command that makes one.
    """
    target = target or host_target()
    at_hand = frozenset(host_features() if features is None else features)
    for build in all_builds():
        needs = {variant.name: variant.needs for variant in VARIANTS}[build.details.variant]
        fits = build.runner.target == target and patched in (None, build.runner.patched) and needs <= at_hand
        if fits and (build.details.tools or not tools):
            return build
    kind = "patched llama.cpp" if patched else "llama.cpp"
    raise InfrastructureFailed(f"no {kind} build for {target} at hand: run `{build_command(target, bool(patched))}`")


def build_command(target: str, patched: bool) -> str:
    """What a person types to make such a build here."""
    options = " --patched" * patched + ("" if target == host_target() else f" --target {target}")
    return f"nas runtime build llama.cpp{options}"


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
