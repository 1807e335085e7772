"""The base class of runtimes whose runner is compiled: it finds, makes and describes builds."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Generic

from pydantic import ValidationError

from nas.core import paths
from nas.core.device import GPU_FEATURES
from nas.core.errors import InfrastructureFailed, UnknownName, Unsupported
from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.plan import RawRun, Runner
from nas.core.progress import Log
from nas.core.workload import Workload
from nas.measure.runtimes.base import REFERENCE_LAYOUTS, Artifact, Weights
from nas.measure.runtimes.build_cache import (
    MANIFEST,
    SPEC,
    BuildRequest,
    CachedBuild,
    S,
    Variant,
    build_once,
    first_that_runs,
    plan_file,
    smoke_test,
    without_tools,
    write_manifest,
)
from nas.measure.runtimes.runner import read_timed_sample
from nas.measure.runtimes.toolchain import host_features, host_target
from nas.measure.runtimes.writing import Written


class BuiltRuntime(ABC, Generic[S]):
    """A runtime whose runner is compiled from sources. Implements the part of `Runtime` that concerns builds.

    A subclass gives the attributes below, says in `spec` what a build is made from, compiles it in `compile`, and
    implements the other members of `Runtime`.

    Attributes:
        name: of the runtime.
        quantisations: names of what `export` writes; the first is the default.
        spec_type: reads the spec of a cached build.
        variants: instruction sets, best first.
        targets: ABIs other than this machine's that `compile` can build for here.
        static_targets: ABIs with builds that need no library of the device.
        runner_sources: the program to compile, then the files that it includes.
        profiler_sources: the same of the profiler.
        options: of the runner that plans use; agents accept no others.
        image_options: those of builds that read images and sound besides.
        dispatches: whether its library chooses kernels by the processor that it runs on, whatever it was built for.
        disk_bytes: free disk that a build needs.

    Example:
        >>> class Tiny(BuiltRuntime[TinySpec]):
        ...     name, spec_type, variants = "tiny", TinySpec, (Variant("any", "x86_64-linux", frozenset()),)
        ...     runner_sources = (Path(__file__).with_name("runner.c"),)
        ...     options = ("--model", "--prompt", "--gen")
        ...
        ...     def spec(self, request):
        ...         variant = self.variant_for(request.target, host_features(), request.variant)
        ...         version, runner = find_compiler().version, self.source_hash(self.runner_sources)
        ...         inputs = {"version": "1", "variant": variant.name, "target": variant.target, "flags": ("-O2",)}
        ...         return TinySpec(**inputs, compiler=version, runner=runner)
        ...
        ...     def compile(self, spec, work, product, log):
        ...         argv = ["cc", *spec.flags, str(self.program(spec)), "-o", str(product / "runner")]
        ...         run_step(argv, "tiny", "cc", 60)
    """

    name: str
    quantisations: tuple[str, ...]
    spec_type: type[S]
    variants: Sequence[Variant]
    targets: Sequence[str] = ()
    static_targets: Sequence[str] = ()
    runner_sources: Sequence[Path]
    profiler_sources: Sequence[Path] = ()
    options: tuple[str, ...]
    image_options: tuple[str, ...] = ()
    dispatches: bool = False
    disk_bytes: int

    # What a subclass gives.

    @abstractmethod
    def spec(self, request: BuildRequest) -> S:
        """Returns the inputs of a build that measures; raises what `Runtime.build` raises."""

    @abstractmethod
    def compile(self, spec: S, work: Path, product: Path, log: Log) -> None:
        """Compiles the program of `spec` and writes `spec.files` into the folder `product`.

        Args:
            spec: what to build.
            work: an empty folder for everything else, removed afterwards.
            product: an empty folder.
            log: gets progress.

        Raises:
            InfrastructureFailed: a step failed; with its output.
        """

    def smoke_models(self, spec: S, folder: Path, log: Log) -> Iterator[tuple[Path, Sequence[str]]]:
        """Yields tiny models, written to `folder`, with options of the runner: a fresh build must run each."""
        yield from ()

    def is_current(self, spec: S) -> bool:
        """Returns whether a cached build is of the library version that this version of hilnas uses."""
        return True

    # Builds in the cache.

    @property
    def folder(self) -> Path:
        """The folder of all builds."""
        return paths.cache() / "runtimes" / self.name / "builds"

    @staticmethod
    def source_hash(sources: Sequence[Path]) -> str:
        """Returns the SHA-256 of source files as they are now."""
        return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()

    def program(self, spec: S) -> Path:
        """Returns the file to compile: the profiler or the runner."""
        is_profiler = self.profiler_sources and spec.runner == self.source_hash(self.profiler_sources)
        return self.profiler_sources[0] if is_profiler else self.runner_sources[0]

    def cached_builds(self) -> Iterator[CachedBuild[S]]:
        """Yields every complete build in the cache, profilers and older runners included."""
        for path in self.folder.glob(f"*/{MANIFEST}"):
            if (build := self._read(path.parent)) is not None:
                yield build

    def builds(self) -> list[CachedBuild[S]]:
        """Returns every complete build of today's runner.

        The best instruction set comes first, shared builds before static ones and those without tools, or images,
        before those with them. The order is fixed: another build of the same kind does not change which one measures.
        """
        rank = {variant.name: index for index, variant in enumerate(self.variants)}
        current = self.source_hash(self.runner_sources)

        def order(build: CachedBuild[S]) -> tuple[int, bool, bool, bool, str]:
            spec = build.spec
            return rank[build.variant], spec.static, spec.images, bool(spec.tools), build.runner.build

        return sorted((build for build in self.cached_builds() if build.spec.runner == current), key=order)

    def load(self, build_id: str) -> CachedBuild[S]:
        """Returns a build by its id.

        Raises:
            InfrastructureFailed: it is gone, damaged, or of another version.
        """
        if (build := self._read(self.folder / build_id)) is None:
            raise InfrastructureFailed(
                f"no complete {self.name} build in {self.folder / build_id}: run `nas runtime build {self.name}`"
            )
        return build

    def _read(self, folder: Path) -> CachedBuild[S] | None:
        try:
            runner = Runner.model_validate_json((folder / MANIFEST).read_bytes())
            spec = self.spec_type.model_validate_json((folder / SPEC).read_bytes())
            complete = all((folder / name).stat().st_size == file.size for name, file in runner.files.items())
        except (OSError, ValidationError):
            return None  # incomplete, or written by another version of hilnas
        variants = {(variant.name, variant.target) for variant in self.variants}
        if not complete or (spec.variant, spec.target) not in variants or not self.is_current(spec):
            return None
        # The options are those of today's plans, whenever the build was made.
        options = self.options + (self.image_options if spec.images else ())
        return CachedBuild(folder, runner.model_copy(update={"options": options}), spec)

    def runner(
        self,
        target: str,
        features: Collection[str] | None = None,
        patched: bool = False,
        libc: str | None = None,
        *,
        images: bool = False,
    ) -> Runner:
        """Returns the runner of the best available build for a device."""
        return self.find_build(target, features, patched=patched, libc=libc, images=images).runner

    def runner_folder(self, runner: Runner) -> Path:
        """Returns the folder with the files of `runner`."""
        return self.load(runner.build).folder

    def find_build(
        self,
        target: str | None = None,
        features: Collection[str] | None = None,
        *,
        patched: bool | None = False,
        tools: bool = False,
        libc: str | None = None,
        images: bool = False,
    ) -> CachedBuild[S]:
        """Returns the best available build that a machine can run.

        Args:
            target: ABI; None: this machine's.
            features: CPU features by the kernel's names; None: for this machine's ABI its own, and static builds are
                not considered; for another ABI those that every machine of the kind has.
            patched: whether the build has our patches; None: either.
            tools: whether it must have the library's own programs.
            libc: the machine's C library, as `Device.libc`; None: unknown.
            images: whether its runner must read images or sound.

        Raises:
            Unsupported: the runtime's runner reads none, or has no back end for a GPU.
            InfrastructureFailed: there is none; the message names the command that makes one.
        """
        if images:
            self._require_images()
        target = target or host_target()
        is_host = features is None and target == host_target()
        oldest = None if is_host or features is not None else self._oldest(target)
        if features is None:
            features = host_features() if is_host else oldest.needs if oldest else ()
        gpus = set(GPU_FEATURES) & set(features)
        if gpus and images:
            raise Unsupported(f"{self.name} encodes images and sound on the processor alone, not by {', '.join(gpus)}")
        runnable = [
            variant.name
            for variant in self.variants
            if variant.target == target and gpus <= variant.needs <= set(features)
        ]
        if gpus and not runnable:
            raise Unsupported(f"{self.name} has no back end for {', '.join(gpus)}")
        builds = [
            build
            for build in self.builds()
            if build.spec.target == target
            and build.variant in runnable
            and patched in (None, bool(build.spec.patches))
            and (build.spec.tools or not tools)
            and (build.spec.images or not images)
            and not (is_host and build.spec.static)
        ]
        build = builds[0] if builds and is_host else first_that_runs(builds, libc, lambda build: build.glibc)
        if build is not None:
            return build
        kind = f"{'patched ' * bool(patched)}{self.name}{' (with images)' * images}"
        command_for = partial(self.build_command, target, bool(patched), images=images)
        if builds:
            static = command_for(builds[0].variant, static=True)
            remedy = (
                f"run `{static}` for one that needs none"
                if target in self.static_targets
                else "its libraries need one: update the device's system, or measure it with another runtime"
            )
            raise InfrastructureFailed(
                f"the {kind} builds here for {target} need glibc {builds[0].glibc} or newer, and the device has "
                f"{libc}: {remedy}"
            )
        machine = f"{target} (any, with {', '.join(sorted(oldest.needs))})" if oldest else target
        best = oldest.name if oldest else next(iter(runnable), None)
        usual = self._best(target, host_features() if target == host_target() else None)
        command = command_for(None if usual and usual.name == best else best)
        raise InfrastructureFailed(f"no {kind} build for {machine} here: run `{command}`")

    def build_command(
        self, target: str, patched: bool, variant: str | None = None, *, static: bool = False, images: bool = False
    ) -> str:
        """Returns the command that makes such a build here."""
        options = (
            " --patched" * patched + " --images" * images + ("" if target == host_target() else f" --target {target}")
        )
        options += " --static" * (static and target == host_target()) + (f" --variant {variant}" if variant else "")
        return f"nas runtime build {self.name}{options}"

    def _require_images(self) -> None:
        if not self.image_options:
            raise Unsupported(f"the runner of {self.name} reads no images, and no sound")

    # Instruction sets.

    def variant_for(self, target: str, features: Collection[str] | None, name: str | None = None) -> Variant:
        """Returns the variant called `name`, or the best of a target that the processor's `features` allow.

        Where these are not known, it is the best that is common.

        Raises:
            UnknownName: no variant of the target has that name.
            Unsupported: the target has no variant, or none fits.
        """
        variants = {variant.name: variant for variant in self.variants if variant.target == target}
        if name is not None:
            if name not in variants:
                raise UnknownName(f"instruction set of {target}", name, variants)
            return variants[name]
        if (best := self._best(target, features)) is not None:
            return best
        if (oldest := self._oldest(target)) is None:
            valid = ", ".join(sorted({variant.target for variant in self.variants}))
            raise Unsupported(f"{self.name} is not built for {target!r}; valid: {valid}")
        raise Unsupported(f"this {target} processor lacks {', '.join(sorted(oldest.needs - set(features or ())))}")

    def _best(self, target: str, features: Collection[str] | None) -> Variant | None:
        """Returns the best variant of a target that a processor runs; None of `features`: the best that is common."""
        for variant in self.variants:
            fits = variant.common if features is None else variant.needs <= set(features)
            if variant.target == target and fits:
                return variant
        return None

    def _oldest(self, target: str) -> Variant | None:
        """Returns the variant that runs on every processor of a target; None: the target has none."""
        variants = [variant for variant in self.variants if variant.target == target]
        return min(variants, key=lambda variant: len(variant.needs), default=None)

    # Making builds.

    def build(
        self,
        target: str = "host",
        *,
        log: Log,
        patched: bool = False,
        variant: str | None = None,
        tools: bool = False,
        static: bool = False,
        images: bool = False,
    ) -> CachedBuild[S]:
        """Returns the build for a machine, and makes it unless the cache has it; see `Runtime.build`."""
        target = host_target() if target == "host" else target
        if target not in (host_target(), *self.targets):
            raise UnknownName(
                "target to build for on this machine", target, dict.fromkeys((host_target(), *self.targets))
            )
        if images:
            self._require_images()
        build = self.make(self.spec(BuildRequest(target, patched, variant, tools, static, images)), log)
        kind = f"{'patched ' * bool(build.spec.patches)}{self.name} {build.spec.version}{', images' * images}"
        needs = f"needs the GNU C library {build.glibc} or newer and libstdc++" if build.glibc else "needs no library"
        log(f"{kind} for {target} ({build.variant}, {needs}): {build.folder}")
        return build

    def make(self, spec: S, log: Log) -> CachedBuild[S]:
        """Returns the build of `spec`, and makes it unless the cache has it.

        Raises:
            InfrastructureFailed: a compiler, network or disk space is missing, or a step failed; with the remedy.
        """
        if spec.tools:
            self.make(without_tools(spec), log)

        def make(work: Path) -> Path:
            product = work / "product"
            product.mkdir()
            self.compile(spec, work, product, log)
            smoke_test(
                product / "runner", spec.target, self.name, lambda folder: self.smoke_models(spec, folder, log), log
            )
            write_manifest(product, self.name, spec)
            return product

        folder = self.folder / spec.build_id
        build_once(folder, self.name, self.disk_bytes, make, log, lambda: self._is_intact(folder))
        return self.load(spec.build_id)

    def _is_intact(self, folder: Path) -> bool:
        """Returns whether a folder holds a complete build whose files are what its record says."""
        build = self._read(folder)
        return build is not None and all(plan_file(folder / name) == file for name, file in build.runner.files.items())

    def profiler(self, runner: Runner, log: Log) -> Runner:
        """Returns the profiler on the libraries of `runner`, and makes it unless the cache has it.

        Shared libraries are copied, which takes seconds; a static build is compiled again, which takes minutes.

        Raises:
            InfrastructureFailed: the build of `runner` is gone, or was made by another compiler or from another version
                of the library than are installed here, or a step failed.
        """
        measuring = self.load(runner.build).spec
        patched, static = bool(measuring.patches), measuring.static
        spec = self.spec(
            BuildRequest(measuring.target, patched, measuring.variant, static=static, images=measuring.images)
        )
        if without_tools(measuring) != spec:
            command = self.build_command(spec.target, patched, spec.variant, static=static, images=spec.images)
            raise InfrastructureFailed(
                f"build {runner.build[:12]} was made by another compiler or from another {self.name} than are "
                f"installed here: run `{command}`"
            )
        return self.make(spec.model_copy(update={"runner": self.source_hash(self.profiler_sources)}), log).runner

    # What compiled runners have in common.

    def parse(self, raw: RawRun) -> Sample:
        """Returns the sample that the runner printed."""
        return read_timed_sample(raw)

    def trim(self, limit_bytes: int) -> int:
        """Removes nothing: exports cache nothing."""
        return 0

    def reference_models(self) -> Sequence[Layout]:
        """Returns lfm2 of 30M to 1.2B weights."""
        return [Layout.parse(layout) for layout in REFERENCE_LAYOUTS]

    def reference_workload(self) -> Workload:
        """Returns a workload of half a second on a server core, two seconds on a slow one."""
        return Workload(prompt=512, gen=256)

    def require_quantisation(self, quantisation: str) -> None:
        """Raises `UnknownName` for a quantisation that `export` does not write."""
        if quantisation not in self.quantisations:
            raise UnknownName(f"quantisation of {self.name}", quantisation, self.quantisations)

    def artifact(
        self,
        written: Written,
        layout: Layout,
        quantisation: str,
        weights: Weights,
        arch: str,
        *,
        patched: bool = False,
    ) -> Artifact:
        """Returns the artifact of a file that `export` wrote."""
        return Artifact(
            sha256=written.file.sha256,
            size=written.file.size,
            runtime=self.name,
            quantisation=quantisation,
            layout_id=layout.id,
            arch=arch,
            patched=patched,
            vectors=layout.vectors,
            weights=weights.describe(),
            recipe=written.recipe,
        )
