"""The stages of a member from text to chat as one list in a YAML file, and running them in turn.

    tokenizer: tokenizer.json          # none: that of `start`, or the member's own
    date: 2025-01-01                   # today, for chat templates that name it
    start: adapted/                    # none: weights of the stages themselves; see `nas.train.posttrain.start`
    stages:
      - {kind: pretrain, corpus: [texts/], settings: {tokens: 20000000}}
      - {kind: long, corpus: [books/]}
      - {kind: sft, data: [{path: chat.jsonl}], epochs: 3}
      - {kind: prefer, questions: [chat.jsonl], judge: exact}
      - {kind: merge, method: ties, models: [sft, prefer]}
      - {kind: retrieval, data: [pairs.jsonl]}          # last: a model of its own, in the member's folder retrieval/

A stage continues the weights of the one before, or of the earlier one that `from` names; the first one those of
`start`, else those of the trainings of other kinds on record, or random ones. Stages that have ended are skipped, and
the one that was interrupted resumes, so a run continues by being started again.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nas.core.errors import InvalidInput
from nas.core.family import TRAINING, MemberTraining, read_record
from nas.core.progress import Log
from nas.core.strict import StrictKeys
from nas.train.posttrain.merging import MergeRequest, MergeStageSettings
from nas.train.posttrain.prefer import PreferRequest, PreferSettings
from nas.train.posttrain.sft import SftRequest, SftSettings
from nas.train.posttrain.start import StartRequest, origin_of, require_member
from nas.train.pretrain.member_training import (
    TrainingRequest,
    before_first,
    names_of,
    train_member,
)
from nas.train.pretrain.next_token import LongRequest, PretrainingRequest
from nas.train.pretrain.recipe import Settings
from nas.train.release.files import find_member, tokenizer_of
from nas.train.release.options import FileOptions
from nas.train.release.templates import DATE
from nas.train.retrieval.data import read_examples
from nas.train.retrieval.training import RetrievalSettings, train_retriever

_NAME = r"^$|^[a-z0-9][a-z0-9_-]{0,63}$"


class _Named(BaseModel):
    """What stages of all kinds have."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str = Field("", pattern=_NAME, description="by which later stages name this one; none: its kind")
    origin: str = Field("", alias="from", description="earlier stage to start from, by name or kind; none: the last")


class _TextStage(_Named, StrictKeys):
    corpus: tuple[str, ...] = ()
    settings: Settings = Settings()

    def _resolved(self, paths: Paths) -> tuple[tuple[Path, ...], Settings]:
        """Returns text and settings, with resolved paths."""
        stages = self.settings.stages and tuple(
            stage.model_copy(update={"corpus": tuple(map(paths.file, stage.corpus))}) for stage in self.settings.stages
        )
        corpus = tuple(Path(paths.file(path)) for path in self.corpus)
        return corpus, self.settings.model_copy(update={"stages": stages})


class PretrainStage(_TextStage):
    """Pre-training on text, which may itself have stages of growing length."""

    kind: Literal["pretrain"]

    def request(self, paths: Paths) -> TrainingRequest:
        """Returns the request, with resolved paths."""
        return PretrainingRequest(*self._resolved(paths))


class LongStage(_TextStage):
    """Pre-training on text in long sequences."""

    kind: Literal["long"]

    def request(self, paths: Paths) -> TrainingRequest:
        """Returns the request, with resolved paths."""
        return LongRequest(*self._resolved(paths))


class SftStage(_Named, SftSettings):
    """Supervised fine-tuning on conversations."""

    kind: Literal["sft"]

    def request(self, paths: Paths) -> TrainingRequest:
        """Returns the request, with resolved paths."""
        fields = _settings(self, paths, "evaluate")
        fields["data"] = [{**source, "path": paths.file(source["path"])} for source in fields["data"]]
        if self.curriculum is not None:
            fields["curriculum"]["models"] = [*map(paths.weights, self.curriculum.models)]
        return SftRequest(settings=SftSettings.model_validate(fields))


