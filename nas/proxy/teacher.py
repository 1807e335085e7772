"""A teacher of proxies: its likeliest tokens on the batches that a student sees, computed once and cached.

All layouts see the same batches under one seed, so that one teacher serves a whole study: training it costs as much as
one candidate, its predictions one pass over the batches, and students pay for neither.

    $NAS_CACHE/teachers/KEY/log_p.npy   float16 [steps, B, T, K]
                            ids.npy     uint16, the same
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.durable import locked
from nas.nn.distillation import TopK, decoupled_top_k, top_k
from nas.nn.fit import Stage
from nas.nn.model import Model
from nas.proxy.data import Data
from nas.proxy.job import CHECKPOINT, Teaching, TrainJob, proxy_layout

TEACHER_VERSION = 1
"""Part of keys: increase it with every change after which the same teacher predicts otherwise."""

_DEADLINE_S = 3600.0
_AVERAGE = "average.module."


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
        yield_hook: called before each pass; may block.

    Raises:
        InfrastructureFailed: another process has been computing them for an hour.
    """
    inputs = [TEACHER_VERSION, teaching.job.key, job.run.key_inputs(), job.batch, job.seed, job.steps, teaching.k]
    folder = paths.cache() / "teachers" / content_hash(inputs)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{folder.name}.lock"), _DEADLINE_S):
            if not folder.is_dir():
                _write(folder, job.steps, teaching.k, data, model(), yield_hook)
    return Predictions(folder)


@torch.no_grad()
def _write(folder: Path, steps: int, k: int, data: Data, teacher: Model, yield_hook: Callable[[], object]) -> None:
    """Writes the predictions for `steps` batches to `folder`, atomically."""
    teacher.eval()
    device = next(teacher.parameters()).device
    shape = (steps, *data.batch(0)[0].shape, k)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
        partial = Path(scratch) / "predictions"
        partial.mkdir()
        log_p = np.lib.format.open_memmap(partial / "log_p.npy", "w+", np.float16, shape)
        ids = np.lib.format.open_memmap(partial / "ids.npy", "w+", np.uint16, shape)
        for step in range(steps):
            yield_hook()
            known = top_k(teacher(data.batch(step)[0].to(device)).float(), k)
            log_p[step], ids[step] = known.log_p.cpu().numpy(), known.ids.cpu().numpy()
        log_p.flush()
        ids.flush()
        shutil.move(partial, folder)


def trained_average(job: TrainJob, checkpoint_dir: Path, device: torch.device) -> Model | None:
    """Returns the averaged model of a finished training, from its checkpoint; None if that is not there."""
    path = checkpoint_dir / job.key / CHECKPOINT
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            names = [name for name in file.keys() if name.startswith(_AVERAGE)]  # noqa: SIM118 - not a mapping
            weights = {name.removeprefix(_AVERAGE): file.get_tensor(name) for name in names}
            if len(file.get_tensor("losses")) < job.steps:
                return None
    except SafetensorError:
        return None
    model = Model(proxy_layout(job), None).to(device)
    model.load_state_dict(weights)
    return model


def taught(stage: Stage, teaching: Teaching, known: Predictions) -> Stage:
    """Returns a student's stage: `weight` of its loss is the decoupled Top-K objective, the rest is cross-entropy."""

    def batches(step: int) -> list[tuple[Tensor, ...]]:
        return [(*tensors, *known.at(step)) for tensors in stage.batches(step)]

    def loss(model: nn.Module, inputs: Tensor, labels: Tensor, log_p: Tensor, ids: Tensor) -> Tensor:
        logits = model(inputs).float()
        own = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        theirs = decoupled_top_k(logits, TopK(log_p, ids), teaching.temperature).mean()
        return (1 - teaching.weight) * own + teaching.weight * theirs

    return replace(stage, batches=batches, loss=loss)
