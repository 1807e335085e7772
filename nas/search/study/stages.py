"""The stages of a trial and their result keys: exports and trainings go to `Compute`, measurements to device jobs."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.layout import Layout
from nas.core.measurement import Measurement
from nas.core.quality_config import QualityConfig
from nas.core.scoring import MeasurementKey
from nas.core.space import SearchSpace
from nas.infra.store.rows import Stage
from nas.measure.protocol.calibration import DEPLOY_SEED, MeasurementTarget
from nas.measure.protocol.reference import export_key, gate_key, measure_key
from nas.measure.protocol.rounds import Jobs, Subject, measure
from nas.measure.runtimes.base import Artifact, Checkpoint, RandomWeights, Weights, projector_path
from nas.model.text.corpus import CorpusRef
from nas.search.compute import worker
from nas.search.compute.ray import Compute
from nas.search.compute.worker import Outcome, failure
from nas.search.proxy.job import TrainJob, TrainResult, exported_layout, weights_file
from nas.search.proxy.ladder import rung_jobs, seed_scores
from nas.search.study.ledger import Ledger

Action = Callable[[], Awaitable[Outcome]]
SeedScores = dict[int, dict[str, float]]
T = TypeVar("T")
_TRIES = {"export": 3, "train": 3, "gate": 3, "measure": 1}
_FIRST_PAUSE_S = 0.5
_TIMES = ("seconds", "waited_s", "cpu_seconds")


class Stages:
    """Runs the stages of one study in this process.

    Args:
        ledger: stores results.
        first_pause_s: pause before the second try of a stage; doubles with each try.
    """

    def __init__(self, ledger: Ledger, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        self._ledger = ledger
        self._first_pause_s = first_pause_s
        self._running: dict[str, asyncio.Task[Outcome]] = {}
        self.restoring: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Key -> lock of who makes its files again: several trials may share a proxy, whose files were removed."""

    async def run(self, stage: Stage, key: str, trial: int, action: Action) -> Any:
        """Returns the stage's value, from the store if it is there.

        Raises:
            CandidateFailed: the candidate's own failure, which is its result.
            InfrastructureFailed: the last of several tries failed.
        """
        outcome = self._ledger.result(key, trial)
        while outcome is None:
            task = self._running.get(key)
            if task is None:
                task = asyncio.ensure_future(self._do(stage, key, trial, action))
                self._running[key] = task
                task.add_done_callback(lambda _: self._running.pop(key, None))
                outcome = await task
            else:
                # Another trial runs the same stage: its result is used, but its cancellation is not passed on.
                await asyncio.wait([task])
                outcome = self._ledger.result(key, trial)
        return value_of(outcome)

    async def _do(self, stage: Stage, key: str, trial: int, action: Action) -> Outcome:
        tries = _TRIES[stage]
        for past in range(tries):
            try:
                outcome = await action()
                return self._ledger.put(key, stage, outcome, trial)
            except InfrastructureFailed as error:
                self._ledger.attempt(key, stage, trial, str(error))
                if past == tries - 1:
                    raise
                await asyncio.sleep(self._first_pause_s * 2**past)
        raise AssertionError("unreachable: the last try returns or raises")


class PrioritySemaphore:
    """Serves waiters by rank instead of by arrival.

    Args:
        value: how many hold it at the same time.
    """

    def __init__(self, value: int) -> None:
        self._free = value
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = 0

    @asynccontextmanager
    async def acquire(self, rank: int) -> AsyncIterator[None]:
        """Holds the semaphore while the context is open; lower ranks go first, equal ones in order of arrival."""
        self._arrivals += 1
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, self._arrivals, ready))
        self._serve()
        try:
            await ready
        except asyncio.CancelledError:
            if ready.done() and not ready.cancelled():
                self._release()
            raise
        try:
            yield
        finally:
            self._release()

    @property
    def free(self) -> int:
        """How many more can hold it now."""
        return self._free

    def _release(self) -> None:
        self._free += 1
        self._serve()

    def _serve(self) -> None:
        while self._free and self._waiting:
            ready = heapq.heappop(self._waiting)[2]
            if not ready.cancelled():
                self._free -= 1
                ready.set_result(None)


