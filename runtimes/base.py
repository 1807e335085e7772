"""The protocol of runtimes: export layouts, plan their runs as data, read the results, and write released models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from nas.core.block import Block
from nas.core.errors import CandidateFailed, InvalidInput, NasError
from nas.core.family import MemberFile
from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.plan import InputFile, Plan, PlanFile, RawRun, Runner
from nas.core.profile import Profile
from nas.core.progress import Log
from nas.core.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn

Verdict = Literal["stock", "patched", "no"]
Status = Literal["ok", "warning", "failure"]
Floats = NDArray[np.float32]
Purpose = Literal["bos", "eos", "eot", "pad", "fim_pre", "fim_suf", "fim_mid"]

REFERENCE_LAYOUTS = (
    "d512 v8192 ffn=swiglu:1792 [C3 C3 A8/4 C3 C3 A8/4 C3 A8/4]",
    "d768 v16384 ffn=swiglu:3072 [C3*2 A12/4 C3*2 A12/4 C3*2 A12/4 C3*2]",
    "d1024 v65536 ffn=swiglu:4608 [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3 A16/8 C3 A16/8 C3 A16/8 C3]",
    "d2048 v65536 ffn=swiglu:8192 [C3*2 A32/8 C3*2 A32/8 C3*2 A32/8 C3 A32/8 C3 A32/8 C3 A32/8 C3]",
)
"""The layouts that calibrate devices with the built-in runtimes: lfm2 of 30M, 100M, 350M and 1.2B weights.

Candidates take turns with the one of like size. The first one checks the health of devices.
"""


@dataclass(frozen=True, slots=True)
class Support:
    """The verdict of a runtime on a layout.

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

    def runs_on(self, build: str) -> bool:
        """Returns whether a space admits the layout whose key `build` for the runtime is 'stock' or 'any'."""
        return self.verdict == "stock" or (self.verdict == "patched" and build == "any")


class StateDict(Protocol):
    """Tensors of a state dict of `nas.model.nn.model`, one at a time."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""

    @property
    def place(self) -> str:
        """Their origin, for messages."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor that exists."""

    def floats(self, name: str, cut: tuple[Any, ...] = ()) -> Floats:
        """Returns a tensor, or the part of it that `cut` indexes.

        Raises:
            InvalidInput: it is missing, or its values cannot be used.
        """


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Finite pseudo-random weights: speed does not depend on values, so they serve all device metrics."""

    seed: int = 0

    def describe(self) -> str:
        """Returns their identity in result keys."""
        return f"random:{self.seed}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Trained weights: a safetensors file of `nas.model.nn.model`'s state dict.

    Args:
        path: the file.
        sha256: its content, which names it in result keys.
    """

    path: Path
    sha256: str

    def describe(self) -> str:
        """Returns their identity in result keys."""
        return f"checkpoint:{self.sha256}"

    def is_intact(self) -> bool:
        """Returns whether the file is there and holds the content that is in result keys."""
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
        except OSError:
            return False

    def verified(self) -> Path:
        """Returns the path, to be opened; raises `InvalidInput` for a file that is not intact."""
        if not self.is_intact():
            raise InvalidInput(f"missing, or changed since it was checkpoint {self.sha256[:12]}", where=str(self.path))
        return self.path


Weights = RandomWeights | Checkpoint


class Artifact(BaseModel):
    """An exported model: layout x runtime x quantisation x weights. Its file is in the store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0, description="bytes")
    runtime: str
    quantisation: str
    layout_id: str
    arch: str
    patched: bool = False
    vectors: int = Field(0, ge=0, description="width of token vectors; 0: a language model")
    projector: InputFile | None = Field(
        None, description="file of the tower that reads images or sound; none: it reads text alone"
    )
    image_tokens: int = Field(0, ge=0, description="of an image at most")
    image_least: int = Field(64, ge=1, description="of an image at least, as `nas.core.tower.ImageTower.least`")
    weights: str = Field(description="`Weights.describe()`")
    recipe: PlanFile | None = Field(None, description="what was written in place of the file: the runner makes it")

    @property
    def file(self) -> InputFile:
        """The artifact as a plan's input."""
        return InputFile(sha256=self.sha256, size=self.size, recipe=self.recipe)

    @property
    def stored(self) -> PlanFile:
        """The file that was written: the model, or its recipe."""
        return self.file.travels

    @property
    def written(self) -> tuple[PlanFile, ...]:
        """Every file that was written: `stored`, then that of a tower at `projector_path`."""
        return (self.stored, *((self.projector.travels,) if self.projector else ()))

    @property
    def bytes(self) -> int:
        """Bytes of all its files on a device."""
        return self.size + (self.projector.size if self.projector else 0)


