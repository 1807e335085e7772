"""A small family to train: text, a tokenizer and a member, and trainings of it in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch

from nas.core.family import FAMILY, Family, Member, write_record
from nas.core.layout import Layout
from nas.family.documents import read_sources
from nas.family.recipe import Recipe, Schedule, Settings, Stage, complete
from nas.family.session import Data, Session, Worker
from nas.family.tokenizer_training import train_tokenizer
from nas.family.tokens import tokenise
from nas.family.train import train_part
from nas.family.vocabulary import Vocabulary
from nas.nn.model import Model
from nas.service.families import families_folder

LAYOUT = Layout.parse("d64 v320 ffn=swiglu:96 [C3 A4/2 C3+moe:4x2:32]")
SETTINGS = Settings(
    tokens=30 * 256,
    batch_tokens=256,
    lr=5e-3,
    stages=(
        Stage(name="short", length=64, share=0.8, schedule=Schedule(warmup=0.1)),
        Stage(name="long", length=128, share=0.2, schedule=Schedule(decay=1.0)),
    ),
)
_WORDS = ("the", "a", "small", "large", "model", "reads", "writes", "one", "two", "tokens", "of", "and", "in", "with")


def write_corpus(folder: Path, files: int = 4, size: int = 6000) -> Path:
    """Made-up sentences, a .py file among the .txt ones."""
    folder.mkdir(parents=True)
    for number in range(files):
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


def data_of(corpus: Path, tokenizer: Path, recipe: Recipe, rows: int = LAYOUT.vocab) -> Data:
    """The corpus as every stage's."""
    vocabulary = Vocabulary(tokenizer, rows, fim=recipe.fim is not None)
    (source,) = read_sources([corpus], recipe.held_out)
    tokens = tokenise(source, vocabulary, recipe.fim, recipe.seed, recipe.eval_bytes)
    return Data([[tokens]] * len(recipe.stages), [tokens], vocabulary)


def session(folder: Path, corpus: Path, tokenizer: Path, *, worker: Worker | None = None, **more: object) -> Session:
    """A training of the small member; `teacher` and `settings` may be given."""
    settings = more.get("settings", SETTINGS)
    assert isinstance(settings, Settings)
    teacher = more.get("teacher")
    assert teacher is None or isinstance(teacher, Model)
    recipe, _ = complete(settings, LAYOUT)
    folder.mkdir(parents=True, exist_ok=True)
    alone = Worker(0, 1, torch.device("cpu"), lambda: None, lambda line: None)
    data = data_of(corpus, tokenizer, recipe)
    return Session(Model(LAYOUT, recipe.seed), recipe, data, "k" * 64, folder, worker or alone, teacher)


def run_here(
    spec: Mapping[str, Any], workers: int, recipe: Recipe, own: Path, log: Callable[[str], None]
) -> dict[str, Any]:
    """`nas.family.train.run_workers` without Ray: one worker, in this process."""
    train_part(spec, Worker(0, 1, torch.device("cpu"), lambda: None, log), own)
    outcome: dict[str, Any] = json.loads((own / "outcome.json").read_text())
    return outcome