class Trainings:
    """Runs trainings that wait for a worker at the same time and differ in their seed alone as one.

    Where more workers are free, they share the seeds: one pass over several takes less time in all, not by itself.

    Args:
        compute: runs them.
        scratch: folder for checkpoints.
        lock: folder of the host lock.
    """

    def __init__(self, compute: Compute, scratch: Path, lock: Path) -> None:
        self._compute, self._scratch, self._lock = compute, scratch, lock
        self._free = PrioritySemaphore(compute.workers)
        self._waiting: dict[str, _SeedGroup] = {}

    async def run(self, trial: int, job: TrainJob) -> Outcome:
        """Returns the outcome of one job; lower trials go first.

        Raises:
            InfrastructureFailed: the worker died, or says so.
        """
        group = self._waiting.get(job.seeds_key)
        if group is None:
            group = self._waiting[job.seeds_key] = _SeedGroup()
            group.task = asyncio.ensure_future(self._run(trial, group))
        group.jobs.append(job)
        try:
            outcomes = await asyncio.shield(group.task)
        except asyncio.CancelledError:
            group.cancelled += 1
            if group.cancelled == len(group.jobs):
                group.task.cancel()
            raise
        return outcomes[job.key]

    async def _run(self, trial: int, group: _SeedGroup) -> dict[str, Outcome]:
        """Waits for a worker; returns the outcome of each job of the group under its key."""
        try:
            async with self._free.acquire(trial):
                await asyncio.sleep(0)  # trainings that begin now get their worker before this one shares the free ones
                self._close(group)
                size = math.ceil(len(group.jobs) / (1 + self._free.free))
                first, *others = (group.jobs[start : start + size] for start in range(0, len(group.jobs), size))
                # All run to their end, so that a retry meets no worker that still trains the same seed.
                results = await asyncio.gather(
                    self._train(first), *(self._train_elsewhere(trial, part) for part in others), return_exceptions=True
                )
        finally:
            self._close(group)
        outcomes: dict[str, Outcome] = {}
        for result in results:
            if isinstance(result, BaseException):
                raise result
            outcomes |= result
        return outcomes

    async def _train_elsewhere(self, trial: int, jobs: Sequence[TrainJob]) -> dict[str, Outcome]:
        async with self._free.acquire(trial):
            return await self._train(jobs)

    async def _train(self, jobs: Sequence[TrainJob]) -> dict[str, Outcome]:
        spec = {
            "jobs": [job.model_dump(mode="json") for job in jobs],
            "checkpoints": str(self._scratch / "checkpoints"),
            "lock": str(self._lock),
        }
        outcome = await self._compute.run(worker.train, spec, "train")
        times = {name: outcome[name] / len(jobs) for name in _TIMES if name in outcome}
        return {key: {**of_seed, **times} for key, of_seed in outcome["value"].items()}

    def _close(self, group: _SeedGroup) -> None:
        """Lets no further seed join."""
        self._waiting = {key: open_group for key, open_group in self._waiting.items() if open_group is not group}


@dataclass(eq=False)
class _SeedGroup:
    """Jobs that run as one; cancelled once all who wait for it are."""

    jobs: list[TrainJob] = field(default_factory=list)
    cancelled: int = 0
    task: asyncio.Future[dict[str, Outcome]] = field(init=False)