def projector_path(destination: Path) -> Path:
    """Returns where an export writes the file of a tower, beside that of the model."""
    return destination.with_name(f"{destination.name}.mmproj")


@dataclass(frozen=True, slots=True)
class GateReport:
    """The result of an equivalence gate, which compares a runtime with PyTorch.

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
        """Whether the error is finite and within the limit, and nothing else is wrong."""
        return self.error <= self.limit and not self.note

    def require(self) -> None:
        """Raises `CandidateFailed("gate")` for a graph that did not pass."""
        if not self.passed:
            logits = f"logits differ from PyTorch by {self.error:.2%}; rounding explains {self.limit:.2%}"
            raise CandidateFailed("gate", self.note or logits)


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check of `nas doctor`.

    Args:
        name: of the check.
        status: a failure keeps `nas launch` from working; a warning makes its numbers worse or fewer.
        detail: what was found.
        fix: what to do about it; None where the status is ok.
    """

    name: str
    status: Status
    detail: str
    fix: str | None = None


def finding_of(name: str, look: Callable[[], str], *, status: Status = "failure", fix: str | None = None) -> Finding:
    """Returns a finding with the result of `look`, or as `status` its error: 'problem: remedy', else `fix`."""
    try:
        return Finding(name, "ok", look())
    except NasError as error:
        problem, _, remedy = str(error).partition(": ")
        return Finding(name, status, problem, remedy or fix)


@dataclass(frozen=True)
class Pieces:
    """What GGUF files hold of SentencePiece's BPE, which joins first what has the greatest score.

    Args:
        scores: of tokens, by id.
        bytes: ids of the tokens for single bytes, of characters without a token.
        unknown: the token for what has none; None: there is none.
        prefix: whether a blank is put in front of a text.
    """

    scores: tuple[float, ...]
    bytes: frozenset[int]
    unknown: int | None
    prefix: bool


@dataclass(frozen=True)
class Vocabulary:
    """A BPE tokenizer, byte-level or SentencePiece's, with its special tokens.

    Args:
        tokens: by id; in byte-level BPE, bytes are written as GPT-2's letters for them.
        special: those that text in a prompt never becomes by itself.
        unused: ids without a token.
        merges: of byte-level BPE, first to last, "LEFT RIGHT".
        ids: purpose -> id of a special token.
        chat_template: Jinja; None: the model has none.
        pre_tokenizer: llama.cpp's name of how text is split before BPE.
        starts_texts: whether every text begins with the token for "bos".
        added: tokens besides the special ones that are found in a text before it is split.
        pieces: None: it is byte-level.
    """

    tokens: tuple[str, ...]
    special: frozenset[int]
    unused: frozenset[int]
    merges: tuple[str, ...]
    ids: Mapping[Purpose, int]
    chat_template: str | None
    pre_tokenizer: str
    starts_texts: bool
    added: frozenset[int] = frozenset()
    pieces: Pieces | None = None


@dataclass(frozen=True)
class ReleaseRequest:
    """A model to release.

    Args:
        folder: the model's own; files are written below it, under names relative to it.
        name: what files are called.
        layout: what it is.
        quantisations: which files to write; (): none were asked for.
        context: tokens that the files are meant for.
        vocabulary: makes the tokenizer, for files that hold one; raises `Unsupported` where they cannot.
        checkpoint: opens the weights as a checkpoint file, for tools that read one.
        license: identifier of the licence, for files that hold one; None: left open.
    """

    folder: Path
    name: str
    layout: Layout
    quantisations: tuple[str, ...]
    context: int
    vocabulary: Callable[[], Vocabulary]
    checkpoint: Callable[[], AbstractContextManager[Checkpoint]]
    license: str | None = None


@dataclass(frozen=True)
class ReleasePart:
    """Files that are written together.

    Args:
        name: for the log.
        inputs: what their bytes follow from besides the model, its weights and its tokenizer; JSON.
        write: writes them, from the model's weights.
        optional: whether the release is whole without them where `write` raises `Unsupported`.
    """

    name: str
    inputs: list[Any]
    write: Callable[[StateDict], Iterable[MemberFile]]
    optional: bool = False


