"""A further kind of training, here a toy fine-tuning on answers, is one request and one plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from pretrain_lab import LAYOUT, SETTINGS, tiny_family
from torch import Tensor, nn

from nas.core.canonical import content_hash, sha256_of
from nas.core.errors import InvalidInput
from nas.core.family import FILES, TRAINING, MemberFiles, MemberTraining, read_record
from nas.core.progress import Log
from nas.core.task import IGNORE
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.fit import TrainingPhase, Worker
from nas.model.nn.optimisers import Optimiser
from nas.serve.views.family import member_folder
from nas.train.pretrain import member_training
from nas.train.pretrain.data import Vocabulary
from nas.train.pretrain.member_training import MemberToTrain, TrainingPlan, TrainingRequest, train_member
from nas.train.pretrain.next_token import PretrainingRequest
from nas.train.release.options import FileOptions

ANSWERS = (("one and", " two"), ("a small", " model"))


@dataclass(frozen=True)
class FineTuningRequest(TrainingRequest):
    kind: ClassVar[str] = "fine-tune"

    answers: tuple[tuple[str, str], ...] = ANSWERS
    steps: int = 8

    def plan(self, member: MemberToTrain, log: Log) -> FineTuning:
        return FineTuning(
            layout=member.layout.to_json(), seed=0, tokenizer=member.tokenizer,
            tokenizer_sha256=sha256_of(member.tokenizer), answers=self.answers, steps=self.steps,
            weights=member.weights(),
        )  # fmt: skip


class FineTuning(TrainingPlan):
    answers: tuple[tuple[str, str], ...]
    steps: int
    weights: Checkpoint

    def key_inputs(self) -> dict[str, Any]:
        return {"answers": content_hash(self.answers), "steps": self.steps, "start": self.weights.sha256}

    def config(self) -> dict[str, Any]:
        return {"answers": len(self.answers), "steps": self.steps}

    @property
    def most_workers(self) -> int:
        return len(self.answers)

    def start(self, folder: Path, log: Log) -> tuple[Path | None, str]:
        return self.weights.path, self.weights.describe()

    def optimiser(self) -> Optimiser:
        return Optimiser(weight_decay=0.0, clip=1.0, balance_rate=0.0)

    def phases(self, worker: Worker) -> list[TrainingPhase]:
        passes = self._passes()
        counted = sum(int((labels != IGNORE).sum()) for _, labels in passes)

        def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
            logits = model(inputs).flatten(0, 1)
            return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum") / counted

        return [TrainingPhase("answers", self.steps, counted, lambda step: passes, loss, lambda step: 5e-3)]

    def scores(self, model: nn.Module, worker: Worker) -> dict[str, float]:
        right = [
            bool((model(inputs).argmax(-1) == labels)[labels != IGNORE].all()) for inputs, labels in self._passes()
        ]
        return {"exact answers": sum(right) / len(right)}

    def _passes(self) -> list[tuple[Tensor, Tensor]]:
        vocabulary = Vocabulary(self.tokenizer, LAYOUT.vocab)
        passes = []
        for question, answer in self.answers:
            question_ids, answer_ids = vocabulary.encode(question).tolist(), vocabulary.encode(answer).tolist()
            ids = [vocabulary.start, *question_ids, *answer_ids, vocabulary.end]
            labels = [IGNORE] * len(question_ids) + [*answer_ids, vocabulary.end]
            passes.append((torch.tensor([ids[:-1]]), torch.tensor([labels])))
        return passes


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainingRequest], MemberTraining]:
    tiny_family(tmp_path, monkeypatch)
    return lambda request: train_member("tiny", "1M", request, lambda line: None)


def never(*_: object) -> Any:
    raise AssertionError("it was trained again")


def test_trainings_of_two_kinds_are_a_chain(
    tmp_path: Path, train: Callable[[TrainingRequest], MemberTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, files = tmp_path / "tokenizer.json", FileOptions(gguf=())
    short = SETTINGS.model_copy(update={"tokens": 4 * 256})
    pretrain = PretrainingRequest((tmp_path / "corpus",), short, tokenizer=tokenizer, workers=1, files=files)
    tune = FineTuningRequest(tokenizer=tokenizer, workers=1, files=files, checkpoint_s=0.0)
    member = member_folder("tiny", "1M")
    with pytest.raises(InvalidInput, match="1M has not been trained yet"):
        train(tune)
    first = train(pretrain)
    tuned = train(tune)
    assert [training.kind for training in tuned.history] == ["pretrain", "fine-tune"]
    assert tuned.before == (first,) and tuned.start == f"checkpoint:{first.checkpoint}"
    assert tuned.curve[-1][1] < tuned.curve[0][1] and set(tuned.held_out) == {"exact answers"}
    record = read_record(member / FILES, MemberFiles)
    assert record is not None and record.weights == f"checkpoint:{tuned.checkpoint}"
    more = train(FineTuningRequest(tokenizer=tokenizer, workers=1, files=files, steps=9))
    assert more.before == (first,), "another fine-tuning replaces the first one"
    monkeypatch.setattr(member_training, "run_workers", never)
    assert train(FineTuningRequest(tokenizer=tokenizer, workers=1, files=files, steps=9)) == more
    assert train(pretrain) == first == read_record(member / TRAINING, MemberTraining)
