"""Pre-trains a member of a family: from what was asked for to a training, and from its weights to the member's files.

Everything that decides the result is hashed into the training's key. The same command again goes on with the same
training; another corpus, recipe or start is another training, in a folder of its own (`nas.family.train`).

The end of a training is its record, training.json, and then the member's files. Both come in the turn of one process
(.training.lock), and a command whose training has ended already does both again: so the files are those of the training
on record as soon as a command ends, whatever was killed before.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nas.core.canonical import result_key
from nas.core.durable import locked
from nas.core.errors import InvalidInput
from nas.core.family import TRAINING, Family, Member, MemberTraining, read_record, write_record
from nas.core.layout import Layout
from nas.devices.places import host_lock_folder
from nas.family.documents import read_sources
from nas.family.file_options import FileOptions
from nas.family.files import write_files
from nas.family.growth import grow_checkpoint
from nas.family.place import find_member, tokenizer_of
from nas.family.recipe import Recipe, Settings, complete
from nas.family.session import CHECKPOINT, packed
from nas.family.tokenizer import read_tokenizer, require_fit
from nas.family.tokens import Tokens, tokenise
from nas.family.train import START, WEIGHTS, Log, run_workers
from nas.family.vocabulary import Vocabulary
from nas.nn.weights import checkpoint_layout, save_weights
from nas.runtimes.base import Checkpoint

TRAINER_VERSION = 1
"""Enters keys: raise it whenever the same training gives other numbers."""

_LOCK_S = 4 * 3600.0


@dataclass(frozen=True)
class Trained:
    """A member with new weights.

    Args:
        family: of which it is one.
        member: its record.
        folder: its own.
        layout: what it is.
        weights: the new ones.
        tokenizer: the tokenizer.json that they go with.
        files: what to write.
    """

    family: Family
    member: Member
    folder: Path
    layout: Layout
    weights: Checkpoint
    tokenizer: Path
    files: FileOptions


Write = Callable[[Trained, Log], object]
"""Writes a member's files anew."""


@dataclass(frozen=True)
class Order:
    """What a training is asked for.

    Args:
        corpus: files and folders of text.
        settings: of the recipe.
        tokenizer: tokenizer.json; None: the member's own.
        teacher: checkpoint to distil from.
        start: checkpoint of a smaller model to grow from; None: random weights.
        start_layout: its layout, where its header names none.
        workers: processes; None: one per GPU, or one.
        checkpoint_s: least seconds between checkpoints; see `nas.family.session.Session.run`.
        files: what is written for the member then; name, tokenizer and what the card says are the member's.
    """

    corpus: tuple[Path, ...]
    settings: Settings = field(default_factory=Settings)
    tokenizer: Path | None = None
    teacher: Path | None = None
    start: Path | None = None
    start_layout: Layout | None = None
    workers: int | None = None
    checkpoint_s: float = 60.0
    files: FileOptions = field(default_factory=FileOptions)


def write_files_of(trained: Trained, log: Log) -> None:
    """All files of a member, with its new weights."""
    family, member = trained.family, trained.member
    origin = {"family": family.name, "study": family.study or "given layouts"}
    options = replace(
        trained.files,
        name=f"{family.name}-{member.size}",
        tokenizer=trained.tokenizer,
        measured=member.measured,
        budgets={each.what: f"{each.value}: {each.reason}" for each in member.decisions if each.what == "weights"},
        provenance={**origin, **family.provenance},
    )
    write_files(trained.folder, trained.layout, trained.weights, options, log)


@dataclass(frozen=True)
class _Task:
    """A training of which everything is known that decides the result; its key is the hash of that."""

    order: Order
    layout: Layout
    recipe: Recipe
    stages: list[list[Tokens]]
    vocabulary: Vocabulary
    key: str
    own: Path


def train_member(family: str, size: str, order: Order, log: Log, write: Write = write_files_of) -> MemberTraining:
    """Trains a member from its checkpoint, where there is one, to the end of the recipe; then writes its files.

    Where that training has ended before, it writes what is missing of the files.

    Raises:
        UnknownName: no such family or size, or the tokenizer lacks a special token.
        InvalidInput: tokenizer, corpus, teacher or start do not fit, the tokenizer was changed during the training, or
            the weights after it.
        CandidateFailed: the loss is no longer finite.
        InfrastructureFailed: a worker died, or another process trains this member with the same settings.
    """
    folder, made, member = find_member(family, size)
    task = _prepared(folder, Layout.parse(member.layout), order, log)
    weights = task.own / WEIGHTS
    record = read_record(folder / TRAINING, MemberTraining)
    if record is None or record.config.get("key") != task.key:
        record = _train(task, log)
    elif not _holds(weights, record.checkpoint):
        raise InvalidInput(
            f"{weights} is not what the training left there: put it back, or remove {folder / TRAINING} to train anew"
        )
    else:
        log(f"{size} is trained with these settings already")
    checkpoint = Checkpoint(weights, record.checkpoint)
    trained = Trained(made, member, folder, task.layout, checkpoint, task.vocabulary.path, order.files)
    _conclude(trained, task.vocabulary.sha256, record, write, log)
    for done in (CHECKPOINT, START):
        (task.own / done).unlink(missing_ok=True)
    return record


