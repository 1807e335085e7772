"""Trainings whose result is a folder of its own: done once, resumed after a kill, never over something else.

OUTPUT/training/request.json            what the unfinished training is of
OUTPUT/training/checkpoint.safetensors  its state
OUTPUT/...                              the result; its record is written last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from nas.core.canonical import sha256_of
from nas.core.durable import locked, write_durably
from nas.core.errors import InvalidInput
from nas.core.family import FamilyRecord, read_record, write_record
from nas.measure.devices.host_lock import HostLock, host_lock_folder
from nas.model.nn.fit import Log, TrainingState, Worker, thinned
from nas.train.release.shards import SINGLE
from nas.train.release.tokenizer import json_bytes

_FOLDER = "training"
_REQUEST = "request.json"
_CURVE_POINTS = 200


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

    @classmethod
    def of(
        cls,
        output: Path,
        key: str,
        state: TrainingState,
        worker: Worker,
        scores: Sequence[dict[str, float]],
        **more: Any,
    ) -> Self:
        """Returns the record of a training that has ended.

        Args:
            output: folder with the weights.
            key: hash of all its inputs.
            state: at its end.
            worker: that trained.
            scores: before and after.
            more: the other fields.
        """
        before, after = scores
        return cls(
            key=key,
            weights=sha256_of(output / SINGLE),
            steps=state.steps,
            curve=tuple(thinned(state.losses, _CURVE_POINTS)),
            before=before,
            after=after,
            seconds=state.seconds,
            device=worker.describe(),
            hilnas=version("hilnas"),
            **more,
        )


def described(scores: Mapping[str, float]) -> str:
    """Returns scores as text."""
    return ", ".join(f"{name} {value:.4g}" for name, value in scores.items()) or "none"


AnyRecord = TypeVar("AnyRecord", bound=FolderRecord)


def trained_once(
    output: Path,
    key: str,
    path: Path,
    kind: type[AnyRecord],
    train: Callable[[Path, Worker], AnyRecord],
    log: Log,
) -> AnyRecord:
    """Returns the record of a training, which is done unless it is there.

    Args:
        output: folder of the result.
        key: hash of all inputs of the training.
        path: of the record, in `output`.
        kind: of the record.
        train: (folder of the training's files, worker) -> the record, after the result was written to `output`.
        log: takes one line at a time.

    Raises:
        InvalidInput: the folder holds something else.
    """
    _require_folder(output, key, path)
    folder = output / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if (record := read_record(path, kind)) is not None:
            if sha256_of(output / SINGLE) != record.weights:
                raise InvalidInput(f"is not what the training wrote; remove {output}", where=str(output / SINGLE))
            log(f"{output} is trained with these settings already")
        else:
            write_durably(folder / _REQUEST, json_bytes({"key": key}))
            with HostLock(host_lock_folder()).shared() as hold:
                device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
                record = train(folder, Worker(device, log, hold.yield_if_wanted))
            write_record(path, record)
    shutil.rmtree(folder)
    return record


def _require_folder(output: Path, key: str, record: Path) -> None:
    """Checks that a folder is empty, or holds this training."""
    for path in (record, output / _FOLDER / _REQUEST):
        if path.is_file():
            if json.loads(path.read_bytes()).get("key") != key:
                raise InvalidInput("holds another training; name another folder", where=str(output))
            return
    if output.exists() and (not output.is_dir() or any(path.name != _FOLDER for path in output.iterdir())):
        raise InvalidInput("is not empty; name another folder", where=str(output))
