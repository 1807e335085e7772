"""Records of a model family: a folder of small JSON files with one writer each, read by pages and tables.

    FAMILY/family.json              decisions of `nas family build`          Family
    FAMILY/SIZE/files.json          files of a member                        MemberFiles
    FAMILY/SIZE/training.json       training of its weights                  MemberTraining
    FAMILY/SIZE/evaluation.json     exact answers of its weights and files   MemberEvaluation
    FAMILY/SIZE/benchmarks.json     right answers to public benchmarks       MemberEvaluation
    FAMILY/comparison-DEVICE-KEY.json   members and reference models on a device   Comparison

Each is replaced as a whole, so that a build, a training and a comparison can run at the same time.
"""

from __future__ import annotations

import math
import re
from itertools import chain
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nas.core import paths
from nas.core.durable import write_durably
from nas.core.errors import InvalidInput, UnknownName
from nas.core.metrics import recorded
from nas.core.stats import Z95, share_interval

FAMILY = "family.json"
FILES = "files.json"
TRAINING = "training.json"
EVALUATION = "evaluation.json"
BENCHMARKS = "benchmarks.json"
AVERAGE = "all benchmarks"
PRETRAININGS = ("pretrain", "long")
"""Kinds of trainings on text, which are scored in bits per byte."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _recorded_metric(name: str) -> str:
    names = [metric.name for metric in recorded()]
    if name not in names:
        raise UnknownName("metric of a family", name, names)
    return name


RecordedMetric = Annotated[str, AfterValidator(_recorded_metric)]


class FamilyRecord(BaseModel):
    """A frozen record; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Kind = TypeVar("Kind", bound=FamilyRecord)


class BuildDecision(FamilyRecord):
    """One decision of the build, and its reason."""

    what: str = Field(description="such as 'depth' or 'layout'")
    value: str
    reason: str


class Source(FamilyRecord):
    """A layout that the family's pattern was taken from."""

    layout: str = Field(description="one-line string")
    trial: int | None = Field(None, description="its number in the study; None: it was given")
    objectives: dict[str, float] = Field(default_factory=dict)


class RecordedFigure(FamilyRecord):
    """One measured number of a model on a device."""

    metric: RecordedMetric
    prompt: int = Field(description="tokens in the context before the timed part, or the context of a peak")
    value: float | None = None
    ci95: tuple[float, float] | None = None
    reason: str = Field("", description="why there is no value")


class MeasuredModel(FamilyRecord):
    """The figures of a layout on one device and runtime."""

    device: str
    runtime: str
    quantisation: str
    threads: int
    figures: tuple[RecordedFigure, ...]
    searched: bool = Field(True, description="whether the search used this device")


class ConsideredLayout(FamilyRecord):
    """A layout that a size's small search considered."""

    layout: str
    parameters: int
    active: int
    chosen: bool
    verdict: str = Field(description="why it was chosen or not")
    objectives: dict[str, float] = Field(default_factory=dict)
    measured: tuple[MeasuredModel, ...] = ()


class Member(FamilyRecord):
    """One size of a family."""

    size: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="as asked for, such as '350M' or '8B-A1B'; also the name of its folder",
    )
    layout: str = Field(description="one-line string")
    parameters: int
    active: int
    non_embedding: int
    decisions: tuple[BuildDecision, ...]
    tried: tuple[ConsideredLayout, ...]
    measured: tuple[MeasuredModel, ...] = ()


class Family(FamilyRecord):
    """Decisions of `nas family build`."""

    v: Literal[1] = 1
    name: str
    study: str | None = Field(None, description="whose front it was built from; None: from given layouts")
    made: str = Field(description="UTC, ISO 8601")
    seed: int
    pattern: str = Field(description="the shared order of blocks, in words or letters")
    sources: tuple[Source, ...]
    decisions: tuple[BuildDecision, ...]
    members: tuple[Member, ...]
    provenance: dict[str, str] = Field(default_factory=dict, description="versions: hilnas, runtimes' builds, space")


class MemberFile(FamilyRecord):
    """One file of a member."""

    path: str = Field(description="below the member's folder, with '/'")
    kind: str = Field(description="transformers, gguf, pte, tokenizer, card, checkpoint; or what a runtime calls it")
    quantisation: str = ""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0, description="bytes")
    key: str = Field("", description="hash of all that it was made from: the same key, the same file")

    @field_validator("path")
    @classmethod
    def _stays_below(cls, path: str) -> str:
        """Refuses paths outside the folder: a family may be untrusted, and listed files are read, sent and deleted."""
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise ValueError(f"{path!r} leaves the member's folder")
        return path


class MemberFiles(FamilyRecord):
    """Files of a member."""

    layout: str
    weights: str = Field(description="`Weights.describe()`: random:SEED or checkpoint:SHA256")
    loads: dict[str, str] = Field(
        description="transformers, llama.cpp, executorch -> the class or architecture that loads it, or why none does"
    )
    files: tuple[MemberFile, ...]
    context: int | None = Field(None, description="tokens that the model is meant for; None: not on record")
    pte_context: int | None = Field(None, description="tokens of a text in the .pte that was asked for; None: none was")
    license: str | None = Field(None, description="identifier of the licence; None: left open")


