"""Runs the workers of a member's training by Ray Train. The only file of the family that imports ray.

FAMILY/SIZE/training/KEY/checkpoint.safetensors   what an unfinished training goes on from
start.safetensors        weights grown from a smaller model, until the training has ended
weights.safetensors      the result
outcome.json             what worker 0 found
log.txt                  its progress
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nas.core.durable import locked, write_durably
from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput, NasError
from nas.core.layout import Layout
from nas.devices.hostlock import HostLock
from nas.family.recipe import Recipe
from nas.family.session import CHECKPOINT, Data, Session, Worker
from nas.family.tokens import MIN_HELD_OUT, open_tokens
from nas.family.vocabulary import Vocabulary
from nas.nn.model import Model
from nas.nn.weights import checkpoint_layout, load_weights, save_weights
from nas.proxy.state import thinned
from nas.service.tune import RayCompute

WEIGHTS, START = "weights.safetensors", "start.safetensors"

_OUTCOME, _LOG = "outcome.json", "log.txt"
_CURVE_POINTS = 200
_COLLECTIVE_S = 7200
"""Longest that workers wait for each other; measurements may have the machine for an hour."""

Log = Callable[[str], None]


def run_workers(spec: Mapping[str, Any], workers: int, recipe: Recipe, own: Path, log: Log) -> dict[str, Any]:
    """Runs the workers to their end; what worker 0 found.

    Args:
        spec: what they are told; JSON.
        workers: how many.
        recipe: the one in `spec`.
        own: the training's folder.
        log: takes one line at a time.

    Raises:
        InvalidInput: more workers than sequences in a step.
        CandidateFailed: the loss is no longer finite.
        InfrastructureFailed: a worker died, or another process runs this training.
    """
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
                train_part(spec, worker, own)
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


def train_part(spec: Mapping[str, Any], worker: Worker, own: Path) -> None:
    """What a worker does in a process that has nothing else to do; worker 0 is alone in `own`, and writes there."""
    if not worker.rank:
        _remove_leftovers(own)
    layout, recipe = Layout.from_json(spec["layout"]), Recipe.model_validate(spec["recipe"])
    stages = [[open_tokens(*source) for source in sources] for sources in spec["stages"]]
    every = {source.key: source for sources in stages for source in sources}.values()
    scored = [source for source in every if source.held_out_bytes >= MIN_HELD_OUT]
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
    save_weights(session.state.model, own / WEIGHTS)
    outcome = {
        "held_out": session.held_out(),
        "tokens": session.tokens,
        "steps": session.steps,
        "curve": thinned(session.state.losses, _CURVE_POINTS),
        "seconds": session.state.seconds,
        "device": _describe(worker),
    }
    write_durably(own / _OUTCOME, json.dumps(outcome).encode())


def _remove_leftovers(own: Path) -> None:
    """Files of killed workers that were to become a checkpoint or the result: each is as large as what it was to be."""
    for name in (CHECKPOINT, WEIGHTS):
        for path in own.glob(f".{name}.*"):
            path.unlink()


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


def _last_line(error: BaseException) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
