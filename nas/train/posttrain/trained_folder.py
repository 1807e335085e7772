"""Trainings whose result is a folder of its own: done once, resumed after a kill, never over something else.

OUTPUT/training/request.json            what the unfinished training is of
OUTPUT/training/checkpoint.safetensors  its state
OUTPUT/...                              the result; its record is written last
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from nas.core.canonical import content_hash, in_share, sha256_of
from nas.core.durable import locked, write_durably
from nas.core.errors import InvalidInput
from nas.core.family import FamilyRecord, read_record, write_record
from nas.core.progress import Log
from nas.core.units import show_number
from nas.measure.devices.host_lock import HostLock, host_lock_folder
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.fit import TrainingCheckpoint, TrainingPhase, TrainingState, Worker, fit, thinned, training_precision
from nas.train.posttrain.sft import TrainingSettings
from nas.train.pretrain.member_training import CHECKPOINT, CURVE_POINTS
from nas.train.release.shards import SINGLE, read_json
from nas.train.release.tokenizer import json_bytes

REQUEST = "request.json"
_FOLDER = "training"

AnyItem = TypeVar("AnyItem")


class FolderRecord(FamilyRecord):
    """Record of a training with a folder of its own.

    Args:
        key: hash of all its inputs.
        weights: SHA-256 of model.safetensors.
        source: what it started from.
        layout: of the language model.
        examples: that were trained on.
        steps: of the optimiser.
        curve: steps and mean losses.
        before: scores on held-out data before the training, by name.
        after: the same after it.
        seconds: of all steps.
        device: that trained.
        hilnas: version.
    """

    key: str
    weights: str
    source: str
    layout: str
    examples: int
    steps: int
    curve: tuple[tuple[int, float], ...]
    before: dict[str, float]
    after: dict[str, float]
    seconds: float
    device: str
    hilnas: str


AnySettings = TypeVar("AnySettings", bound=TrainingSettings)
AnyRecord = TypeVar("AnyRecord", bound=FolderRecord)


class FolderTraining(ABC, Generic[AnySettings, AnyRecord]):
    """A training whose result is a folder of its own; each kind of training is a subclass.

    Args:
        output: folder of the result.
        settings: of the training.
        inputs: all that the result depends on, as JSON values.
        checkpoint_s: least seconds between checkpoints.

    Attributes:
        record: class of the record.
        file: of the record, in `output`.
        phase: shown in progress lines.
        steps: of the optimiser.
        tokens: of a step, about.
        worker: this process, from `start` on.
    """

    record: type[AnyRecord]
    file: str
    phase: str
    steps: int
    tokens: int
    worker: Worker

    def __init__(self, output: Path, settings: AnySettings, inputs: Sequence[Any], checkpoint_s: float) -> None:
        self.output, self.settings, self._checkpoint_s = output, settings, checkpoint_s
        self.key = content_hash(inputs)

    @abstractmethod
    def start(self, folder: Path) -> nn.Module:
        """Returns the model to train; `folder` is of the training's files."""

    @abstractmethod
    def passes(self, step: int) -> list[tuple[Tensor, ...]]:
        """Returns the passes of a step, each of the tensors that `loss` takes after the model."""

    @abstractmethod
    def loss(self, model: Any, *tensors: Tensor) -> Tensor:
        """Returns the share of a pass in the loss of its step."""

    @abstractmethod
    def scores(self, model: Any) -> dict[str, float]:
        """Returns the scores of a model on held-out data, by name; empty: nothing is held out."""

    @abstractmethod
    def write(self, model: Any) -> dict[str, Any]:
        """Writes the trained model into `output`, and returns the fields of the record that only a subclass knows."""

    def precision(self) -> AbstractContextManager[object]:
        """Returns the context of forward passes."""
        return training_precision(self.worker.device)

    def run(self, log: Log) -> AnyRecord:
        """Returns the record of the training, which is done unless it is there.

        Raises:
            InvalidInput: the folder holds something else.
            CandidateFailed: the loss is not finite.
        """
        folder, path = self.output / _FOLDER, self.output / self.file
        require_folder(self.output, self.key, (path, folder / REQUEST), "another training", (_FOLDER,))
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            if (record := read_record(path, self.record)) is not None:
                if not Checkpoint(self.output / SINGLE, record.weights).is_intact():
                    what = f"is missing, or not what the training wrote; remove {self.output}"
                    raise InvalidInput(what, where=str(self.output / SINGLE))
                log(f"{self.output} is trained with these settings already")
            else:
                # Partly written files of killed runs may take gigabytes.
                for partial in (*self.output.rglob("*.partial"), *folder.glob(f".{CHECKPOINT}.*")):
                    partial.unlink()
                write_durably(folder / REQUEST, json_bytes({"key": self.key}))
                with HostLock(host_lock_folder()).shared() as hold:
                    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
                    self.worker = Worker(device, log, hold.yield_if_wanted)
                    record = self._train(folder)
                write_record(path, record)
        shutil.rmtree(folder, ignore_errors=True)  # another process that waited may remove it, too
        return record

    def _train(self, folder: Path) -> AnyRecord:
        worker, settings = self.worker, self.settings
        model = self.start(folder).to(worker.device)
        before = self.scores(model)
        worker.log(f"held out, before: {_described(before)}")
        state = TrainingState(model, settings.optimiser(), self.steps)
        rate = partial(settings.rate, steps=self.steps)
        phase = TrainingPhase(self.phase, self.steps, self.tokens, self.passes, self.loss, rate)
        checkpoint = TrainingCheckpoint(folder / CHECKPOINT, {"key": self.key}, self._checkpoint_s)
        fit(state, [phase], [checkpoint], worker, name=self.output.name, precision=self.precision)
        after = self.scores(model.eval())
        worker.log(f"held out: {_described(after)}")
        more = self.write(model)
        return self.record(
            key=self.key,
            weights=sha256_of(self.output / SINGLE),
            steps=state.steps,
            curve=tuple(thinned(state.losses, CURVE_POINTS)),
            before=before,
            after=after,
            seconds=state.seconds,
            device=worker.describe(),
            hilnas=version("hilnas"),
            **more,
        )


def _described(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {show_number(value)}" for name, value in scores.items()) or "none"


def split(
    items: Sequence[AnyItem], share: float, digest: Callable[[AnyItem], str]
) -> tuple[list[AnyItem], list[AnyItem]]:
    """Returns items to train on, and the share of them that is held out, by the hash that `digest` gives each."""
    parts: tuple[list[AnyItem], list[AnyItem]] = ([], [])
    for item in items:
        parts[in_share(digest(item), share)].append(item)
    return parts


def require_folder(output: Path, key: str, records: Sequence[Path], what: str, harmless: Sequence[str]) -> None:
    """Checks that a folder is empty, or holds the result of `key`, whole or in parts.

    Args:
        output: the folder.
        key: hash of all inputs of the result.
        records: files with the key of what the folder holds, that of a whole result first.
        what: the folder holds, if it is of another key.
        harmless: patterns of names of other files.

    Raises:
        InvalidInput: it holds something else.
    """
    for path in records:
        if path.is_file():
            if read_json(path).get("key") != key:
                raise InvalidInput(f"holds {what}; name another folder", where=str(output))
            return
    names = [path.name for path in output.iterdir()] if output.is_dir() else []
    others = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in harmless)]
    if others or (output.exists() and not output.is_dir()):
        raise InvalidInput("is not empty; name another folder", where=str(output))