class TaskScore(FamilyRecord):
    """Exact answers to the questions of a task."""

    exact: int
    questions: int
    ci95: tuple[float, float] = Field(description="of the share of exact answers (Wilson 1927)")
    lost: int | None = Field(None, description="questions that PyTorch, or the first model, answers and this does not")
    gained: int | None = Field(
        None, description="questions that this answers and PyTorch, or the first model, does not"
    )

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if not all(0 <= (count or 0) <= self.questions > 0 for count in (self.exact, self.lost, self.gained)):
            raise ValueError("more or fewer answers than questions")
        return self

    @staticmethod
    def of(exact: int, questions: int, lost: int | None = None, gained: int | None = None) -> TaskScore:
        """Returns the counts with their interval."""
        ci95 = share_interval(exact, questions)
        return TaskScore(exact=exact, questions=questions, ci95=ci95, lost=lost, gained=gained)

    @property
    def share(self) -> float:
        """Share of exact answers."""
        return self.exact / self.questions

    @property
    def change(self) -> tuple[float, float, float] | None:
        """Share of exact answers less PyTorch's, and the ends of its 95 % interval; None: this is PyTorch's.

        The same questions are answered twice, so the interval is that of paired shares, with half a question added to
        each cell of the table (Bonett and Price 2012, equation 4).
        """
        if self.lost is None or self.gained is None:
            return None
        less, more = ((count + 1) / (self.questions + 2) for count in (self.lost, self.gained))
        half = Z95 * math.sqrt((less + more - (more - less) ** 2) / (self.questions + 2))
        low, high = max(-1.0, more - less - half), min(1.0, more - less + half)
        return (self.gained - self.lost) / self.questions, low, high

    def __str__(self) -> str:
        """Returns share and interval, such as '27.5% (20.3 to 36.1)'."""
        low, high = self.ci95
        return f"{self.share:.1%} ({100 * low:.1f} to {100 * high:.1f})"


PYTORCH = "pytorch"


class Evaluation(FamilyRecord):
    """Exact or right answers of models to the same questions."""

    tasks: str = Field(description="name of the file of questions, or the benchmarks")
    scores: dict[str, dict[str, TaskScore]] = Field(
        description="model, of a member pytorch or a quantisation -> task -> answers"
    )
    missing: dict[str, str] = Field(default_factory=dict, description="model -> why it has no scores")
    groups: dict[str, dict[str, tuple[str, ...]]] = Field(
        default_factory=dict,
        description="group -> benchmark -> the tasks whose mean is its score",
    )
    versions: dict[str, int] = Field(default_factory=dict, description="benchmark -> its configuration's")

    @model_validator(mode="after")
    def _is_of_the_same_tasks(self) -> Self:
        first, *others = (set(scores) for scores in self.scores.values()) if self.scores else (set(),)
        means = [set(tasks) for benchmarks in self.groups.values() for tasks in benchmarks.values()]
        if not first or any(tasks != first for tasks in others) or not all(tasks and tasks <= first for tasks in means):
            raise ValueError("models answer no tasks, or not the same ones")
        return self

    @property
    def means(self) -> dict[str, dict[str, float]]:
        """Mean scores of the benchmarks of each group, and `AVERAGE` of all, unweighted: group -> file -> share."""
        if not self.groups:
            return {}
        every = {name: tasks for benchmarks in self.groups.values() for name, tasks in benchmarks.items()}
        return {
            group: {
                file: fmean(fmean(scores[task].share for task in tasks) for tasks in benchmarks.values())
                for file, scores in self.scores.items()
            }
            for group, benchmarks in {**self.groups, AVERAGE: every}.items()
        }

    @property
    def head(self) -> list[str]:
        """Heads of the columns of `rows`."""
        first, *others = self.scores
        base = "PyTorch" if first == PYTORCH else first
        return ["task", "questions", first, *chain(*((name, f"{name} less {base}, points") for name in others))]

    @property
    def rows(self) -> list[list[str]]:
        """A line for each task: name, questions, and shares with intervals; of all but the first also the change.

        Means of groups follow, without intervals.
        """
        first = next(iter(self.scores.values()))
        rows = [
            [
                task,
                f"{one.questions}",
                *(cell for file_scores in self.scores.values() for cell in _cells(file_scores[task])),
            ]
            for task, one in first.items()
        ]
        for group, shares in self.means.items():
            pytorch, *files = shares.values()
            changes = [cell for share in files for cell in (f"{share:.1%}", f"{100 * (share - pytorch):+z.1f}")]
            rows.append([f"mean: {group}", "", f"{pytorch:.1%}", *changes])
        return rows

    @property
    def notes(self) -> list[str]:
        """What the numbers are, and why some are missing."""
        about = (
            f"Questions of {self.tasks}, greedy decoding, 95 % intervals: Wilson's of shares, and those of Bonett and "
            "Price of changes in percentage points, from the same questions."
        )
        if self.versions:
            versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
            about += f" Means weigh benchmarks equally. Versions of configurations: {versions}."
        return [about, *(f"{name}: none: {reason}" for name, reason in self.missing.items())]


