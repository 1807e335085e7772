"""Trains a member of a family with any kind of training: plan, Ray Train workers, record, files.

A kind of training is a pair of subclasses of `TrainingRequest` and `TrainingPlan`; `next_token` has pre-training. Read
on from `train_member`, which calls in this order

    request.plan(member)          in this process: checks, tokenised text, the key
    plan.start(folder)            in this process: start weights
    plan.phases(worker)           in each worker: data, loss and learning rate, for `nas.model.nn.fit.fit`
    plan.scores(model, worker)    in worker 0: scores of the result
    write(trained)                in this process: the member's files

All inputs of the result are hashed into the key of the training. The same command again resumes the same training;
other data, settings or start weights make another training, in its own folder:

    FAMILY/SIZE/training.json             record of the training whose weights are in the member's files
    FAMILY/SIZE/training/KEY/checkpoint.safetensors   state of an unfinished training
                             start.safetensors        start weights, if the plan made some; until the training ends
                             weights.safetensors      the result
                             log.txt                  progress

After a training, its record and the member's files are written under a lock (.training.lock), and a command whose
training has ended earlier rewrites both: when a command ends, the files are those of the recorded training.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from nas.core.canonical import result_key, sha256_of
from nas.core.durable import locked, write_durably
from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput, NasError, UnknownName
from nas.core.family import TRAINING, Family, Member, MemberTraining, read_record, write_record
from nas.core.layout import Layout
from nas.core.progress import Log, Progress
from nas.measure.devices.host_lock import HostLock, host_lock_folder
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.fit import TrainingCheckpoint, TrainingPhase, TrainingState, Worker, fit, thinned, training_precision
from nas.model.nn.model import Model
from nas.model.nn.optimisers import Optimiser
from nas.model.nn.weights import load_weights, save_weights
from nas.search.compute.ray import RayCompute
from nas.train.release.files import find_member, tokenizer_of, write_files
from nas.train.release.model_tokenizer import read_member_tokenizer
from nas.train.release.options import FileOptions
from nas.train.release.templates import DATE
from nas.train.release.tokenizer import require_fit

TRAINER_VERSION = 3
"""Part of keys: increase it with every change after which the same training gives other numbers."""
CHECKPOINT = "checkpoint.safetensors"
START = "start.safetensors"
WEIGHTS = "weights.safetensors"

_OUTCOME = "outcome.json"
_LOG = "log.txt"
CURVE_POINTS = 200
"""Most points of the loss in a record."""
_LOCK_S = 4 * 3600.0
_COLLECTIVE_S = 7200
"""Timeout of workers that wait for each other; measurements may reserve the machine for an hour."""


@dataclass(frozen=True)
class MemberToTrain:
    """A member for which a training is planned.

    Args:
        folder: of the member.
        layout: of the member.
        tokenizer: tokenizer.json to train with; it fits the layout.
        before: earlier trainings, in order.
        start: that of them whose weights the new one continues; None: the last.
    """

    folder: Path
    layout: Layout
    tokenizer: Path
    before: tuple[MemberTraining, ...]
    start: MemberTraining | None = None
    spent: dict[str, float] = field(default_factory=dict, compare=False)
    """Seconds of parts of the preparation; see `timed`."""

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the seconds within the context to `spent`."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.spent[what] = self.spent.get(what, 0.0) + time.monotonic() - begin

    @property
    def origin(self) -> MemberTraining:
        """The training whose weights the new one continues.

        Raises:
            InvalidInput: there is none.
        """
        if not self.before:
            raise InvalidInput(f"{self.folder.name} has not been trained yet", where="--size")
        return self.start or self.before[-1]

    def weights(self, training: MemberTraining | None = None) -> Checkpoint:
        """Returns the weights of a training in `before`, those of `origin` unless another is given.

        Raises:
            InvalidInput: there is none, or its weights are missing or changed.
        """
        return _checked_weights(self.folder, training or self.origin)

    def named(self, name: str) -> MemberTraining | None:
        """Returns the last earlier training that is called `name`, else the last one of that kind."""
        by_kind = {training.kind: training for training in self.before}
        return (by_kind | {training.name: training for training in self.before if training.name}).get(name)


@dataclass(frozen=True, kw_only=True)
class TrainingRequest(ABC):
    """A requested training; each kind of training is a subclass, with its own `TrainingPlan`.

    Args:
        tokenizer: tokenizer.json; None: the member's own.
        workers: processes; None: one per GPU, or one.
        checkpoint_s: least seconds between checkpoints; see `nas.model.nn.fit.TrainingCheckpoint`.
        files: files to write afterwards; name, tokenizer and the card's content come from the member.
        name: by which later stages name the training; empty: its kind.
        origin: name or kind of the earlier training to start from; empty: the last one.
        date: of chat templates that name it, YYYY-MM-DD.
    """

    kind: ClassVar[str]

    tokenizer: Path | None = None
    workers: int | None = None
    checkpoint_s: float = 60.0
    files: FileOptions = field(default_factory=FileOptions)
    name: str = ""
    origin: str = ""
    date: str = DATE

    def check(self, stages: Collection[str]) -> None:
        """Checks what does not depend on results of earlier trainings, such as files of data, before they begin.

        stages: names and kinds of the trainings that will have ended before.

        Raises:
            InvalidInput: all problems, one a line.
        """
        if self.origin and self.origin not in stages:
            raise UnknownName("earlier stage", self.origin, stages, where="from")

    @abstractmethod
    def plan(self, member: MemberToTrain, log: Log) -> TrainingPlan:
        """Checks the request, prepares its data and returns the complete plan.

        Raises:
            InvalidInput: data, settings or start weights do not fit the member.
            UnknownName: the tokenizer lacks a special token.
        """


class TrainingPlan(BaseModel, ABC):
    """All inputs of a training's result, as JSON for worker processes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: dict[str, Any]
    seed: int
    tokenizer: Path
    tokenizer_sha256: str

    @classmethod
    def of(cls, member: MemberToTrain, seed: int, **fields: Any) -> Self:
        """Returns the plan of a member's training; `fields` are those of the subclass."""
        return cls(
            layout=member.layout.to_json(),
            seed=seed,
            tokenizer=member.tokenizer.resolve(),
            tokenizer_sha256=sha256_of(member.tokenizer),
            **fields,
        )

    @property
    def key(self) -> str:
        """The key of the training, 64 hex digits."""
        return result_key(
            "family-train",
            trainer=TRAINER_VERSION,
            layout=self.layout,
            tokenizer=self.tokenizer_sha256,
            plugins=Layout.from_json(self.layout).plugin_versions,
            **self.key_inputs(),
        )

    @abstractmethod
    def key_inputs(self) -> dict[str, Any]:
        """Returns further inputs of the key; each kind of training needs its own names."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Returns the settings for the record of the training."""

    @property
    @abstractmethod
    def most_workers(self) -> int:
        """Maximum number of workers: sequences in a step of the phase that has fewest."""

    @abstractmethod
    def start(self, folder: Path, log: Log) -> tuple[Path | None, str]:
        """Returns the checkpoint to start from (None: random weights of `seed`), and its description for the record.

        Args:
            folder: of the training, for start weights that are computed first (`START`).
            log: takes one line at a time.
        """

    @abstractmethod
    def optimiser(self) -> Optimiser:
        """Returns the settings of the optimiser."""

    @abstractmethod
    def phases(self, worker: Worker) -> list[TrainingPhase]:
        """Returns data, loss and schedule of each phase, in a worker."""

    @abstractmethod
    def scores(self, model: nn.Module, worker: Worker) -> dict[str, float]:
        """Returns the scores of the trained model on held-out data, in worker 0."""


