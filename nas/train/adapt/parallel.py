"""Training and scoring of a library as tasks of worker processes, one for each depth, on this machine or a cluster.

A task trains and scores as `Library` does, with the same lock, checkpoint and files. It computes the residual stream in
front of its depth from the embedding, so that tasks need nothing of each other. Killed with its command or alone, it
leaves what it has stored; who comes next continues. Nodes share the folders of library, model and cache.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput
from nas.core.progress import Progress
from nas.core.replacement import Alternative, Slot, block_name, parsed
from nas.measure.devices.host_lock import host_lock_folder
from nas.measure.runtimes.base import BlockRoundingRuntime
from nas.model.nn.fit import Worker, device_of
from nas.model.nn.mixes import ScoredText
from nas.search.compute.ray import ClusterCompute, Compute, RayCompute
from nas.search.compute.worker import Share, Spec, under_host_lock
from nas.train.adapt.library import Library, LibrarySettings, TrainedTeacher, rounding_runtime
from nas.train.adapt.request import AdaptRequest
from nas.train.pretrain.data import Tokens, open_tokens

_TRIES = 3
"""Tries of a depth whose worker dies."""
_PAUSE_S = 0.5
"""Time between two tries, and between two looks at a network file system."""
_LATE_S = 60.0
"""Longest time after which a network file system shows what another host has written."""

_DEPTHS = "layers with trained and scored blocks"

_log = logging.getLogger("nas.train.adapt")


@dataclass(frozen=True)
class Workers:
    """Processes that train a library.

    Args:
        most: maximum tasks that run in parallel.
        opened: number of tasks -> what they run on.
    """

    most: int
    opened: Callable[[int], AbstractContextManager[Compute]]

    @staticmethod
    def local(count: int) -> Workers:
        """Returns so many processes of this machine."""
        return Workers(count, lambda tasks: RayCompute(min(count, tasks)))

    @staticmethod
    def of_cluster(address: str) -> Workers:
        """Returns those of a Ray cluster, of which this machine is a node."""
        return Workers(sys.maxsize, lambda tasks: ClusterCompute(address, trainings=tasks))


def workers_of(request: AdaptRequest) -> Workers | None:
    """Returns the processes that a request names; None: the command's process alone.

    Raises:
        InvalidInput: it names both kinds.
    """
    if request.ray_address is None:
        return Workers.local(request.workers) if request.workers > 1 else None
    if request.workers > 1:
        raise InvalidInput("cannot be combined with --ray-address: the cluster has its own", where="--workers")
    return Workers.of_cluster(request.ray_address)


class ParallelLibrary(Library):
    """A library whose depths are trained in parallel, by `workers`; other arguments are those of `Library`."""

    def __init__(
        self,
        folder: Path,
        teacher: TrainedTeacher,
        sources: Sequence[Tokens],
        settings: LibrarySettings,
        worker: Worker,
        recall: ScoredText | None,
        rounding: BlockRoundingRuntime | None,
        workers: Workers,
    ) -> None:
        super().__init__(folder, teacher, sources, settings, worker, recall, rounding)
        self.parallel, self._workers = workers.most, workers
        self._spec = {
            "library": str(folder.resolve()),
            "teacher": str(teacher.checkpoint.resolve()),
            "sha256": teacher.sha256,
            "text": [(source.name, source.key) for source in sources],
            "recall": recall and [recall.ids.tolist(), {name: at.tolist() for name, at in recall.groups.items()}],
            "settings": settings.model_dump(mode="json"),
            "rounding": rounding and rounding.name,
            "lock": str(host_lock_folder()),
        }

    def train(self, alternatives: Mapping[Slot, Sequence[Alternative]]) -> dict[Slot, tuple[Alternative, ...]]:
        """Trains the alternatives that the library lacks, computes their scores, and returns those that are sound.

        Raises:
            CandidateFailed: see `Compute.run`.
            InfrastructureFailed: the disk is full, workers died again and again, or a node does not share the folders.
        """
        missing: dict[int, list[tuple[Slot, Alternative]]] = {}
        for slot, blocks in alternatives.items():
            for block in blocks:
                if not self._has(slot, block):
                    missing.setdefault(slot.depth, []).append((slot, block))
        if missing:
            self.worker.log(f"starting workers for {len(missing)} depths of the library")
            with (
                self._workers.opened(len(missing)) as compute,
                tempfile.NamedTemporaryFile(prefix=".", dir=self.folder) as mark,
            ):
                threads = max(1, torch.get_num_threads() // compute.workers)
                spec = self._spec | {"mark": mark.name, "threads": threads}
                asyncio.run(self._run(compute, spec, missing))
        return super().train(alternatives)

    async def _run(
        self, compute: Compute, spec: Spec, missing: Mapping[int, Sequence[tuple[Slot, Alternative]]]
    ) -> None:
        done = 0

        async def filled(depth: int) -> None:
            nonlocal done
            await self._fill(compute, spec, depth, missing[depth])
            done += 1
            self.worker.log(Progress(_DEPTHS, done, len(missing)))

        self.worker.log(Progress(_DEPTHS, 0, len(missing)))
        # The deepest take longest. The first error cancels the other tasks.
        await asyncio.gather(*map(filled, sorted(missing)[::-1]))

    async def _fill(
        self, compute: Compute, spec: Spec, depth: int, missing: Sequence[tuple[Slot, Alternative]]
    ) -> None:
        """Runs the task of a depth, again where its worker dies, and waits for its files."""
        blocks = {"blocks": [(depth, slot.part, block_name(block)) for slot, block in missing]}
        for attempt in range(1, _TRIES + 1):
            try:
                outcome = await compute.run(fill, {**spec, **blocks}, "shared")
                break
            except InfrastructureFailed as error:
                if attempt == _TRIES:
                    raise InfrastructureFailed(f"depth {depth}: {error}; tried {_TRIES} times") from error
                self.worker.log(f"depth {depth}: {error}; trying again")
                await asyncio.sleep(_PAUSE_S)
        if "failed" in outcome:
            raise CandidateFailed(**outcome["failed"])
        deadline = time.monotonic() + _LATE_S
        while not all(self._has(*pair) for pair in missing):
            if time.monotonic() > deadline:
                raise InfrastructureFailed(f"depth {depth}: a worker ended, but its blocks are not in {self.folder}")
            await asyncio.sleep(_PAUSE_S)
        self.worker.log(f"depth {depth}: {len(missing)} blocks trained and scored")

    def _has(self, slot: Slot, alternative: Alternative) -> bool:
        """Returns whether an alternative is trained and scored, or its training diverged."""
        block = self.trainable(slot, alternative)
        if block is not None and self._diverged(slot, block).is_file():
            return True
        return self.is_ready(slot, alternative) and self._score_path([(slot, alternative)]).is_file()


@under_host_lock
def fill(spec: Spec, share: Share) -> None:
    """Trains and scores alternatives of one depth of a library: {blocks, threads, device?, ...} -> nothing."""
    torch.set_num_threads(spec["threads"])
    device = device_of(spec.get("device", "auto"))
    folder = Path(spec["library"])
    if not Path(spec["mark"]).exists():
        raise InfrastructureFailed(f"a node has another {folder} than the command: share it, model and $NAS_CACHE")
    teacher = TrainedTeacher.load(Path(spec["teacher"]), device)
    if teacher.sha256 != spec["sha256"]:
        raise InfrastructureFailed(f"a node has another {spec['teacher']} than the command")
    recall = None
    if spec["recall"] is not None:
        ids, groups = spec["recall"]
        recall = ScoredText(torch.tensor(ids), {name: torch.tensor(at) for name, at in groups.items()})
    library = Library(
        folder,
        teacher,
        [open_tokens(*source) for source in spec["text"]],
        LibrarySettings.model_validate(spec["settings"]),
        Worker(device, _log.info, share.yield_if_wanted),
        recall,
        rounding_runtime(spec["rounding"]),
    )
    alternatives: dict[Slot, list[Alternative]] = {}
    for depth, part, name in spec["blocks"]:
        alternatives.setdefault(Slot(depth, part), []).append(parsed(name, part))
    library.scores(library.train(alternatives))