@dataclass(frozen=True)
class Release:
    """The files that a runtime writes for a model.

    Args:
        loads: the architecture that loads it, or "none: " and why there is no file.
        parts: what is written, in order.
    """

    loads: str
    parts: tuple[ReleasePart, ...] = ()


class Build(Protocol):
    """A finished build of a runtime."""

    @property
    def folder(self) -> Path:
        """Holds the runner and what it loads."""

    @property
    def runner(self) -> Runner:
        """Its manifest."""

    @property
    def variant(self) -> str:
        """The instruction set, as people call it."""


class Runtime(Protocol):
    """One inference runtime. Implementations are stateless values; contract tests are in `nas.testing`.

    A runtime whose runner is compiled inherits most members from `nas.measure.runtimes.built_runtime.BuiltRuntime`.

    Example:
        >>> runtime = RUNTIMES["llama.cpp"]
        >>> artifact = runtime.export(layout, "q4_0", RandomWeights(), Path("model.gguf"))
        >>> plan = runtime.plan(artifact, runtime.runner("x86_64-linux"), Workload(prompt=512, gen=64), deadline_s=120)
        >>> runtime.parse(run_on_a_device(plan)).ttft_ms
        812.4
    """

    @property
    def name(self) -> str:
        """Its name in spaces, keys and the registry."""

    @property
    def quantisations(self) -> tuple[str, ...]:
        """Names of what `export` writes; the first is the default."""

    def require_quantisation(self, quantisation: str) -> None:
        """Raises `UnknownName` for what `export` does not write; a runtime may write more than it names."""

    @property
    def dispatches(self) -> bool:
        """Whether its library chooses kernels by the processor that it runs on, whatever its build was made for."""

    @property
    def writer_version(self) -> str:
        """Changes whenever the same inputs would give other bytes; part of export's result key."""

    def supports(self, layout: Layout) -> Support:
        """Returns whether and how the runtime carries `layout`. Pure, fast, and needs no build."""

    def export(
        self, layout: Layout, quantisation: str, weights: Weights, destination: Path, *, recipe: bool = False
    ) -> Artifact:
        """Writes the model file at `destination`, and that of a tower at `projector_path`, atomically.

        The same inputs give the same bytes.

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

    def plan(
        self,
        artifact: Artifact,
        runner: Runner,
        workload: Workload,
        deadline_s: float,
        reference: Artifact | None = None,
    ) -> Plan:
        """Returns one repetition of `workload` as data.

        Args:
            artifact: the model.
            runner: the build.
            workload: the request.
            deadline_s: seconds after which the process is killed.
            reference: a model that takes turns with it; only for a runner with the option `--reference`.

        Raises:
            Unsupported: the workload needs something that this runtime lacks, or the runner is not for this artifact.
        """

    def parse(self, raw: RawRun) -> Sample:
        """Returns the measurements of one run.

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
        self,
        target: str,
        features: Collection[str] | None = None,
        patched: bool = False,
        libc: str | None = None,
        *,
        images: bool = False,
    ) -> Runner:
        """Returns the runner of the best available build for a device.

        Args:
            target: the device's ABI, such as "x86_64-linux".
            features: its CPU features, by the kernel's names; `None`: this machine's, or of another kind of machine
                those that every one of its kind has.
            patched: whether the artifact needs the patched build.
            libc: its C library, as `Device.libc`; `None`: unknown.
            images: whether the runner must encode images or sounds in front of a prompt.

        Raises:
            InfrastructureFailed: no such build, or none that runs with its C library; the message names the command
                that makes one.
        """

    def runner_folder(self, runner: Runner) -> Path:
        """Returns the folder with the files of `runner` on this machine.

        Raises:
            InfrastructureFailed: the build is gone.
        """

    def reference_models(self) -> Sequence[Layout]:
        """Returns fixed layouts of growing size that candidates are measured against.

        The first, of about 30M weights, checks the health of devices.
        """

    def reference_workload(self) -> Workload:
        """Returns the fixed workload of health checks, about a second long on a laptop core."""

    def builds(self) -> Sequence[Build]:
        """Returns the available builds, the best instruction set first."""

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
    ) -> Build:
        """Returns the build for a machine, and makes it unless the cache has it: `nas runtime build`.

        Args:
            target: "host", this machine's ABI, or another that can be compiled for here.
            log: gets progress, a line at a time.
            patched: with our patches.
            variant: instruction set; `None`: the best of this machine, of another one the best that is common.
            tools: also build the runtime's own tools.
            static: one file that needs no libraries.
            images: also encode images and sounds in front of a prompt.

        Raises:
            InfrastructureFailed: a compiler, network or disk space is missing, or a step failed; with the remedy.
            InvalidInput: unknown target or variant, or the runtime has no such build.
        """

    def doctor(self) -> Iterable[Finding]:
        """Checks this machine for `nas doctor`; a failure only where `nas launch` needs it."""

    def trim(self, limit_bytes: int) -> int:
        """Removes what exports cached, least recently used first, until it holds `limit_bytes`. Bytes removed.

        Raises:
            InfrastructureFailed: a file cannot be removed.
        """

    def release(self, request: ReleaseRequest) -> Release:
        """Returns the files of a released model, to be written later."""