class GivenWeights(TrainingPlan):
    """Plan of a stage whose start weights are its result: nothing is trained, by one worker."""

    @property
    def most_workers(self) -> int:
        return 1

    def optimiser(self) -> Optimiser:
        return Optimiser(weight_decay=0.0, clip=1.0, balance_rate=0.0)

    def phases(self, worker: Worker) -> list[TrainingPhase]:
        return []


@dataclass(frozen=True)
class Trained:
    """A member with new weights.

    Args:
        family: of the member.
        member: its record.
        folder: of the member.
        layout: of the member.
        weights: the new ones.
        tokenizer: the tokenizer.json that they were trained with.
        files: files to write.
    """

    family: Family
    member: Member
    folder: Path
    layout: Layout
    weights: Checkpoint
    tokenizer: Path
    files: FileOptions


WriteFiles = Callable[[Trained, Log], object]


def write_files_of(trained: Trained, log: Log) -> None:
    """Writes all files of a member with its new weights."""
    options = replace(trained.files, tokenizer=trained.tokenizer).of_member(trained.family, trained.member)
    write_files(trained.folder, trained.layout, trained.weights, options, log)


def train_member(
    family: str,
    size: str,
    request: TrainingRequest,
    log: Log,
    write: WriteFiles = write_files_of,
    *,
    before: tuple[MemberTraining, ...] | None = None,
    last: bool = True,
) -> MemberTraining:
    """Trains a member, from its checkpoint if there is one, and writes its files.

    If the same training has ended earlier, only missing files are written.

    Args:
        family: name of the family.
        size: of the member.
        request: the training.
        log: takes one line at a time.
        write: writes the files.
        before: trainings to continue; None: those on record before the first of this kind.
        last: False if another training follows, which writes the files: none are written, and if this training has
            ended earlier, the record with its successors stays as it is.

    Raises:
        UnknownName: no such family or size, or the tokenizer lacks a special token.
        InvalidInput: the request does not fit the member, or a file was changed: the tokenizer during the training, or
            the weights after it.
        CandidateFailed: the loss is not finite.
        InfrastructureFailed: a worker died, or another process runs the same training.
    """
    folder, owner, member = find_member(family, size)
    layout, tokenizer = Layout.parse(member.layout), request.tokenizer or tokenizer_of(folder)
    require_fit(read_member_tokenizer(tokenizer), layout, str(tokenizer))
    recorded = read_record(folder / TRAINING, MemberTraining)
    history = () if recorded is None else recorded.history
    if before is None:
        before = before_first(request.kind, history)
    subject = MemberToTrain(folder, layout, tokenizer, before)
    if request.origin:
        if (start := subject.named(request.origin)) is None:
            raise UnknownName("earlier stage", request.origin, names_of(before), where="from")
        subject = replace(subject, start=start)
    has_peak = _reset_peak_memory(torch.device("cpu"))
    begin = time.monotonic()
    plan = request.plan(subject, log)
    training = _training_folder(folder, plan.key)
    if record := next((record for record in history if record.config.get("key") == plan.key), None):
        _checked_weights(folder, record)
        record = record.model_copy(update={"before": before, "name": request.name})
        log(f"{size} is trained with these settings already")
        if not last:
            _remove_state(training)
            return record
    else:
        parts = subject.spent
        spent = {"prepare": time.monotonic() - begin - sum(parts.values()), **parts}
        record = _train(plan, request, training, before, spent, has_peak, log)
    lock = folder / ".training.lock"
    with locked(lock, _LOCK_S, waiting=lambda: log(f"{folder}: another training writes its files")):
        if not plan.tokenizer.is_file() or sha256_of(plan.tokenizer) != plan.tokenizer_sha256:
            raise InvalidInput(
                f"{plan.tokenizer} was changed during the training: put back the file of SHA-256"
                f" {plan.tokenizer_sha256} and run the same command again, which has nothing left to train",
                where="--tokenizer",
            )
        write_record(folder / TRAINING, record)
        if last:
            weights = Checkpoint(training / WEIGHTS, record.checkpoint)
            write(Trained(owner, member, folder, layout, weights, plan.tokenizer, request.files), log)
    _remove_state(training)
    return record


