"""A runtime without a compiler or a model, for tests of everything that uses runtimes.

Its runner is a Python script whose times are computed from the layout (weights read per token, cache, work of the
prompt), so a search over it has structure, and equal layouts always measure the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nas.core.errors import InfrastructureFailed, InvalidInput, UnknownName, Unsupported
from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.plan import REFERENCE, Plan, PlanFile, RawRun, Runner
from nas.core.profile import Profile
from nas.core.progress import Log
from nas.core.tower import Media
from nas.core.workload import Workload
from nas.measure.runtimes.base import (
    Artifact,
    Checkpoint,
    Finding,
    GateReport,
    RandomWeights,
    Release,
    ReleaseRequest,
    Support,
    Weights,
)
from nas.measure.runtimes.runner import read_profile, read_sample
from nas.measure.runtimes.toolchain import host_target

if TYPE_CHECKING:
    from torch import nn

Fault = Literal["none", "crash", "hang", "garbage", "flood", "out_of_memory", "not_finite"]

_BYTES_PER_WEIGHT = 0.5625  # Q4_0: 18 bytes per 32 weights
_BYTES_PER_NS = 10.0
_SIZES: dict[Media, tuple[float, ...]] = {"images": (512, 512), "sounds": (10.0,)}
"""Of what artifacts count the tokens of."""
_FLOPS_PER_NS = 50.0


@dataclass(frozen=True)
class FakeBuild:
    """The script of a `FakeRuntime`."""

    folder: Path
    runner: Runner
    variant: str = "any"


@dataclass(frozen=True)
class FakeRuntime:
    """A runtime whose runs take milliseconds.

    Args:
        folder: where the runner script is written.
        faults: layout id -> fault of runs of that layout.
        refused: block kinds it does not carry.
        slowdown: factor on every reported time, to simulate a slower machine.
        run_s: seconds that a run really takes, so that tests can interrupt it.
        targets: ABIs it has a runner for.
        paired: whether a reference model takes turns with the candidate in its runner.
    """

    folder: Path
    faults: Mapping[str, Fault] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    slowdown: float = 1.0
    run_s: float = 0.0
    targets: tuple[str, ...] = ("x86_64-linux", "aarch64-linux")
    paired: bool = True
    name: str = "fake"
    quantisations: tuple[str, ...] = ("q4_0",)
    writer_version: str = "1"
    dispatches: bool = False

    def require_quantisation(self, quantisation: str) -> None:
        """Raises `UnknownName` for another one than `quantisations`."""
        if quantisation not in self.quantisations:
            raise UnknownName(f"quantisation of {self.name}", quantisation, self.quantisations)

    def supports(self, layout: Layout) -> Support:
        """Supports everything but the kinds in `refused`."""
        kinds = {block.kind for layer in layout.layers for block in layer.blocks}
        reasons = tuple(f"{kind} blocks are not carried by {self.name}" for kind in sorted(kinds & self.refused))
        return Support("no", None, reasons) if reasons else Support("stock", self.name)

    def export(
        self, layout: Layout, quantisation: str, weights: Weights, destination: Path, *, recipe: bool = False
    ) -> Artifact:
        """Writes a JSON file of the figures that the runner needs; its recipe has the same bytes in reverse."""
        support = self.supports(layout)
        if support.arch is None:
            raise Unsupported("; ".join(support.reasons))
        self.require_quantisation(quantisation)
        model = {
            "layout": layout.to_json(),
            "weights": weights.describe(),
            "figures": self._figures(layout, quantisation),
        }
        if quantisation != self.quantisations[0]:  # a file of the first one is of the same size as ever
            model |= {"quantisation": quantisation}
        content = json.dumps(model, sort_keys=True).encode()
        backwards = content[::-1] if recipe and isinstance(weights, RandomWeights) else None
        _write(destination, backwards or content)
        return Artifact(
            sha256=hashlib.sha256(content).hexdigest(),
            size=len(content),
            runtime=self.name,
            quantisation=quantisation,
            layout_id=layout.id,
            arch=support.arch,
            vectors=layout.vectors,
            # No file has the tower: this is what an image, or ten seconds of sound, becomes.
            image_tokens=layout.tower.tokens_of(*_SIZES[layout.tower.media]) if layout.tower else 0,
            weights=weights.describe(),
            recipe=_described(backwards) if backwards else None,
        )

    def plan(
        self,
        artifact: Artifact,
        runner: Runner,
        workload: Workload,
        deadline_s: float,
        reference: Artifact | None = None,
    ) -> Plan:
        """Returns one run of the script."""
        sizes = {"prompt": workload.prompt, "gen": workload.gen, "context": workload.window}
        options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        options += ["--seconds", str(self.run_s)]
        if workload.media and artifact.image_tokens:
            options += [f"--{workload.media}", str(workload.count * artifact.image_tokens)]
        models = {"model": artifact} | ({} if reference is None else {REFERENCE: reference})
        files = [text for name in models for text in (f"--{name}", f"{{{name}}}")]
        return Plan(
            runner=runner,
            inputs={name: model.file for name, model in models.items()},
            args=(*files, *options, "--fault", self.faults.get(artifact.layout_id, "none")),
            threads=workload.threads,
            affinity=workload.affinity,
            deadline_s=deadline_s,
        )

    def parse(self, raw: RawRun) -> Sample:
        """Parses the common report of runners."""
        return read_sample(raw)

    def gate(
        self, layout: Layout, quantisation: str, checkpoint: Checkpoint, model: Path, runner: Runner
    ) -> GateReport:
        """Always passes: there is no graph."""
        return GateReport(errors=(0.0,), error=0.0, limit=0.01)

    def rounded(self, layout: Layout, quantisation: str, checkpoint: Checkpoint) -> nn.Module:
        """Returns the model as it was trained: files hold no weights."""
        from safetensors.torch import load_file

        from nas.model.nn.model import Model

        model = Model(layout, seed=None).eval()
        model.load_state_dict(load_file(checkpoint.verified()))
        return model

    def runner(
        self,
        target: str,
        features: Collection[str] | None = None,
        patched: bool = False,
        libc: str | None = None,
        *,
        images: bool = False,
    ) -> Runner:
        """Returns the script, which runs on any target that has this interpreter."""
        if patched or target not in self.targets:
            raise InfrastructureFailed(f"no {'patched ' * patched}{self.name} runner for {target}")
        return self._script(target, Path(__file__).with_name("fake_runner.py").read_bytes())

    def profiler(self, runner: Runner, log: Log) -> Runner:
        """Returns the script that gives each block of a model an equal part of the time."""
        script = Path(__file__).with_name("fake_runner.py").read_bytes()
        return self._script(runner.target, script.replace(b"\nPROFILES = False\n", b"\nPROFILES = True\n"))

    def read_profile(self, raw: RawRun, layout: Layout | None) -> Profile:
        """Parses the common report of profilers."""
        return read_profile(raw)

    def _script(self, target: str, script: bytes) -> Runner:
        content = f"#!{sys.executable} -IS\n".encode() + script
        digest = hashlib.sha256(content).hexdigest()
        path = self.folder / digest[:12] / "runner"
        if not path.exists():
            _write(path, content, mode=0o755)
        files = {"runner": _described(content)}
        pairing = (f"--{REFERENCE}",) if self.paired else ()
        options = (
            "--model",
            *pairing,
            "--prompt",
            "--gen",
            "--context",
            "--images",
            "--sounds",
            "--seconds",
            "--fault",
        )
        return Runner(runtime=self.name, build=digest, target=target, files=files, main="runner", options=options)

    def runner_folder(self, runner: Runner) -> Path:
        """Returns the folder of the script."""
        return self.folder / runner.build[:12]

    def builds(self) -> Sequence[FakeBuild]:
        """Returns the script, for each target."""
        return [FakeBuild(self.runner_folder(runner), runner) for runner in map(self.runner, self.targets)]

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
    ) -> FakeBuild:
        """Writes the script."""
        if patched or variant or tools or static:
            raise InvalidInput(f"{self.name} has one build: a script")
        runner = self.runner(host_target() if target == "host" else target)
        log(f"{self.name} runner for {runner.target}")
        return FakeBuild(self.runner_folder(runner), runner)

    def doctor(self) -> Iterator[Finding]:
        """Yields that nothing is needed."""
        yield Finding(self.name, "ok", "needs nothing")

    def trim(self, limit_bytes: int) -> int:
        """Does nothing: exports cache nothing."""
        return 0

    def release(self, request: ReleaseRequest) -> Release:
        """Returns a release without files: apps load none."""
        return Release(f"none: {self.name} has no files for apps")

    def reference_models(self) -> Sequence[Layout]:
        """Returns one layout of about 30M weights."""
        return [Layout.parse("d512 v4096 ffn=swiglu:1536 [C3 C3 A8/4 C3 C3 A8/4 C3 A8/4]")]

    def reference_workload(self) -> Workload:
        """Returns a short prompt and a few tokens."""
        return Workload(prompt=64, gen=16)

    def _figures(self, layout: Layout, quantisation: str) -> dict[str, float]:
        weights = layout.params.active * _BYTES_PER_WEIGHT
        cache = layout.kv_bytes(1)
        return {
            "decode_ns": self.slowdown * (weights + layout.state_bytes()) / _BYTES_PER_NS,
            "cache_ns": self.slowdown * cache / _BYTES_PER_NS,
            "prefill_ns": self.slowdown * layout.flops(512) / _FLOPS_PER_NS,
            "weights_mb": layout.params.total * _BYTES_PER_WEIGHT / 1e6 * (1 + self.quantisations.index(quantisation)),
            "cache_mb": cache / 1e6,
        }


def _described(content: bytes) -> PlanFile:
    return PlanFile(sha256=hashlib.sha256(content).hexdigest(), size=len(content))


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    partial.write_bytes(content)
    partial.chmod(mode)
    partial.replace(path)
