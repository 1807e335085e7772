"""Pre-trains a member of a family through Ray Train. The only file of the family that imports ray.

    FAMILY/SIZE/training/KEY/checkpoint.safetensors   what an unfinished training goes on from
                             start.safetensors        weights grown from a smaller model
                             weights.safetensors      the result
                             outcome.json             what worker 0 found
                             log.txt                  its progress

KEY is over everything that decides the result. The same command again goes on with the same training; another corpus,
recipe or start is another training, in a folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nas.core.canonical import result_key
from nas.core.durable import locked, write_durably
from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput, NasError
from nas.core.family import TRAINING, Family, Member, MemberTraining, read_record, write_record
from nas.core.layout import Layout
from nas.devices.hostlock import HostLock
from nas.devices.places import host_lock_folder
from nas.family.documents import read_sources
from nas.family.file_options import FileOptions
from nas.family.files import write_files
from nas.family.growth import grow_checkpoint
from nas.family.place import find_member, tokenizer_of
from nas.family.recipe import Recipe, Settings, complete
from nas.family.session import CHECKPOINT, Data, Session, Worker, packed
from nas.family.tokens import Tokens, open_tokens, tokenise
from nas.family.vocabulary import Vocabulary
from nas.nn.model import Model
from nas.nn.weights import checkpoint_layout, load_weights, save_weights
from nas.proxy.state import thinned
from nas.runtimes.base import Checkpoint
from nas.service.tune import RayCompute

TRAINER_VERSION = 1
"""Enters keys: raise it whenever the same training gives other numbers."""

_WEIGHTS, _START, _OUTCOME, _LOG = "weights.safetensors", "start.safetensors", "outcome.json", "log.txt"
_CURVE_POINTS = 200
_COLLECTIVE_S = 7200
"""Longest that workers wait for each other; measurements may have the machine for an hour."""

Log = Callable[[str], None]


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
        checkpoint_s: seconds between checkpoints.
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


def train_member(family: str, size: str, order: Order, log: Log, write: Write = write_files_of) -> MemberTraining:
    """Trains a member from its checkpoint, where there is one, to the end of the recipe; then writes its files.

    Raises:
        UnknownName: no such family or size, or the tokenizer lacks a special token.
        InvalidInput: tokenizer, corpus, teacher or start do not fit.
        CandidateFailed: the loss is no longer finite.
        InfrastructureFailed: a worker died, or another process trains this member with the same settings.
    """
    folder, made, member = find_member(family, size)
    layout = Layout.parse(member.layout)
    recipe, reasons = complete(order.settings, layout)
    for reason in reasons:
        log(f"{reason.what}: {reason.value} ({reason.reason})")
    vocabulary = Vocabulary(order.tokenizer or tokenizer_of(folder), layout.vocab, fim=recipe.fim is not None)
    stages = _tokenised(recipe, order.corpus, vocabulary)
    _check_teacher(order.teacher, layout, recipe)
    start = f"random:{recipe.seed}" if order.start is None else f"grown:{_sha256(order.start)}"
    key = result_key(
        "family-train",
        trainer=TRAINER_VERSION,
        layout=layout.to_json(),
        recipe=_hashed(recipe),
        corpus=[[source.key for source in sources] for sources in stages],
        tokenizer=vocabulary.sha256,
        teacher=None if order.teacher is None else _sha256(order.teacher),
        start=start,
    )
    done = read_record(folder / TRAINING, MemberTraining)
    if done is not None and done.config.get("key") == key:
        log(f"{size} is trained with these settings already")
        return done
    own = folder / "training" / key[:12]
    own.mkdir(parents=True, exist_ok=True)
    if order.start is not None:
        start = (
            f"grown from {order.start.name}, {_grow(order.start, order.start_layout, layout, recipe.seed, own, log)}"
        )
    workers = order.workers or max(1, torch.cuda.device_count())
    spec = {
        "layout": layout.to_json(),
        "recipe": recipe.model_dump(mode="json"),
        "stages": [[[source.name, source.key] for source in sources] for sources in stages],
        "tokenizer": str(vocabulary.path.resolve()),
        "teacher": None if order.teacher is None else str(order.teacher.resolve()),
        "start": str(own / _START) if order.start is not None else None,
        "key": key,
        "folder": str(own),
        "lock": str(host_lock_folder()),
        "threads": max(1, len(os.sched_getaffinity(0)) // workers),
        "checkpoint_s": order.checkpoint_s,
    }
    outcome = _run(spec, workers, recipe, own, log)
    weights = own / _WEIGHTS
    record = MemberTraining(
        checkpoint=_sha256(weights),
        config=_config(recipe, order, key, vocabulary, workers),
        start=start,
        **outcome,
    )
    checkpoint = Checkpoint(weights, record.checkpoint)
    write(Trained(made, member, folder, layout, checkpoint, vocabulary.path, order.files), log)
    write_record(folder / TRAINING, record)
    (own / CHECKPOINT).unlink(missing_ok=True)
    return record


def _tokenised(recipe: Recipe, corpus: Sequence[Path], vocabulary: Vocabulary) -> list[list[Tokens]]:
    """The sources of every stage. All paths are cut together: what one stage holds out no other one trains on."""
    wanted = [[Path(each) for each in stage.corpus] or list(corpus) for stage in recipe.stages]
    paths = list(dict.fromkeys(path for stage in wanted for path in stage))
    sources = dict(zip(paths, read_sources(paths, recipe.held_out), strict=True))
    made = {
        path: tokenise(source, vocabulary, recipe.fim, recipe.seed, recipe.eval_bytes)
        for path, source in sources.items()
    }
    stages = [[made[path] for path in stage] for stage in wanted]
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
    save_weights(model, own / _START)
    return growth.describe()


def _config(recipe: Recipe, order: Order, key: str, vocabulary: Vocabulary, workers: int) -> dict[str, Any]:
    return {
        "key": key,
        "recipe": recipe.model_dump(mode="json"),
        "corpus": [str(path) for path in order.corpus],
        "tokenizer": vocabulary.sha256,
        "teacher": None if order.teacher is None else _sha256(order.teacher),
        "workers": workers,
    }


def _hashed(recipe: Recipe) -> dict[str, Any]:
    """The recipe without the paths of its corpora, whose content stands in the key."""
    return recipe.model_dump(mode="json", exclude={"stages": {"__all__": {"corpus"}}})


def _run(spec: Mapping[str, Any], workers: int, recipe: Recipe, own: Path, log: Log) -> dict[str, Any]:
    """Runs the workers to their end; what worker 0 found."""
    fewest = min(recipe.sequences(stage) for stage in recipe.stages)
    if workers > fewest:
        raise InvalidInput(
            f"{workers} workers, but a step of one of the stages has {fewest} sequences; raise batch_tokens or take"
            " fewer workers",
            where="--workers",
        )
    (own / _OUTCOME).unlink(missing_ok=True)
    gpu = torch.cuda.is_available()
    with RayCompute(workers), _followed(own / _LOG, log), tempfile.TemporaryDirectory(prefix="hilnas-ray-") as scratch:
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchConfig, TorchTrainer

        trainer = TorchTrainer(
            _work,
            train_loop_config=dict(spec),
            torch_config=TorchConfig(timeout_s=_COLLECTIVE_S),
            scaling_config=ScalingConfig(
                num_workers=workers, use_gpu=gpu, resources_per_worker={"CPU": 1} | ({"GPU": 1} if gpu else {})
            ),
            run_config=RunConfig(name="member", storage_path=scratch, failure_config=FailureConfig(max_failures=0)),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            raise _failure(own) or InfrastructureFailed(f"training stopped: {_last_line(error)}") from error
    found: dict[str, Any] = json.loads((own / _OUTCOME).read_text())
    return found


def _work(spec: Mapping[str, Any]) -> None:
    """In a worker process: its part of the training. Errors go through a file, as Ray keeps only their text."""
    from ray.train import get_context
    from ray.train.torch import get_device

    context = get_context()
    own = Path(spec["folder"])
    torch.set_num_threads(spec["threads"])
    try:
        with (
            HostLock(Path(spec["lock"])).shared() as hold,
            (own / _LOG).open("a", encoding="utf-8") as file,
        ):
            worker = Worker(
                context.get_world_rank(), context.get_world_size(), get_device(), hold.yield_if_wanted,
                lambda line: print(line, file=file, flush=True),
            )  # fmt: skip
            with _alone(own, worker.rank):
                _train(spec, worker, own)
    except NasError as error:
        failure = {"failed": type(error).__name__, "message": str(error)}
        write_durably(own / _OUTCOME, json.dumps(failure).encode())
        raise


@contextmanager
def _alone(own: Path, rank: int) -> Iterator[None]:
    """Worker 0 keeps others from this training; the worker of a killed command lives a few seconds longer than it."""
    if rank:
        yield
        return
    with locked(own / "lock"):
        yield


def _train(spec: Mapping[str, Any], worker: Worker, own: Path) -> None:
    layout, recipe = Layout.from_json(spec["layout"]), Recipe.model_validate(spec["recipe"])
    stages = [[open_tokens(*source) for source in sources] for sources in spec["stages"]]
    scored = list({source.key: source for sources in stages for source in sources}.values())
    vocabulary = Vocabulary(Path(spec["tokenizer"]), layout.vocab, fim=recipe.fim is not None)
    model = Model(layout, recipe.seed)
    if spec["start"] is not None:
        load_weights(model, Path(spec["start"]))
    teacher = None
    if spec["teacher"] is not None:
        teacher = Model(checkpoint_layout(Path(spec["teacher"])), None)
        load_weights(teacher, Path(spec["teacher"]))
    session = Session(model, recipe, Data(stages, scored, vocabulary), spec["key"], own, worker, teacher)
    session.run(spec["checkpoint_s"])
    if worker.rank:
        return
    save_weights(session.state.model, own / _WEIGHTS)
    outcome = {
        "held_out": session.held_out(),
        "tokens": session.tokens,
        "steps": session.steps,
        "curve": thinned(session.state.losses, _CURVE_POINTS),
        "seconds": session.state.seconds,
        "device": _describe(worker),
    }
    write_durably(own / _OUTCOME, json.dumps(outcome).encode())


def _describe(worker: Worker) -> str:
    kind = "cpu" if worker.device.type == "cpu" else f"cuda: {torch.cuda.get_device_name(worker.device)}"
    return kind if worker.world == 1 else f"{worker.world} x {kind}"


def _failure(own: Path) -> NasError | None:
    """What a worker said before it ended."""
    try:
        found = json.loads((own / _OUTCOME).read_text())
    except FileNotFoundError:
        return None
    if found.get("failed") == CandidateFailed.__name__:
        return CandidateFailed("diverged", found["message"])
    return InfrastructureFailed(found["message"]) if "failed" in found else None


@contextmanager
def _followed(path: Path, log: Log) -> Iterator[None]:
    """Hands on the lines that workers append to `path`."""
    path.touch()
    ended = threading.Event()
    with path.open(encoding="utf-8") as file:
        file.seek(0, os.SEEK_END)

        def follow() -> None:
            while True:
                over = ended.wait(0.5)
                for line in file:
                    log(line.rstrip("\n"))
                if over:
                    return

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _last_line(error: BaseException) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