def _prepared(folder: Path, layout: Layout, order: Order, log: Log) -> _Task:
    recipe, reasons = complete(order.settings, layout)
    for reason in reasons:
        log(f"{reason.what}: {reason.value} ({reason.reason})")
    vocabulary = _vocabulary(order.tokenizer or tokenizer_of(folder), layout, recipe)
    stages = _tokenised(recipe, order.corpus, vocabulary)
    _check_teacher(order.teacher, layout, recipe)
    key = result_key(
        "family-train",
        trainer=TRAINER_VERSION,
        layout=layout.to_json(),
        recipe=_hashed(recipe),
        corpus=[[source.key for source in sources] for sources in stages],
        tokenizer=vocabulary.sha256,
        teacher=None if order.teacher is None else _sha256(order.teacher),
        start=f"random:{recipe.seed}" if order.start is None else f"grown:{_sha256(order.start)}",
    )
    return _Task(order, layout, recipe, stages, vocabulary, key, folder / "training" / key[:12])


def _vocabulary(path: Path, layout: Layout, recipe: Recipe) -> Vocabulary:
    """The tokenizer, if the member's files can hold it: that would be told after the training otherwise."""
    require_fit(read_tokenizer(path), layout, str(path))
    return Vocabulary(path, layout.vocab, fim=recipe.fim is not None)


def _train(task: _Task, log: Log) -> MemberTraining:
    order, recipe, own = task.order, task.recipe, task.own
    own.mkdir(parents=True, exist_ok=True)
    start = f"random:{recipe.seed}"
    if order.start is not None:
        growth = _grow(order.start, order.start_layout, task.layout, recipe.seed, own, log)
        start = f"grown from {order.start.name}, {growth}"
    workers = order.workers or max(1, torch.cuda.device_count())
    spec = {
        "layout": task.layout.to_json(),
        "recipe": recipe.model_dump(mode="json"),
        "stages": [[[source.name, source.key] for source in sources] for sources in task.stages],
        "tokenizer": str(task.vocabulary.path.resolve()),
        "teacher": None if order.teacher is None else str(order.teacher.resolve()),
        "start": str(own / START) if order.start is not None else None,
        "key": task.key,
        "folder": str(own),
        "lock": str(host_lock_folder()),
        "threads": max(1, len(os.sched_getaffinity(0)) // workers),
        "checkpoint_s": order.checkpoint_s,
    }
    outcome = run_workers(spec, workers, recipe, own, log)
    return MemberTraining(
        checkpoint=_sha256(own / WEIGHTS),
        config=_config(task, workers),
        start=start,
        **outcome,
    )


def _conclude(trained: Trained, tokenizer_sha256: str, record: MemberTraining, write: Write, log: Log) -> None:
    """Puts the training on record, then writes the files, while no other training of this member does."""
    folder, tokenizer = trained.folder, trained.tokenizer
    lock = folder / ".training.lock"
    with locked(lock, _LOCK_S, waiting=lambda: log(f"{folder}: another training writes its files")):
        if not _holds(tokenizer, tokenizer_sha256):
            raise InvalidInput(
                f"{tokenizer} was changed during the training: put back the file of SHA-256 {tokenizer_sha256} and run"
                " the same command again, which has nothing left to train",
                where="--tokenizer",
            )
        write_record(folder / TRAINING, record)
        write(trained, log)


def _tokenised(recipe: Recipe, corpus: Sequence[Path], vocabulary: Vocabulary) -> list[list[Tokens]]:
    """The sources of every stage. All paths are cut together: what one stage holds out no other one trains on."""
    wanted = [[Path(each) for each in stage.corpus] or list(corpus) for stage in recipe.stages]
    named: dict[Path, Path] = {}
    for path in (path for stage in wanted for path in stage):
        named.setdefault(path.resolve(), path)  # stages may spell one folder in two ways
    sources = zip(named, read_sources(list(named.values()), recipe.held_out), strict=True)
    made = {
        place: tokenise(source, vocabulary, recipe.fim, recipe.seed, recipe.eval_bytes) for place, source in sources
    }
    stages = [[made[path.resolve()] for path in stage] for stage in wanted]
    for number, each in enumerate(stages):
        packed(recipe, number, each)  # says now whether a stage lacks text, not after the stages before
    return stages


def _check_teacher(teacher: Path | None, layout: Layout, recipe: Recipe) -> None:
    if teacher is None:
        return
    vocab = checkpoint_layout(teacher).vocab
    if vocab != layout.vocab:
        raise InvalidInput(
            f"{teacher} has a vocabulary of {vocab:,}, the member one of {layout.vocab:,}: its predictions are of other"
            " tokens",
            where="--teacher",
        )
    if recipe.distillation.k >= vocab:
        raise InvalidInput(f"distillation.k is {recipe.distillation.k}, of a vocabulary of {vocab:,}", where="--config")


def _grow(start: Path, start_layout: Layout | None, layout: Layout, seed: int, own: Path, log: Log) -> str:
    model, growth = grow_checkpoint(start, start_layout, layout, seed)
    log(f"grown from {start}: {growth.describe()}")
    save_weights(model, own / START)
    return growth.describe()


def _config(task: _Task, workers: int) -> dict[str, Any]:
    order = task.order
    return {
        "key": task.key,
        "recipe": task.recipe.model_dump(mode="json"),
        "corpus": [str(path) for path in order.corpus],
        "tokenizer": task.vocabulary.sha256,
        "teacher": None if order.teacher is None else _sha256(order.teacher),
        "workers": workers,
    }


def _hashed(recipe: Recipe) -> dict[str, Any]:
    """The recipe without the paths of its corpora, whose content stands in the key."""
    return recipe.model_dump(mode="json", exclude={"stages": {"__all__": {"corpus"}}})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _holds(path: Path, sha256: str) -> bool:
    return path.is_file() and _sha256(path) == sha256
