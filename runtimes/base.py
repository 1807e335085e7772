"""What a runtime is: it exports layouts, plans their runs as data, and reads what the runs left behind."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.plan import InputFile, Plan, PlanFile, RawRun, Runner
from nas.core.workload import Workload

Verdict = Literal["stock", "patched", "no"]


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a runtime carries a layout.

    Args:
        verdict: runs on the runtime as its users install it, only on our patched build, or not at all.
        arch: the runtime's own name of the architecture; `None` where the verdict is "no".
        reasons: for "no", every rule that the layout breaks; for "patched", what needs the patch.
    """

    verdict: Verdict
    arch: str | None
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.verdict != "no"


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Finite pseudo-random weights: speed does not depend on values, so they serve all device metrics."""

    seed: int = 0

    def describe(self) -> str:
        """Their identity in result keys."""
        return f"random:{self.seed}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Trained weights: a safetensors file of `nas.nn.model`'s state dict.

    Args:
        path: the file.
        sha256: its content, which names it in result keys.
    """

    path: Path
    sha256: str

    def describe(self) -> str:
        """Their identity in result keys."""
        return f"checkpoint:{self.sha256}"


Weights = RandomWeights | Checkpoint


class Artifact(BaseModel):
    """An exported model: layout x runtime x quantisation x weights. Where it lies is the store's business."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0, description="bytes")
    runtime: str
    quantisation: str
    layout_id: str
    arch: str
    patched: bool = False
    weights: str = Field(description="`Weights.describe()`")
    recipe: PlanFile | None = Field(None, description="what was written in place of the file: the runner makes it")

    @property
    def file(self) -> InputFile:
        """The artifact as a plan's input."""
        return InputFile(sha256=self.sha256, size=self.size, recipe=self.recipe)

    @property
    def stored(self) -> PlanFile:
        """What was written: the file, or its recipe."""
        return self.file.travels


@dataclass(frozen=True, slots=True)
class GateReport:
    """What an equivalence gate saw: does the runtime compute what the layout means?

    Args:
        errors: relative L2 error of the logits against PyTorch, per position.
        error: the one that counts, as each runtime's gate explains.
        limit: the greatest error that rounding explains.
        note: what is wrong besides, as a sentence; empty: nothing.
    """

    errors: tuple[float, ...]
    error: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit, which one that is not finite is not, and nothing else is wrong."""
        return self.error <= self.limit and not self.note

    def require(self) -> None:
        """Refuses a graph that did not pass.

        Raises:
            CandidateFailed: with reason "gate".
        """
        if not self.passed:
            logits = f"logits differ from PyTorch by {self.error:.2%}; rounding explains {self.limit:.2%}"
            raise CandidateFailed("gate", self.note or logits)


class Runtime(Protocol):
    """One inference runtime. Implementations are stateless values; contract tests are in `nas.testing`."""

    @property
    def name(self) -> str:
        """Its name in spaces, keys and the registry."""

    @property
    def quantisations(self) -> tuple[str, ...]:
        """What `export` writes; the first is the default."""

    @property
    def writer_version(self) -> str:
        """Changes whenever the same inputs would give other bytes; part of export's result key."""

    def supports(self, layout: Layout) -> Support:
        """Whether and how the runtime carries `layout`. Pure, fast, and needs no build."""

    def export(
        self, layout: Layout, quantisation: str, weights: Weights, destination: Path, *, recipe: bool = False
    ) -> Artifact:
        """Writes the model file at `destination`, atomically and the same for the same inputs.

        Args:
            layout: what to write.
            quantisation: one of `quantisations`.
            weights: random or trained.
            destination: where to.
            recipe: where weights are random and the runner can make the file itself (`runner --recipe R --output F`),
                write that recipe instead; the artifact then names both. A runtime without recipes writes the file.

        Raises:
            Unsupported: the runtime does not carry the layout.
            InvalidInput: unknown quantisation, or a checkpoint that does not fit the layout.
            InfrastructureFailed: the disk is full or a build is missing.
        """

    def plan(self, artifact: Artifact, runner: Runner, workload: Workload, deadline_s: float) -> Plan:
        """One repetition of `workload` as data.

        Raises:
            Unsupported: the workload asks for what this runtime lacks, or the runner is not for this artifact.
        """

    def parse(self, raw: RawRun) -> Sample:
        """What one run measured.

        Raises:
            CandidateFailed: out_of_memory, timeout, crash, garbage_output, not_finite or export.
            InfrastructureFailed: the runner itself could not work.
        """

    def gate(
        self, layout: Layout, quantisation: str, checkpoint: Checkpoint, model: Path, runner: Runner
    ) -> GateReport:
        """Compares the logits of an exported checkpoint with PyTorch's, here on this machine.

        Args:
            layout: what was exported.
            quantisation: and how.
            checkpoint: with which weights.
            model: the exported file.
            runner: the build that measures it, and that computes the logits here; another ABI's by emulation.

        Raises:
            CandidateFailed: the runtime died on the file, or refused it (crash, export).
            InfrastructureFailed: that build is gone, or nothing here can run it.
        """

    def runner(
        self, target: str, features: Collection[str] | None = None, patched: bool = False, libc: str | None = None
    ) -> Runner:
        """The best build at hand for a device.

        Args:
            target: the device's ABI, such as "x86_64-linux".
            features: its CPU features, by the kernel's names; `None`: this machine's, or of another kind of machine
                those that every one of its kind has.
            patched: whether the artifact needs the patched build.
            libc: its C library, as `Device.libc`; `None`: not told.

        Raises:
            InfrastructureFailed: no such build, or none that runs with its C library; the message names the command
                that makes one.
        """

    def runner_folder(self, runner: Runner) -> Path:
        """Where the files of `runner` lie on this machine.

        Raises:
            InfrastructureFailed: the build is gone.
        """

    def reference_model(self) -> Layout:
        """The fixed layout (about 30M weights) that calibrates a device and shows its drift."""

    def reference_workload(self) -> Workload:
        """The fixed workload of the reference model, about a second long on a laptop core."""


@runtime_checkable
class WholeExporter(Protocol):
    """A runtime whose artifacts are made to be measured, and which has a standard file for apps besides."""

    def export_whole(
        self, layout: Layout, quantisation: str, weights: Weights, context: int, destination: Path
    ) -> Artifact:
        """Writes one program of the runtime's own format, which needs nothing of ours.

        Args:
            layout: what to write.
            quantisation: as in `Runtime.export`.
            weights: random or trained.
            context: most tokens of a text; caches in the program have room for them.
            destination: where to, atomically.

        Raises:
            Unsupported: the runtime does not carry the layout, or only in artifacts.
            InvalidInput: unknown quantisation, or a checkpoint that does not fit the layout.
            CandidateFailed: the runtime's tools cannot write it (export).
            InfrastructureFailed: the disk is full or a package is missing.
        """