def _remove_state(training: Path) -> None:
    """Removes from the folder of a training what only an unfinished one needs."""
    for name in (CHECKPOINT, START):
        (training / name).unlink(missing_ok=True)


def before_first(kind: str, history: Sequence[MemberTraining]) -> tuple[MemberTraining, ...]:
    """Returns the trainings before the first of a kind, all if there is none, which one of this kind continues."""
    return tuple(takewhile(lambda training: training.kind != kind, history))


def names_of(trainings: Iterable[MemberTraining]) -> set[str]:
    """Returns names and kinds of trainings, by which later stages name them."""
    return {name for training in trainings for name in (training.kind, training.name) if name}


def _train(
    plan: TrainingPlan,
    request: TrainingRequest,
    folder: Path,
    before: tuple[MemberTraining, ...],
    spent: dict[str, float],
    has_peak: bool,
    log: Log,
) -> MemberTraining:
    """Trains by a plan in the training's folder; returns its record.

    Args:
        plan: of the training.
        request: that it is of.
        folder: of the training.
        before: earlier trainings.
        spent: seconds of its preparation.
        has_peak: whether the peak memory of this process counts from the beginning of the preparation.
        log: takes one line at a time.
    """
    gpus = torch.cuda.device_count()
    workers = 1 if isinstance(plan, GivenWeights) else request.workers or max(1, gpus)
    if workers > plan.most_workers:
        raise InvalidInput(
            f"{workers} workers, but a step of one of the stages has {plan.most_workers} sequences; give it a larger"
            " batch, or take fewer workers",
            where="--workers",
        )
    if 0 < gpus < workers:  # Ray would wait for more without end
        raise InvalidInput(f"{workers} workers need as many GPUs; this machine has {gpus}", where="--workers")
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    weights, start = plan.start(folder, log)
    spent["prepare"] += time.monotonic() - begin
    prepare_memory_mb = _peak_memory_mb(torch.device("cpu")) if has_peak else None
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    work = Work(plan, weights, folder, threads, host_lock_folder(), request.checkpoint_s)
    outcome = run_workers(work, workers, log)
    outcome["spent"] = spent | outcome["spent"]
    return MemberTraining(
        checkpoint=sha256_of(folder / WEIGHTS),
        config={"key": plan.key, **plan.config(), "workers": workers},
        start=start,
        prepare_memory_mb=prepare_memory_mb,
        **outcome,
        kind=request.kind,
        name=request.name,
        before=before,
    )


