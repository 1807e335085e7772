"""The records of a family: a folder of small JSON files, one writer each, which pages and tables read.

    FAMILY/family.json              what `nas family build` decided          Family
    FAMILY/SIZE/files.json          what was written for a member            MemberFiles
    FAMILY/SIZE/training.json       how its weights were trained             MemberTraining
    FAMILY/comparison-DEVICE-KEY.json   members and reference models on a device   Comparison

Each is replaced as a whole, so that a build, a training and a comparison that run side by side lose nothing.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from nas.core.durable import write_durably
from nas.core.errors import InvalidInput

FAMILY, FILES, TRAINING = "family.json", "files.json", "training.json"
Metric = Literal["prefill_tps", "decode_tps", "ttft_ms", "peak_rss_mb"]


class Record(BaseModel):
    """A frozen record; keys that it does not know are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Kind = TypeVar("Kind", bound=Record)


class Decision(Record):
    """One choice of the build, and why."""

    what: str = Field(description="such as 'depth' or 'layout'")
    value: str
    reason: str


class Source(Record):
    """A layout that the family's pattern was taken from."""

    layout: str = Field(description="one-line string")
    trial: int | None = Field(None, description="its number in the study; None: it was given")
    objectives: dict[str, float] = Field(default_factory=dict)


class Figure(Record):
    """One measured number of a model on a device."""

    metric: Metric
    prompt: int = Field(description="tokens in the context before the timed part, or the context of a peak")
    value: float | None = None
    ci95: tuple[float, float] | None = None
    reason: str = Field("", description="why there is no value")


class Measured(Record):
    """The figures of a layout on one device and runtime."""

    device: str
    runtime: str
    quantisation: str
    threads: int
    figures: tuple[Figure, ...]
    searched: bool = Field(True, description="whether the search used this device")
    noisy: bool = False


class Tried(Record):
    """A layout that a size's small search considered."""

    layout: str
    parameters: int
    active: int
    chosen: bool
    verdict: str = Field(description="why it was chosen or not")
    objectives: dict[str, float] = Field(default_factory=dict)
    measured: tuple[Measured, ...] = ()


class Member(Record):
    """One size of a family."""

    size: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="as asked for, such as '350M' or '8B-A1B'; also the name of its folder",
    )
    layout: str = Field(description="one-line string")
    parameters: int
    active: int
    non_embedding: int
    decisions: tuple[Decision, ...]
    tried: tuple[Tried, ...]
    measured: tuple[Measured, ...] = ()


class Family(Record):
    """What `nas family build` decided."""

    v: Literal[1] = 1
    name: str
    study: str | None = Field(None, description="whose front it was built from; None: from given layouts")
    made: str = Field(description="UTC, ISO 8601")
    seed: int
    pattern: str = Field(description="the shared order of blocks, in words or letters")
    sources: tuple[Source, ...]
    decisions: tuple[Decision, ...]
    members: tuple[Member, ...]
    provenance: dict[str, str] = Field(default_factory=dict, description="versions: hilnas, runtimes' builds, space")


class MemberFile(Record):
    """One file of a member."""

    path: str = Field(description="below the member's folder, with '/'")
    kind: Literal["transformers", "gguf", "pte", "tokenizer", "card", "checkpoint"]
    quantisation: str = ""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0, description="bytes")
    key: str = Field("", description="hash of all that it was made from: the same key, the same file")

    @field_validator("path")
    @classmethod
    def _stays_below(cls, path: str) -> str:
        """A family may come from somebody else, and what a record lists is read, sent and removed."""
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise ValueError(f"{path!r} leaves the member's folder")
        return path


class MemberFiles(Record):
    """What was written for a member."""

    layout: str
    weights: str = Field(description="`Weights.describe()`: random:SEED or checkpoint:SHA256")
    loads: dict[str, str] = Field(
        description="transformers, llama.cpp, executorch -> the class or architecture that loads it, or why none does"
    )
    files: tuple[MemberFile, ...]
    context: int | None = Field(None, description="tokens that the model is meant for; None: not on record")
    pte_context: int | None = Field(None, description="tokens of a text in the .pte that was asked for; None: none was")


class MemberTraining(Record):
    """How a member's weights were trained."""

    checkpoint: str = Field(pattern=r"^[0-9a-f]{64}$")
    config: dict[str, Any]
    start: str = Field(description="random:SEED, or grown from the checkpoint of a smaller layout")
    tokens: int
    steps: int
    curve: tuple[tuple[int, float], ...] = Field(description="(step, training loss in nats per token)")
    held_out: dict[str, float] = Field(description="what was scored -> bits per byte")
    seconds: float
    device: str


class ComparedModel(Record):
    """A model in a comparison."""

    name: str
    member: bool
    parameters: int
    architecture: str = Field(description="the runtime's own name")
    source: str = Field("", description="where a reference model's configuration is published")
    measured: Measured


class Ratio(Record):
    """How much faster one model is than another, here and in the report."""

    model: str
    other: str
    metric: Metric
    prompt: int
    here: float | None
    report: dict[str, float] = Field(default_factory=dict, description="the report's device -> its ratio")


class Comparison(Record):
    """Members and reference models under the same conditions on one device."""

    family: str | None
    device: str
    conditions: dict[str, str] = Field(description="cpu, threads, runtime build, flash attention ...")
    made: str
    models: tuple[ComparedModel, ...]
    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...] = Field((), description="what explains differences")


def write_record(path: Path, record: Record) -> None:
    """Replaces the file at `path` at once; the folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, record.model_dump_json(indent=1).encode())


def read_record(path: Path, kind: type[Kind]) -> Kind | None:
    """What was written at `path`; None where there is no file.

    Raises:
        InvalidInput: it holds something else.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors()[0]
        raise InvalidInput(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}", where=str(path)) from None
