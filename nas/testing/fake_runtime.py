"""A runtime without a compiler or a model: for tests of everything that uses runtimes.

Its runner is a Python script whose times follow from the layout's own arithmetic (weights read per token, cache, work
of the prompt), so a search over it has structure, and equal layouts always measure the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nas.core.errors import InfrastructureFailed, Unsupported
from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.plan import Plan, PlanFile, RawRun, Runner
from nas.core.workload import Workload
from nas.runtimes.base import Artifact, Checkpoint, GateReport, RandomWeights, Support, Weights
from nas.runtimes.output import read_sample

Fault = Literal["none", "crash", "hang", "garbage", "flood", "out_of_memory", "not_finite"]

_BYTES_PER_WEIGHT = 0.5625  # Q4_0: 18 bytes per 32 weights
_BYTES_PER_NS = 10.0
_FLOPS_PER_NS = 50.0


@dataclass(frozen=True)
class FakeRuntime:
    """A runtime whose runs take milliseconds.

    Args:
        folder: where the runner script is written.
        faults: layout id -> how runs of that layout go wrong.
        refused: block kinds it does not carry.
        slowdown: factor on every reported time, to pretend a slower machine.
        run_s: seconds that a run really takes, so that something can happen to it.
        targets: ABIs it has a runner for.
    """

    folder: Path
    faults: Mapping[str, Fault] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    slowdown: float = 1.0
    run_s: float = 0.0
    targets: tuple[str, ...] = ("x86_64-linux", "aarch64-linux")
    name: str = "fake"
    quantisations: tuple[str, ...] = ("q4_0",)
    writer_version: str = "1"

    def supports(self, layout: Layout) -> Support:
        """Everything but the kinds in `refused`."""
        kinds = {block.kind for layer in layout.layers for block in layer.blocks}
        reasons = tuple(f"{kind} blocks are not carried by {self.name}" for kind in sorted(kinds & self.refused))
        return Support("no", None, reasons) if reasons else Support("stock", self.name)

    def export(
        self, layout: Layout, quantisation: str, weights: Weights, destination: Path, *, recipe: bool = False
    ) -> Artifact:
        """A JSON file of the figures that the runner needs; its recipe is the same text backwards."""
        support = self.supports(layout)
        if support.arch is None:
            raise Unsupported("; ".join(support.reasons))
        if quantisation not in self.quantisations:
            raise Unsupported(f"{self.name} writes {', '.join(self.quantisations)}, not {quantisation!r}")
        model = {"layout": layout.to_json(), "weights": weights.describe(), "figures": self._figures(layout)}
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
            weights=weights.describe(),
            recipe=_described(backwards) if backwards else None,
        )

    def plan(self, artifact: Artifact, runner: Runner, workload: Workload, deadline_s: float) -> Plan:
        """One run of the script."""
        sizes = {"prompt": workload.prompt, "gen": workload.gen, "context": workload.window}
        options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        options += ["--seconds", str(self.run_s)]
        return Plan(
            runner=runner,
            inputs={"model": artifact.file},
            args=("--model", "{model}", *options, "--fault", self.faults.get(artifact.layout_id, "none")),
            threads=workload.threads,
            affinity=workload.affinity,
            deadline_s=deadline_s,
        )

    def parse(self, raw: RawRun) -> Sample:
        """As every runner that reports in our form."""
        return read_sample(raw)

    def gate(
        self, layout: Layout, quantisation: str, checkpoint: Checkpoint, model: Path, runner: Runner
    ) -> GateReport:
        """Passes: there is no graph that could be wrong."""
        return GateReport(errors=(0.0,), error=0.0, limit=0.01)

    def runner(
        self, target: str, features: Collection[str] | None = None, patched: bool = False, libc: str | None = None
    ) -> Runner:
        """The script, which runs on any target that has this interpreter."""
        if patched or target not in self.targets:
            raise InfrastructureFailed(f"no {'patched ' * patched}{self.name} runner for {target}")
        script = Path(__file__).with_name("fake_runner.py").read_bytes()
        content = f"#!{sys.executable} -IS\n".encode() + script
        digest = hashlib.sha256(content).hexdigest()
        path = self.folder / digest[:12] / "runner"
        if not path.exists():
            _write(path, content, mode=0o755)
        files = {"runner": _described(content)}
        return Runner(runtime=self.name, build=digest, target=target, files=files, main="runner")

    def runner_folder(self, runner: Runner) -> Path:
        """Where `runner` wrote the script."""
        return self.folder / runner.build[:12]

    def reference_model(self) -> Layout:
        """A layout of about 30M weights."""
        return Layout.parse("d512 v4096 ffn=swiglu:1536 [C3 C3 A8/4 C3 C3 A8/4 C3 A8/4]")

    def reference_workload(self) -> Workload:
        """A short prompt and a few tokens."""
        return Workload(prompt=64, gen=16)

    def _figures(self, layout: Layout) -> dict[str, float]:
        weights = layout.params.active * _BYTES_PER_WEIGHT
        cache = layout.kv_bytes(1)
        return {
            "decode_ns": self.slowdown * (weights + layout.state_bytes()) / _BYTES_PER_NS,
            "cache_ns": self.slowdown * cache / _BYTES_PER_NS,
            "prefill_ns": self.slowdown * layout.flops(512) / _FLOPS_PER_NS,
            "weights_mb": layout.params.total * _BYTES_PER_WEIGHT / 1e6,
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