@dataclass(frozen=True)
class StageWork:
    """Runs the stages of one study.

    Args:
        space: the study's.
        targets: (device, runtime) as the space names them -> what measures there.
        corpus: for proxy trainings.
        stages: finds, shares and retries.
        ledger: keeps artifacts.
        compute: runs exports and checks.
        trainings: runs trainings, as many at once as `compute` has workers.
        jobs: runs measurements.
        scratch: folder for checkpoints and files being written.
        lock: folder of the host lock.
    """

    space: SearchSpace
    targets: Mapping[tuple[str, str], MeasurementTarget]
    corpus: CorpusRef
    stages: Stages
    ledger: Ledger
    compute: Compute
    trainings: Trainings
    jobs: Jobs
    scratch: Path
    lock: Path

    def measurement_keys(self, workloads: Iterable[str]) -> list[MeasurementKey]:
        """Returns every target with each of `workloads`."""
        return [MeasurementKey(device, runtime, workload) for workload in workloads for device, runtime in self.targets]

    def workloads_by_cost(self) -> list[str]:
        """Returns the workloads that are measured, fewest tokens first."""
        cost = {name: self.space.workloads[name] for name in self.space.measured}
        return sorted(cost, key=lambda name: cost[name].prompt + 20 * cost[name].gen)

    async def export_all(self, trial: int, layout: Layout) -> dict[str, Artifact]:
        """Exports the deploy-scale model with random weights, for each runtime.

        Raises:
            CandidateFailed: a runtime cannot export it.
            InfrastructureFailed: a worker died, or the disk is full.
        """
        targets, weights = self._target_of_runtimes(), RandomWeights(DEPLOY_SEED)
        exports = [self._export(trial, layout, label, target, weights) for label, target in targets.items()]
        # All run to their end: what one lowers serves other candidates, even if this one fails.
        results = await asyncio.gather(*exports, return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        # The candidate's own failure first: a retry does not change it.
        for error in sorted(failed, key=lambda error: not isinstance(error, CandidateFailed)):
            raise error
        return dict(zip(targets, (result for result in results if isinstance(result, Artifact)), strict=True))

    async def measure(
        self, trial: int, artifact: Artifact, where: MeasurementKey, repetitions: int, replicate: int = 0
    ) -> Measurement:
        """Measures `repetitions` of one workload on one device and runtime; a higher `replicate` measures once more."""
        target = self.targets[where.device, where.runtime]
        workload = target.device.pinned(self.space.workloads[where.workload])
        reference = target.references[workload]
        protocol = self.space.protocol
        key = self.measurement_result(artifact, where, repetitions, replicate)
        subject = Subject(artifact, target.runtime, target.runner, target.device, workload)

        async def act() -> Outcome:
            try:
                measurement = await measure(
                    subject, reference, self.jobs, key, trial, repetitions, protocol, past_tries=self.ledger.tries(key)
                )
            except CandidateFailed as error:
                return failure(error)
            return {"value": measurement.model_dump(mode="json"), "seconds": measurement.wall_s}

        return Measurement.model_validate(await self.stages.run("measure", key, trial, act))

    def measurement_result(
        self, artifact: Artifact, where: MeasurementKey, repetitions: int, replicate: int = 0
    ) -> str:
        """Returns the key of the result of `measure`."""
        target = self.targets[where.device, where.runtime]
        workload = target.device.pinned(self.space.workloads[where.workload])
        return measure_key(
            artifact.sha256,
            target.runner,
            target.device.id,
            workload,
            repetitions,
            self.space.protocol,
            target.references[workload].calibration,
            replicate,
            target.device.energy_counter,
            target.device.page_size,
        )

    async def train_rung(
        self, trial: int, layout: Layout, rung: int, config: QualityConfig | None = None, *, anchor: bool = False
    ) -> SeedScores:
        """Runs the proxy trainings of quality at `rung`, those of anchors first: seed -> evaluation group -> score.

        `config`: in place of the space's.
        """
        jobs = rung_jobs(config or self.space.quality, rung, layout, self.corpus)
        results = await asyncio.gather(*(self._train(trial, job, anchor) for job in jobs))
        return seed_scores(jobs, {result.key: result for result in results}, layout.quantisation)

    async def check_equivalence(self, trial: int, layout: Layout) -> None:
        """Exports the trained proxy through the same path and compares its logits with PyTorch's, on every runtime.

        Raises:
            CandidateFailed: the exported graph computes something else.
        """
        last = len(self.space.quality.rungs) - 1
        job = rung_jobs(self.space.quality, last, layout, self.corpus)[-1]
        weights = await self._weights(trial, job)
        proxy = replace(exported_layout(job), quantisation=layout.quantisation)
        for label, target in self._target_of_runtimes().items():
            await self._check_on(label, target, trial, proxy, weights)

    def _target_of_runtimes(self) -> dict[str, MeasurementTarget]:
        """Returns label of a runtime -> one of its targets: what is exported does not depend on the device."""
        return {runtime: target for (_, runtime), target in self.targets.items()}

    async def _check_on(
        self, label: str, target: MeasurementTarget, trial: int, proxy: Layout, weights: Checkpoint
    ) -> None:
        artifact = await self._export(trial, proxy, label, target, weights)
        spec = {
            "layout": proxy.architecture.to_json(),
            "runtime": target.runtime.name,
            "quantisation": artifact.quantisation,
            "weights": {"path": str(weights.path), "sha256": weights.sha256},
            "model": str(self.ledger.artifact_path(artifact.sha256)),
            "runner": target.runner.model_dump(mode="json"),
            "lock": str(self.lock),
        }
        key = gate_key(artifact.sha256, target.runner.build)
        await self.stages.run("gate", key, trial, lambda: self.compute.run(worker.check_equivalence, spec))

    async def _export(
        self, trial: int, layout: Layout, label: str, target: MeasurementTarget, weights: Weights
    ) -> Artifact:
        quantisation = self.space.labelled[label].stored_as(layout)
        key = export_key(layout.architecture, target.runtime, quantisation, weights.describe())
        # Each study has one orchestrator, so nobody else writes here; files of a killed one are overwritten.
        destination = self.scratch / "exports" / self.ledger.folder / key
        spec: dict[str, Any] = {
            "layout": layout.architecture.to_json(),
            "runtime": target.runtime.name,
            "quantisation": quantisation,
            "weights": {"seed": weights.seed}
            if isinstance(weights, RandomWeights)
            else {"path": str(weights.path), "sha256": weights.sha256},
            "destination": str(destination),
            "lock": str(self.lock),
        }

        async def act() -> Outcome:
            outcome = await self.compute.run(worker.export, spec)
            if "value" in outcome:
                written = Artifact.model_validate(outcome["value"]).written
                for path, file in zip((destination, projector_path(destination)), written, strict=False):
                    self.ledger.keep_artifact(path, file.sha256)
            return outcome

        artifact = Artifact.model_validate(await self.stages.run("export", key, trial, act))
        async with self.stages.restoring[key]:
            if not all(self.ledger.has_artifact(file.sha256) for file in artifact.written):
                # Collected by `nas gc` since: the same inputs write the same bytes.
                value_of(await act())
        for file in artifact.written:
            self.ledger.pin(file.sha256)
        return artifact

    async def _train(self, trial: int, job: TrainJob, anchor: bool = False) -> TrainResult:
        if job.teacher is not None:  # trained before its students, so that they do not train it twice
            try:
                await self._train(trial, job.teacher.job, anchor)
            except CandidateFailed as error:
                raise InfrastructureFailed(f"the teacher of the language models cannot be trained: {error}") from error
        rank, run = -1 if anchor else trial, self.stages.run
        value = await run("train", job.key, trial, lambda: self.trainings.run(rank, job))
        return TrainResult.model_validate(value)

    async def _weights(self, trial: int, job: TrainJob) -> Checkpoint:
        file = weights_file(self.scratch / "checkpoints", job.key)
        trained = Checkpoint(file, (await self._train(trial, job)).weights_sha256)
        async with self.stages.restoring[job.key]:
            if not await asyncio.to_thread(trained.is_intact):
                # Removed or damaged since, or trained on another host: the same job yields them again.
                again = TrainResult.model_validate(value_of(await self.trainings.run(trial, job)))
                trained = Checkpoint(file, again.weights_sha256)
        return trained


async def side_by_side(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of what runs at the same time; if one fails, the others are cancelled and have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def value_of(outcome: Outcome) -> Any:
    """Returns the value of an outcome; raises the `CandidateFailed` that it reports."""
    if failed := outcome.get("failed"):
        raise CandidateFailed(failed["reason"], failed["message"])
    return outcome["value"]