def _training_folder(member: Path, key: str) -> Path:
    return member / "training" / key[:12]


def _checked_weights(member: Path, record: MemberTraining) -> Checkpoint:
    weights = Checkpoint(_training_folder(member, record.config["key"]) / WEIGHTS, record.checkpoint)
    if not weights.is_intact():
        raise InvalidInput(
            f"{weights.path} is not what the training wrote: put it back, or remove {member / TRAINING} to train again"
        )
    return weights


@dataclass(frozen=True)
class Work:
    """What each worker process of a training gets.

    Args:
        plan: of the training.
        start: checkpoint with the start weights; None: random ones.
        folder: of the training.
        threads: of each worker.
        lock_folder: of the lock by which measurements on this host wait for trainings.
        checkpoint_s: least seconds between checkpoints.
    """

    plan: TrainingPlan
    start: Path | None
    folder: Path
    threads: int
    lock_folder: Path
    checkpoint_s: float


def run_workers(work: Work, workers: int, log: Log) -> dict[str, Any]:
    """Runs the workers to their end; returns the report of worker 0.

    Args:
        work: of each.
        workers: number of processes.
        log: takes one line at a time.

    Raises:
        CandidateFailed: the loss is not finite.
        InfrastructureFailed: a worker died, or another process runs this training.
    """
    gpu = torch.cuda.is_available()
    with (
        RayCompute(workers),
        _followed(work.folder / _LOG, log),
        tempfile.TemporaryDirectory(prefix="hilnas-ray-") as scratch,
    ):
        path = Path(scratch) / _OUTCOME  # of this command: another one may run the same training
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchConfig, TorchTrainer

        trainer = TorchTrainer(
            _worker_process,
            train_loop_config={"work": work, "outcome": path},
            torch_config=TorchConfig(timeout_s=_COLLECTIVE_S),
            scaling_config=ScalingConfig(
                num_workers=workers, use_gpu=gpu, resources_per_worker={"CPU": 1} | ({"GPU": 1} if gpu else {})
            ),
            run_config=RunConfig(name="member", storage_path=scratch, failure_config=FailureConfig(max_failures=0)),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = lines[-1] if lines else type(error).__name__
            raise _failure(path) or InfrastructureFailed(f"training stopped: {reason}") from error
        outcome: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return outcome


def _worker_process(config: Mapping[str, Any]) -> None:
    """Runs `run_plan` in a worker process. Reports are files, as Ray keeps only the text of errors.

    config: `work`, and the path `outcome` of worker 0's report, or of an error.
    """
    from ray.train import get_context
    from ray.train.torch import get_device

    rank, world = get_context().get_world_rank(), get_context().get_world_size()
    work: Work = config["work"]
    torch.set_num_threads(work.threads)
    # Workers of a killed command may run for a few more seconds, so worker 0 takes a lock.
    alone = nullcontext() if rank else locked(work.folder / "lock")
    try:
        with (
            HostLock(work.lock_folder).shared() as hold,
            (work.folder / _LOG).open("a", encoding="utf-8") as file,
            alone,
        ):

            def log(line: str) -> None:
                if not rank:
                    print(line, file=file, flush=True)

            outcome = run_plan(work, Worker(get_device(), log, hold.yield_if_wanted, rank, world))
            if not rank:
                write_durably(config["outcome"], json.dumps(outcome).encode())
    except NasError as error:
        failure = {"failed": type(error).__name__, "message": str(error)}
        write_durably(config["outcome"], json.dumps(failure).encode())
        raise


def run_plan(work: Work, worker: Worker) -> dict[str, Any]:
    """Runs the part of one worker; worker 0 writes the weights, and returns its report."""
    plan, folder = work.plan, work.folder
    if not worker.rank:
        # Partly written files of killed commands and workers may take gigabytes.
        for name in (CHECKPOINT, START, WEIGHTS):
            for partial in (*folder.glob(f".{name}.*"), *folder.glob(f"{name}.*.partial")):
                partial.unlink(missing_ok=True)
    has_peak = _reset_peak_memory(worker.device)
    model = Model(Layout.from_json(plan.layout), plan.seed)
    if work.start is not None:
        load_weights(model, work.start)
    state, tokens = train_plan(plan, model, folder, worker, work.checkpoint_s)
    if worker.rank:
        return {}
    save_weights(model, folder / WEIGHTS)
    begin = time.monotonic()
    with torch.no_grad(), training_precision(worker.device):
        held_out = plan.scores(model.eval(), worker)
    return {
        "held_out": held_out,
        "tokens": tokens,
        "steps": state.steps,
        "curve": thinned(state.losses, CURVE_POINTS),
        "seconds": state.seconds,
        "spent": {"train": state.seconds, "score": time.monotonic() - begin},
        "peak_memory_mb": _peak_memory_mb(worker.device) if has_peak else None,
        "device": worker.describe(),
    }


def train_plan(
    plan: TrainingPlan, model: Model, folder: Path, worker: Worker, checkpoint_s: float = 60.0
) -> tuple[TrainingState, int]:
    """Trains `model` through the phases of `plan`, resuming from its checkpoint; returns the state and all tokens."""
    key, phases = plan.key, plan.phases(worker)
    state = TrainingState(model.to(worker.device), plan.optimiser(), sum(phase.steps for phase in phases))
    checkpoint = TrainingCheckpoint(folder / CHECKPOINT, {"key": key}, checkpoint_s)
    fit(state, phases, [checkpoint], worker, name=key[:12], precision=lambda: training_precision(worker.device))
    return state, sum(phase.steps * phase.tokens for phase in phases)


def _reset_peak_memory(device: torch.device) -> bool:
    """Sets the peak memory back to what is in use now; returns False where the system does not allow it.

    A worker may have trained other stages before; for the resident set see proc(5), clear_refs.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e6


def _failure(path: Path) -> NasError | None:
    """Returns the error that a worker reported."""
    try:
        outcome = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if outcome.get("failed") == CandidateFailed.__name__:
        return CandidateFailed("diverged", outcome["message"])
    return InfrastructureFailed(outcome["message"]) if "failed" in outcome else None


@contextmanager
def _followed(path: Path, log: Log) -> Iterator[None]:
    """Logs the lines that workers append to `path`, within the context."""
    path.touch()
    end = threading.Event()
    with path.open(encoding="utf-8") as file:
        file.seek(0, os.SEEK_END)

        def follow() -> None:
            while True:
                over = end.wait(0.5)
                for line in file:
                    log(Progress.read(line.rstrip("\n")))
                if over:
                    return

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
