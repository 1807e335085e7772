"""What a training takes along to another host of a Ray cluster, and what it brings back.

Hosts of a cluster share nothing: neither `$NAS_HOME` nor a cache. So a training takes its corpus along and the
checkpoint that it goes on from, trains below that host's own `$NAS_HOME`, and brings home its checkpoint and weights.
There they lie where a training at home would have left them, and whatever comes next finds them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nas.core import paths
from nas.core.durable import write_durably
from nas.core.errors import InfrastructureFailed
from nas.devices.places import host_lock_folder
from nas.proxy.corpus import CorpusRef, unpack
from nas.proxy.job import CHECKPOINT, WEIGHTS, LmRun, TrainJob
from nas.service import work

Outcome = dict[str, Any]


def checkpoints(spec: work.Spec) -> dict[str, bytes]:
    """Key -> content of the checkpoints at home that the training of `spec` can go on from."""
    job, folder = TrainJob.model_validate(spec["job"]), Path(spec["checkpoints"])
    keys = [key for key in (job.key, job.resume_from) if key is not None]
    return {key: path.read_bytes() for key in keys if (path := folder / key / CHECKPOINT).is_file()}


def corpus_of(spec: work.Spec) -> CorpusRef | None:
    """The corpus that the training of `spec` reads; None for a task, which makes its own data."""
    run = TrainJob.model_validate(spec["job"]).run
    return run.corpus if isinstance(run, LmRun) else None


def train(spec: work.Spec, brought: Mapping[str, bytes], text: bytes | None) -> Outcome:
    """The training of `spec` on this host; as `work.train`, with the files that it left.

    Args:
        spec: as at home; its paths are not looked at.
        brought: `checkpoints`.
        text: content of the corpus.
    """
    job = TrainJob.model_validate(spec["job"])
    unpack_corpus(spec, text)
    # Named by the key: what a killed worker left is gone on from, if it comes back to this host.
    folder = paths.home() / "work" / "elsewhere" / job.key
    for key, content in brought.items():
        _write_new(folder / key / CHECKPOINT, content)
    here = {**spec, "checkpoints": str(folder), "lock": str(host_lock_folder())}
    outcome: Outcome = work.train(here)
    if "value" in outcome:
        left = folder / job.key
        outcome["files"] = {name: (left / name).read_bytes() for name in (CHECKPOINT, WEIGHTS)}
        shutil.rmtree(folder)
    return outcome


def unpack_corpus(spec: work.Spec, text: bytes | None) -> None:
    """Keeps the corpus of `spec` in this host's cache."""
    wanted = corpus_of(spec)
    if wanted is not None and text is not None:
        unpack(wanted, text)


def unload(spec: work.Spec, outcome: Outcome) -> Outcome:
    """Puts the files that a training brought back to where `spec` wants them; the outcome as of a training at home.

    Raises:
        InfrastructureFailed: the weights are not those that were trained.
    """
    files = outcome.pop("files", None)
    if files is None:
        return outcome  # trained at home, or failed
    value = outcome["value"]
    if hashlib.sha256(files[WEIGHTS]).hexdigest() != value["weights_sha256"]:
        raise InfrastructureFailed(f"the weights of training {value['key'][:12]} were damaged on their way")
    folder = Path(spec["checkpoints"]) / value["key"]
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CHECKPOINT, WEIGHTS):
        write_durably(folder / name, files[name])
    return outcome | {"value": value | {"weights": str(folder / WEIGHTS)}}


def shipped_environment() -> dict[str, str]:
    """Variables that a worker at home must have as this process has them, whoever started the node."""
    return dict(_set("NAS_HOME", "NAS_CACHE", "PYTHONPATH", "PATH"))


def _set(*names: str) -> Iterator[tuple[str, str]]:
    yield from ((name, os.environ[name]) for name in names if name in os.environ)


def _write_new(path: Path, content: bytes) -> None:
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)