class PreferStage(_Named, PreferSettings):
    """Preference alignment."""

    kind: Literal["prefer"]

    def request(self, paths: Paths) -> TrainingRequest:
        """Returns the request, with resolved paths."""
        fields = _settings(self, paths, "evaluate", "pairs", "questions")
        if self.judge_model is not None:
            fields["judge_model"] = paths.file(self.judge_model)
        return PreferRequest(settings=PreferSettings.model_validate(fields))


class MergeStage(_Named, MergeStageSettings):
    """Merge of the weights of earlier stages."""

    kind: Literal["merge"]

    def request(self, paths: Paths) -> TrainingRequest:
        """Returns the request, with resolved paths."""
        fields = _settings(self, paths, "evaluate")
        fields["models"] = [*map(paths.weights, self.models)]
        fields["base"] = self.base and paths.weights(self.base)
        return MergeRequest(settings=MergeStageSettings.model_validate(fields))


class RetrievalStage(RetrievalSettings):
    """Training of a late-interaction model from the weights of the stage before, in a folder of its own."""

    kind: Literal["retrieval"]
    name: str = Field("", pattern=_NAME, description="of the folder, behind retrieval-; none: retrieval")
    data: tuple[str, ...] = Field(min_length=1)

    @property
    def folder(self) -> str:
        """Name of the folder, in that of the member."""
        return f"retrieval-{self.name}" if self.name else "retrieval"

    def settings(self) -> RetrievalSettings:
        """Returns the settings of the training."""
        return RetrievalSettings.model_validate(self.model_dump(exclude={"kind", "name", "data"}))


_Stage = PretrainStage | LongStage | SftStage | PreferStage | MergeStage
AnyStage = Annotated[_Stage | RetrievalStage, Field(discriminator="kind")]
"""A stage; another kind of the member's own weights is one more class here, with a `kind` and a method `request`."""

KINDS = ("start", *(get_args(stage.model_fields["kind"].annotation)[0] for stage in get_args(_Stage)))
"""Kinds of stages, by which later ones may name them."""


@dataclass(frozen=True)
class Paths:
    """Resolves paths of a recipe.

    Args:
        folder: relative paths begin here.
        names: of stages, which are no paths.
    """

    folder: Path
    names: frozenset[str]

    def file(self, path: str) -> str:
        """Returns the path of a file or folder."""
        return str(self.folder / path)

    def weights(self, name: str) -> str:
        """Returns the name of a stage as it is, and the path of weights."""
        return name if name in self.names else self.file(name)


def _settings(stage: BaseModel, paths: Paths, *names: str) -> dict[str, Any]:
    """Returns the settings of a stage, with the paths in the fields `names` resolved."""
    fields = stage.model_dump(exclude={"kind", *_Named.model_fields})
    if fields.get("benchmarks"):
        fields["benchmarks"] = paths.file(fields["benchmarks"])
    return fields | {name: [*map(paths.file, fields[name])] for name in names}