@runtime_checkable
class FileInspector(Protocol):
    """A runtime that can tell from a model file which of its builds loads it."""

    def needs_patched(self, model: Path) -> bool:
        """Returns whether only the patched build loads `model`.

        Raises:
            InvalidInput: it is no model file of this runtime.
        """


@runtime_checkable
class TextScorer(Protocol):
    """A runtime whose model files hold a tokenizer, so that text can be scored with a file alone."""

    def bits_per_byte(self, model: Path, texts: Sequence[str], threads: int) -> float:
        """Returns bits per byte of `texts`, here on this machine, in windows of 512 tokens.

        Raises:
            Unsupported: the file holds no tokenizer, or the texts have no tokens but first ones.
            InvalidInput: it is no model file of this runtime.
            CandidateFailed: the runtime died on it.
            InfrastructureFailed: a build is missing.
        """


@runtime_checkable
class RoundingRuntime(Protocol):
    """A runtime whose quantisations PyTorch can compute with: a trained model is scored as its file would be."""

    def rounded(self, layout: Layout, quantisation: str, checkpoint: Checkpoint) -> nn.Module:
        """Returns the model in PyTorch with the weights that the exported file has; activations are not rounded.

        Args:
            layout: of the model.
            quantisation: one of `Runtime.quantisations`.
            checkpoint: the trained weights.

        Raises:
            InvalidInput: unknown quantisation, or a checkpoint that does not fit the layout.
            InfrastructureFailed: it needs a build for this machine, and there is none.
        """


@runtime_checkable
class BlockRoundingRuntime(RoundingRuntime, Protocol):
    """One that rounds blocks by themselves, so that `nas adapt` chooses quantisations with blocks."""

    @property
    def name(self) -> str:
        """As of `Runtime`."""

    @property
    def writer_version(self) -> str:
        """As of `Runtime`."""

    def rounded_block(
        self, layout: Layout, block: Block, quantisation: str, weights: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns the state dict of a block in PyTorch with the values that a file has.

        Args:
            layout: of the model that has the block.
            block: one that the runtime carries.
            quantisation: of the block, without parts.
            weights: its state dict.

        Raises:
            UnknownName: no such quantisation.
            InfrastructureFailed: it needs a build for this machine, and there is none.
        """


@runtime_checkable
class Profiler(Protocol):
    """A runtime that can time the parts of a model one by one, for `nas bench --profile`.

    Example:
        >>> profiler = runtime.profiler(plan.runner, print)
        >>> raw = run_on_a_device(runtime.plan(artifact, profiler, workload, deadline_s=120))
        >>> runtime.read_profile(raw, layout).decode.nodes[0]
        NodeTime(layer=0, part='mixer', operator='MUL_MAT', nodes=256, ns=1290000)
    """

    def profiler(self, runner: Runner, log: Log) -> Runner:
        """Returns the profiler that uses the libraries of `runner`, and makes it unless the cache has it.

        It runs the same plans as the runner; its files are in `Runtime.runner_folder`.

        Raises:
            InfrastructureFailed: a compiler, network or disk space is missing, or a step failed; with the remedy.
        """

    def read_profile(self, raw: RawRun, layout: Layout | None) -> Profile:
        """Returns the times of one run of the profiler.

        Args:
            raw: the run.
            layout: of the model; None: the model is somebody's file.

        Raises:
            Unsupported: the runtime needs a layout, and there is none.
            CandidateFailed: see `Runtime.parse`.
            InfrastructureFailed: the profiler itself could not work.
        """


@runtime_checkable
class WholeExporter(Protocol):
    """A runtime whose artifacts are for measuring only, and which can write a standard file for apps, too.

    Example:
        >>> EXECUTORCH.export_whole(layout, "8da4w", checkpoint, context=4096, destination=Path("model.pte")).arch
        'whole graph'
    """

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
