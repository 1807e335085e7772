"""A teacher of proxies: its likeliest tokens on the batches that a student sees, computed once and cached.

All layouts see the same batches under one seed, so that one teacher serves a whole study: training it costs as much as
one candidate, its predictions one pass over the batches, and students pay for neither.

    $NAS_CACHE/teachers/KEY/log_p.npy   float16 [steps, B, T, K]
                            ids.npy     uint16, the same
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.durable import locked
from nas.core.stored import stored_folder
from nas.model.nn.distillation import top_k
from nas.model.nn.model import Model
from nas.search.proxy.data import Data, Group
from nas.search.proxy.job import Teaching, TrainJob, exported_layout, weights_file

TEACHER_VERSION = 1
"""Part of keys: increase it with every change after which the same teacher predicts otherwise."""

_DEADLINE_S = 3600.0


class Predictions:
    """A teacher's likeliest tokens at every step, mapped into memory.

    Args:
        folder: of the arrays.
    """

    def __init__(self, folder: Path) -> None:
        self._log_p = np.load(folder / "log_p.npy", mmap_mode="r")
        self._ids = np.load(folder / "ids.npy", mmap_mode="r")

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and tokens of a step, [B, T, K] each."""
        return torch.from_numpy(self._log_p[step].astype(np.float32)), torch.from_numpy(
            self._ids[step].astype(np.int64)
        )


def predictions(
    job: TrainJob, teaching: Teaching, data: Data, model: Callable[[], Model], yield_hook: Callable[[], object]
) -> Predictions:
    """Returns the predictions of a teacher on the batches of `job`, from the cache if they are there.

    Args:
        job: the student's.
        teaching: its teacher.
        data: the student's.
        model: returns the trained teacher; called if the predictions are not cached.
        yield_hook: called before each pass, and while another process computes them; may block.

    Raises:
        InfrastructureFailed: another process has been computing them for an hour.
        OSError: the disk is full.
    """
    inputs = [teaching.job.key, job.run.key_inputs(), job.batch, job.seed, job.steps, teaching.k]
    lock = paths.cache() / "teachers" / f"{content_hash(inputs)}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    # Measurements wait for all trainings of this host: while this one waits for another process, it lets them run.
    with locked(lock, _DEADLINE_S, meanwhile=yield_hook):
        folder = stored_folder(
            "teachers",
            TEACHER_VERSION,
            inputs,
            lambda folder: _write(folder, job.steps, teaching.k, data, model(), yield_hook),
        )
    return Predictions(folder)


@torch.no_grad()
def _write(folder: Path, steps: int, k: int, data: Data, teacher: Model, yield_hook: Callable[[], object]) -> None:
    """Writes the predictions for `steps` batches to `folder`."""
    teacher.eval()
    device = next(teacher.parameters()).device
    shape = (steps, *data.batch(0)[0].shape, k)
    log_p = _array(folder / "log_p.npy", np.float16, shape)
    ids = _array(folder / "ids.npy", np.uint16, shape)
    for step in range(steps):
        yield_hook()
        likeliest = top_k(teacher(data.batch(step)[0].to(device)).float(), k)
        log_p[step], ids[step] = likeliest.log_p.cpu().numpy(), likeliest.ids.cpu().numpy()
    log_p.flush()
    ids.flush()


def _array(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """Makes an array in a file, whose space is reserved: writing to a mapped file on a full disk would be a crash."""
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def trained_model(job: TrainJob, checkpoint_dir: Path, device: torch.device) -> Model | None:
    """Returns the model that a finished training wrote; None if it is not there, or damaged."""
    path = weights_file(checkpoint_dir, job.key)
    if not path.is_file():
        return None
    try:
        weights = load_file(path, str(device))
    except SafetensorError:
        return None
    model = Model(exported_layout(job), None).to(device)
    model.load_state_dict(weights)
    return model


class TaughtData:
    """A student's data with the predictions of its teacher: batches hold inputs, labels, log-probabilities and ids.

    Args:
        data: the student's.
        taught: of its teacher.
    """

    def __init__(self, data: Data, taught: Predictions) -> None:
        self._data, self._taught = data, taught

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Returns inputs and labels [B, T], and the teacher's log-probabilities and tokens [B, T, K]."""
        return (*self._data.batch(step), *self._taught.at(step))

    def groups(self) -> dict[str, Group]:
        return self._data.groups()
