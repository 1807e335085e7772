"""A small family to train: text, a tokenizer and a member, and trainings of it in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from nas.core.family import FAMILY, Family, Member, families_folder, write_record
from nas.core.layout import Layout
from nas.core.progress import Log
from nas.model.nn.fit import TrainingState, Worker
from nas.model.nn.model import Model
from nas.train.posttrain import prefer
from nas.train.pretrain import member_training
from nas.train.pretrain.member_training import MemberToTrain, Work, run_plan, train_plan
from nas.train.pretrain.next_token import Pretraining, PretrainingRequest
from nas.train.pretrain.recipe import Schedule, Settings, StageConfig
from nas.train.pretrain.tokenizer_training import train_tokenizer

LAYOUT = Layout.parse("d64 v320 ffn=swiglu:96 [C3 A4/2 C3+moe:4x2:32]")
SETTINGS = Settings(
    tokens=30 * 256,
    batch_tokens=256,
    lr=5e-3,
    stages=(
        StageConfig(name="short", length=64, share=0.8, schedule=Schedule(warmup=0.1)),
        StageConfig(name="long", length=128, share=0.2, schedule=Schedule(decay=1.0)),
    ),
)
_WORDS = ("the", "a", "small", "large", "model", "reads", "writes", "one", "two", "tokens", "of", "and", "in", "with")


def write_corpus(folder: Path, size: int = 6000) -> Path:
    """Made-up sentences, a .py file among the .txt ones."""
    folder.mkdir(parents=True)
    for number in range(4):
        rng = Random(number)
        text = ""
        while len(text) < size:
            text += " ".join(rng.choices(_WORDS, k=rng.randint(3, 9))).capitalize() + ".\n"
        (folder / f"{number}{'.py' if number == 0 else '.txt'}").write_text(text)
    return folder


def write_tokenizer(path: Path, corpus: Path, size: int = 320) -> Path:
    """One that the small member's files can hold."""
    train_tokenizer([corpus], size, path, lambda line: None)
    return path


def write_family(layout: Layout = LAYOUT) -> None:
    """Family `tiny` with the member `1M`, in the home of this process."""
    member = Member(
        size="1M", layout=layout.format(), parameters=layout.params.total, active=layout.params.active,
        non_embedding=layout.params.non_embedding, decisions=(), tried=(),
    )  # fmt: skip
    family = Family(name="tiny", made="2026-01-01", seed=0, pattern="CAC", sources=(), decisions=(), members=(member,))
    write_record(families_folder() / "tiny" / FAMILY, family)


def alone(yield_hook: Callable[[], object] = lambda: None, log: Log = lambda line: None) -> Worker:
    """The only worker of a training on this CPU."""
    return Worker(torch.device("cpu"), log, yield_hook)


class KilledError(Exception):
    """Stands for a kill of a training in this process."""


def killed_after(passes: int) -> Worker:
    """The only worker, killed before its pass number `passes`, counted from 0."""
    countdown = [passes]

    def hook() -> None:
        countdown[0] -= 1
        if countdown[0] < 0:
            raise KilledError

    return alone(hook)


@dataclass
class Pretrained:
    """A pre-training of the small member in this process, in a folder that may hold its checkpoint."""

    plan: Pretraining
    folder: Path
    model: Model

    def run(self, worker: Worker | None = None, checkpoint_s: float = 60.0) -> TrainingState:
        """Trains to the end; returns the state."""
        return train_plan(self.plan, self.model, self.folder, worker or alone(), checkpoint_s)[0]

    def score(self) -> float:
        """Returns the bits per byte of all held-out text."""
        with torch.no_grad():
            return self.plan.scores(self.model.eval(), alone())["all"]


def pretraining(
    folder: Path, corpus: Path, tokenizer: Path, settings: Settings = SETTINGS, teacher: Path | None = None
) -> Pretrained:
    """Plans a pre-training of the small member; nothing is trained yet."""
    folder.mkdir(parents=True, exist_ok=True)
    request = PretrainingRequest((corpus,), settings, teacher)
    plan = request.plan(MemberToTrain(folder, LAYOUT, tokenizer, ()), lambda line: None)
    return Pretrained(plan, folder, Model(LAYOUT, plan.seed))


def run_here(work: Work, workers: int, log: Log) -> dict[str, Any]:
    """`nas.train.pretrain.member_training.run_workers` without Ray: one worker, in this process."""
    return run_plan(work, alone(log=log))


def tiny_family(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes corpus, tokenizer and the family `tiny` in a home of its own; trainings run in this process."""
    for name in ("NAS_HOME", "NAS_CACHE", "NAS_LOCK"):
        monkeypatch.setenv(name, str(folder / name))
    monkeypatch.setattr(member_training, "run_workers", run_here)
    write_corpus(folder / "corpus")
    write_tokenizer(folder / "tokenizer.json", folder / "corpus")
    write_family()


def end_sampled_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts an end behind each sampled answer: models that hardly learnt seldom say one."""
    generate = prefer.generate

    def answers_with_end(
        model: Model, questions: Sequence[Sequence[int]], most: int, ends: Sequence[int], **more: Any
    ) -> Any:
        answers = generate(model, questions, most, ends, **more)
        return [ids if ids[-1] in ends else [*ids, ends[0]] for ids in answers]

    monkeypatch.setattr(prefer, "generate", answers_with_end)