class PostTrainingRecipe(StrictKeys):
    """Content of a recipe file."""

    tokenizer: str | None = None
    start: str | None = Field(None, description="folder of `nas adapt` or of transformers, with the first weights")
    date: datetime.date = Field(
        datetime.date.fromisoformat(DATE), description="today, for chat templates that name it: weights depend on it"
    )
    stages: tuple[AnyStage, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names(self) -> PostTrainingRecipe:
        names = [stage.name for stage in self.stages if stage.name]
        for name in names:
            if name in KINDS or names.count(name) > 1:
                why = "is a kind of stage" if name in KINDS else "is the name of two stages"
                raise InvalidInput(f"{name!r} {why}", where="stages")
        if any(isinstance(stage, RetrievalStage) for stage in self.stages[:-1]):
            raise InvalidInput("a stage `retrieval` is the last: no stage starts from its weights", where="stages")
        if self.retrieval is not None and len(self.stages) == 1 and self.start is None:
            raise InvalidInput("nothing comes before `retrieval`; use `nas family retrieval`", where="stages")
        return self

    @property
    def retrieval(self) -> RetrievalStage | None:
        """The last stage, if it trains a model of its own."""
        last = self.stages[-1]
        return last if isinstance(last, RetrievalStage) else None

    def requests(
        self, folder: Path, member_tokenizer: Path | None = None, recorded: Collection[str] = ()
    ) -> list[TrainingRequest]:
        """Returns the requests of all stages that train the member's own weights.

        Args:
            folder: relative paths begin there.
            member_tokenizer: tokenizer.json where the recipe names none; None: the member's own.
            recorded: names of the trainings that ended before the first stage.
        """
        names = Paths(folder, frozenset({*KINDS, *recorded, *(stage.name for stage in self.stages)}))
        tokenizer = member_tokenizer if self.tokenizer is None else folder / self.tokenizer
        requests: list[TrainingRequest] = []
        if self.start is not None:
            requests.append(StartRequest(folder=folder / self.start, tokenizer=tokenizer))
        stages = [stage for stage in self.stages if not isinstance(stage, RetrievalStage)]
        for stage, after in zip_longest(stages, stages[1:]):
            request = stage.request(names)
            if isinstance(request, PretrainingRequest) and isinstance(after, LongStage):
                request = replace(request, only=request.only or "pretrain")
            more = {"tokenizer": tokenizer, "name": stage.name, "origin": stage.origin, "date": str(self.date)}
            requests.append(replace(request, **more))
        texts = [path for request in requests if isinstance(request, PretrainingRequest) for path in request.texts]
        return [
            replace(request, alongside=tuple(texts)) if isinstance(request, PretrainingRequest) else request
            for request in requests
        ]


def run_recipe(
    family: str,
    size: str,
    recipe: PostTrainingRecipe,
    folder: Path,
    log: Log,
    *,
    workers: int | None = None,
    files: FileOptions | None = None,
    checkpoint_s: float = 60.0,
) -> MemberTraining:
    """Runs the stages of a recipe that have not ended; writes the member's files after the last one.

    Args:
        family: name of the family.
        size: of the member.
        recipe: its stages.
        folder: relative paths of the recipe begin here.
        log: takes one line at a time.
        workers: processes; see `TrainingRequest`.
        files: files to write.
        checkpoint_s: least seconds between checkpoints.

    Returns:
        The record of the last stage of the member's own weights, with those of the others in `before`.

    Raises:
        InvalidInput: files of any stage have problems, which are found before the first stage begins.
        NasError: see `train_member`.
    """
    before: tuple[MemberTraining, ...] = ()
    origin = None if recipe.start is None else origin_of(folder / recipe.start)
    if origin is None:
        member, _, _ = find_member(family, size)
        recorded = read_record(member / TRAINING, MemberTraining)
        tokenizer = None
        with suppress(InvalidInput):  # that a member has none is said by the first stage, after problems of files
            tokenizer = tokenizer_of(member)
        before = before_first(recipe.stages[0].kind, () if recorded is None else recorded.history)
        requests = recipe.requests(folder, tokenizer, names_of(before))
    else:
        requests = recipe.requests(folder, origin.tokenizer)
    names = names_of(before)
    for request in requests:
        request.check(names)
        names |= {request.kind, request.name} - {""}
    retrieval = recipe.retrieval
    data = [] if retrieval is None else [folder / path for path in retrieval.data]
    for path in data:
        read_examples(path)
    if origin is not None:
        require_member(family, size, origin)
    count = len(requests) + (retrieval is not None)
    for number, request in enumerate(requests, 1):
        log(f"stage {number} of {count}: {request.name or request.kind}")
        request = replace(request, workers=workers, checkpoint_s=checkpoint_s, files=files or FileOptions())
        record = train_member(family, size, request, log, before=before, last=number == len(requests))
        before = record.history
    if retrieval is not None:
        log(f"stage {count} of {count}: {retrieval.name or retrieval.kind}")
        output = find_member(family, size)[0] / retrieval.folder
        train_retriever((family, size), data, retrieval.settings(), output, log, checkpoint_s)
    return record