class MemberEvaluation(Evaluation):
    """Those of a member's weights in PyTorch, and of its files."""

    weights: str = Field(description="checkpoint:SHA256")


def _cells(score: TaskScore) -> list[str]:
    if score.change is None:
        return [str(score)]
    value, low, high = (100 * share for share in score.change)
    return [str(score), f"{value:+z.1f} ({low:+z.1f} to {high:+z.1f})"]


class MemberTraining(FamilyRecord):
    """A training of a member's weights."""

    checkpoint: str = Field(pattern=r"^[0-9a-f]{64}$")
    config: dict[str, Any]
    start: str = Field(description="random:SEED, or where the weights that it started from come from")
    tokens: int
    steps: int
    curve: tuple[tuple[int, float], ...] = Field(description="(step, training loss in nats per token)")
    held_out: dict[str, float] = Field(description="name of a text or data set -> its score, such as bits per byte")
    seconds: float
    peak_memory_mb: float | None = Field(
        None,
        description="of worker 0 in its last run: resident memory, on a GPU what torch allocated; null: unknown",
    )
    spent: dict[str, float] = Field(
        default_factory=dict,
        description="seconds of the last run by what they were spent on: prepare, sample, judge, train, score",
    )
    prepare_memory_mb: float | None = Field(
        None,
        description="peak resident memory of the process that prepared the data and merged; null: unknown",
    )
    device: str
    kind: str = Field("pretrain", description="such as 'pretrain'")
    name: str = Field("", description="by which later stages of a recipe name it")
    before: tuple[MemberTraining, ...] = Field((), description="the trainings before it, in order; see `start`")

    @property
    def label(self) -> str:
        """Name, or kind where it has none."""
        return self.name or self.kind

    @property
    def whole_s(self) -> float:
        """Seconds of all steps, and of what came before and after them in the last run."""
        return self.seconds + sum(seconds for what, seconds in self.spent.items() if what != "train")

    @property
    def history(self) -> tuple[MemberTraining, ...]:
        """All trainings up to this one, which is the last."""
        return *self.before, self.model_copy(update={"before": ()})


class ComparedModel(FamilyRecord):
    """A model in a comparison."""

    name: str
    member: bool
    parameters: int
    architecture: str = Field(description="the runtime's own name")
    source: str = Field("", description="where a reference model's configuration is published")
    measured: MeasuredModel


class Ratio(FamilyRecord):
    """Speed ratio of two models, measured here and in the report."""

    model: str
    other: str
    metric: RecordedMetric
    prompt: int
    here: float | None
    report: dict[str, float] = Field(default_factory=dict, description="the report's device -> its ratio")


class Comparison(FamilyRecord):
    """Members and reference models under the same conditions on one device."""

    family: str | None
    device: str
    conditions: dict[str, str] = Field(description="cpu, threads, runtime build, flash attention ...")
    made: str
    models: tuple[ComparedModel, ...]
    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...] = Field((), description="what explains differences")


def write_record(path: Path, record: FamilyRecord) -> None:
    """Replaces the file at `path` atomically; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, record.model_dump_json(indent=1).encode())


def read_record(path: Path, kind: type[Kind]) -> Kind | None:
    """Reads the record at `path`; None where there is no file.

    Raises:
        InvalidInput: it is no such record.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise InvalidInput(f"{place}: {problem['msg']}" if place else problem["msg"], where=str(path)) from None


def families_folder() -> Path:
    """Returns the folder that holds all families."""
    return paths.home() / "families"


def family_folder(name: str) -> Path:
    """Returns the folder of the family called `name`, whether it exists or not."""
    return families_folder() / _checked_name(name, "a family's name")


def check_new_name(name: str) -> None:
    """Raises `InvalidInput` if no new family can have the name: `NAME.json` is the address of the data of `NAME`."""
    if name.endswith(".json"):
        raise InvalidInput(f"{name!r} is the address of another family's data; choose one that does not end in '.json'")


def member_folder(family: str, size: str) -> Path:
    """Returns the folder of a member's files, whether it exists or not."""
    return family_folder(family) / _checked_name(size, "a size")


def _checked_name(name: str, what: str) -> str:
    """Refuses what cannot be a folder's name: names come from flags and URLs."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{what} has up to 64 letters, digits, '.', '_' and '-', and begins with a letter or a digit, not {name!r}"
        )
    return name


def read_family(name: str) -> Family:
    """Reads what the build of `name` decided; raises `UnknownName` or, for a damaged record, `InvalidInput`."""
    family = read_record(family_folder(name) / FAMILY, Family)
    if family is None:
        raise UnknownName("family", name, [file.parent.name for file in families_folder().glob(f"*/{FAMILY}")])
    return family
