"""The stages of a member from text to chat as one list in a YAML file, and running them in turn.

    tokenizer: tokenizer.json          # none: the member's own
    stages:
      - {kind: pretrain, corpus: [texts/], settings: {tokens: 20000000}}
      - {kind: sft, data: [{path: chat.jsonl}], epochs: 3}
      - {kind: prefer, questions: [chat.jsonl], judge: exact}
      - {kind: merge, method: ties, models: [sft, prefer]}

A stage continues the weights of the one before; the first one those of the trainings of other kinds on record. Stages
that have ended are skipped, and the one that was interrupted resumes, so a run continues by being started again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nas.core.family import MemberTraining
from nas.nn.fit import Log
from nas.posttrain.merging import STAGES, MergeRequest, MergeStageSettings
from nas.posttrain.prefer import PreferRequest, PreferSettings
from nas.posttrain.sft import SftRequest, SftSettings
from nas.pretrain.member_training import TrainingRequest, WriteFiles, train_member, write_files_of
from nas.pretrain.next_token import PretrainingRequest
from nas.pretrain.recipe import Settings
from nas.release.options import FileOptions
from nas.search_spaces.problems import read_model


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PretrainStage(_Config):
    """Pre-training on text, which may itself have stages of growing length."""

    kind: Literal["pretrain"]
    corpus: tuple[str, ...] = ()
    settings: Settings = Settings()

    def request(self, folder: Path) -> TrainingRequest:
        """Returns the request, with relative paths resolved from `folder`."""
        stages = self.settings.stages and tuple(
            stage.model_copy(update={"corpus": tuple(str(folder / each) for each in stage.corpus)})
            for stage in self.settings.stages
        )
        settings = self.settings.model_copy(update={"stages": stages})
        return PretrainingRequest(tuple(folder / each for each in self.corpus), settings)


class SftStage(SftSettings):
    """Supervised fine-tuning on conversations."""

    kind: Literal["sft"]

    def request(self, folder: Path) -> TrainingRequest:
        """Returns the request, with relative paths resolved from `folder`."""
        fields = _resolved(self, folder, "evaluate")
        fields["data"] = [{**source, "path": str(folder / source["path"])} for source in fields["data"]]
        if self.curriculum is not None:
            fields["curriculum"]["models"] = [_stage_or_path(folder, name) for name in self.curriculum.models]
        return SftRequest(settings=SftSettings.model_validate(fields))


class PreferStage(PreferSettings):
    """Preference alignment."""

    kind: Literal["prefer"]

    def request(self, folder: Path) -> TrainingRequest:
        """Returns the request, with relative paths resolved from `folder`."""
        fields = _resolved(self, folder, "evaluate", "pairs", "questions")
        if self.judge_model is not None:
            fields["judge_model"] = str(folder / self.judge_model)
        return PreferRequest(settings=PreferSettings.model_validate(fields))


class MergeStage(MergeStageSettings):
    """Merge of the weights of earlier stages."""

    kind: Literal["merge"]

    def request(self, folder: Path) -> TrainingRequest:
        """Returns the request, with relative paths resolved from `folder`."""
        fields = _resolved(self, folder, "evaluate")
        base, *models = [_stage_or_path(folder, name) for name in (fields["base"], *fields["models"])]
        return MergeRequest(settings=MergeStageSettings.model_validate({**fields, "base": base, "models": models}))


AnyStage = Annotated[PretrainStage | SftStage | PreferStage | MergeStage, Field(discriminator="kind")]


def _stage_or_path(folder: Path, name: str) -> str:
    """Returns the kind of an earlier stage as it is, and a path resolved from `folder`."""
    return name if name in STAGES else str(folder / name)


def _resolved(stage: BaseModel, folder: Path, *names: str) -> dict[str, Any]:
    """Returns the settings of a stage, with the paths in the fields `names` resolved from `folder`."""
    fields = stage.model_dump(exclude={"kind"})
    return fields | {name: [str(folder / each) for each in fields[name]] for name in names}


class PostTrainingRecipe(_Config):
    """Content of a recipe file."""

    tokenizer: str | None = None
    stages: tuple[AnyStage, ...] = Field(min_length=1)


def read_recipe(path: Path) -> PostTrainingRecipe:
    """Reads a recipe from a YAML file.

    Raises:
        InvalidInput: one line for each problem, as `file:line: message`.
    """
    return read_model(path, PostTrainingRecipe)


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
    write: WriteFiles = write_files_of,
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
        write: writes the files.

    Returns:
        The record of the last stage, with those of the others in `before`.

    Raises:
        InvalidInput: files of any stage have problems, which are found before the first stage begins.
        NasError: see `train_member`.
    """
    tokenizer = None if recipe.tokenizer is None else folder / recipe.tokenizer
    record: MemberTraining | None = None
    requests = [stage.request(folder) for stage in recipe.stages]
    for request in requests:
        request.check()
    for number, (stage, request) in enumerate(zip(recipe.stages, requests, strict=True), 1):
        log(f"stage {number} of {len(recipe.stages)}: {stage.kind}")
        wanted = replace(
            request, tokenizer=tokenizer, workers=workers, checkpoint_s=checkpoint_s, files=files or FileOptions()
        )
        before = None if record is None else record.history
        last = number == len(recipe.stages)
        record = train_member(family, size, wanted, log, write, before=before, last=last)
    assert record is not None, "a recipe has a stage"
    return record
