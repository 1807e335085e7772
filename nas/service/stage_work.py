"""What each stage of a trial does, and under which key. Compute goes to Ray, measurements to the device jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nas.core.device import Device
from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.core.measurement import Measurement
from nas.core.plan import Runner
from nas.core.scoring import Place
from nas.core.space import SearchSpace
from nas.core.workload import Workload
from nas.proxy.corpus import CorpusRef
from nas.proxy.job import TrainJob, TrainResult, proxy_layout
from nas.proxy.ladder import rung_jobs, seed_scores
from nas.runtimes.base import Artifact, Checkpoint, RandomWeights, Runtime, Weights
from nas.service import work
from nas.service.keys import export_key, gate_key, measure_key
from nas.service.ledger import Ledger
from nas.service.measuring import Jobs, Reference, Subject, measure
from nas.service.stages import Outcome, Stages, failure, value_of
from nas.service.tune import Compute
from nas.service.turns import Turns

SeedScores = dict[int, dict[str, float]]
DEPLOY_SEED = 0
"""Of the random weights of deploy-scale models: speed does not depend on them."""


@dataclass(frozen=True)
class Bench:
    """One device with one runtime, ready to measure."""

    device: Device
    runtime: Runtime
    runner: Runner
    quantisation: str
    reference: Reference


@dataclass(frozen=True)
class StageWork:
    """The stages of one study.

    Args:
        space: the study's.
        benches: (device, runtime) as the space names them -> what measures there.
        corpus: for proxy trainings.
        stages: finds, shares and retries.
        ledger: keeps artifacts.
        compute: runs exports and trainings.
        turns: as many as `compute` trains at once.
        jobs: runs measurements.
        scratch: folder for checkpoints and files being written.
        lock: folder of the host lock.
        accept_noise: keep refused repetitions, marked.
    """

    space: SearchSpace
    benches: Mapping[tuple[str, str], Bench]
    corpus: CorpusRef
    stages: Stages
    ledger: Ledger
    compute: Compute
    turns: Turns
    jobs: Jobs
    scratch: Path
    lock: Path
    accept_noise: bool = False

    def places(self, workloads: Iterable[str]) -> list[Place]:
        """Every device and runtime of the space with each of `workloads`."""
        return [Place(device, runtime, workload) for workload in workloads for device, runtime in self.benches]

    def workloads_by_cost(self) -> list[str]:
        """The workloads that are measured, fewest tokens first."""
        cost = {name: self.space.workloads[name] for name in self.space.measured}
        return sorted(cost, key=lambda name: cost[name].prompt + 20 * cost[name].gen)

    async def export_all(self, trial: int, layout: Layout) -> dict[str, Artifact]:
        """The deploy-scale model with random weights, for each runtime.

        Raises:
            CandidateFailed: a runtime cannot export it.
            InfrastructureFailed: a worker died, or the disk is full.
        """
        benches = {runtime: bench for (_, runtime), bench in self.benches.items()}
        exports = [self._export(trial, layout, bench, RandomWeights(DEPLOY_SEED)) for bench in benches.values()]
        # All to their end: what one lowers serves other candidates, whatever becomes of this one.
        ended = await asyncio.gather(*exports, return_exceptions=True)
        failed = [each for each in ended if isinstance(each, BaseException)]
        # The candidate's own failure first: it is the one that will not go away.
        for error in sorted(failed, key=lambda error: not isinstance(error, CandidateFailed)):
            raise error
        return dict(zip(benches, (each for each in ended if isinstance(each, Artifact)), strict=True))

    async def measure(self, trial: int, artifact: Artifact, place: Place, repetitions: int) -> Measurement:
        """`repetitions` of one workload at one place."""
        bench = self.benches[place.device, place.runtime]
        workload = bench.device.pinned(self.space.workloads[place.workload])
        key = self._measure_key(trial, artifact, bench, workload, repetitions)
        subject = Subject(artifact, bench.runtime, bench.runner, bench.device, workload)
        protocol = self.space.protocol

        async def act() -> Outcome:
            try:
                taken = await measure(
                    subject, bench.reference, self.jobs, key, trial, repetitions, protocol,
                    accept_noise=self.accept_noise, first_round=self.ledger.tries(key) * (protocol.max_attempts + 1),
                )  # fmt: skip
            except CandidateFailed as error:
                return failure(error)
            return {"value": taken.model_dump(mode="json"), "seconds": taken.wall_s}

        return Measurement.model_validate(await self.stages.run("measure", key, trial, act))

    def _measure_key(self, trial: int, artifact: Artifact, bench: Bench, workload: Workload, repetitions: int) -> str:
        def key(accept_noise: bool) -> str:
            return measure_key(
                artifact.sha256, bench.runner, bench.device.id, workload, repetitions, self.space.protocol,
                bench.reference.calibration_ms, accept_noise, energy_counter=bench.device.energy_counter,
            )  # fmt: skip

        # What was measured without noise serves, whether noise would be accepted or not.
        clean = key(False)
        return key(True) if self.accept_noise and self.ledger.result(clean, trial) is None else clean

    async def train_rung(self, trial: int, layout: Layout, rung: int, further_seeds: int = 0) -> SeedScores:
        """All proxy trainings that quality at `rung` is made of: seed -> evaluation group -> score."""
        jobs = rung_jobs(self.space.quality.with_seeds(further_seeds), rung, layout, self.corpus)
        results = await asyncio.gather(*(self._train(trial, job) for job in jobs))
        return seed_scores(jobs, {result.key: result for result in results})

    async def gate(self, trial: int, layout: Layout) -> None:
        """Exports the trained proxy through the same path and compares its logits with PyTorch's, on every runtime.

        Raises:
            CandidateFailed: the exported graph computes something else.
        """
        last = len(self.space.quality.rungs) - 1
        job = rung_jobs(self.space.quality, last, layout, self.corpus)[-1]
        weights = await self._weights(trial, job)
        for bench in {name: bench for (_, name), bench in self.benches.items()}.values():
            await self._gate(trial, proxy_layout(job), bench, weights)

    async def _gate(self, trial: int, proxy: Layout, bench: Bench, weights: Checkpoint) -> None:
        artifact = await self._export(trial, proxy, bench, weights)
        spec = {
            "layout": proxy.to_json(),
            "runtime": bench.runtime.name,
            "quantisation": bench.quantisation,
            "weights": {"path": str(weights.path), "sha256": weights.sha256},
            "model": str(self.ledger.artifact_path(artifact.sha256)),
            "runner": bench.runner.model_dump(mode="json"),
            "lock": str(self.lock),
        }
        key = gate_key(artifact.sha256, bench.runner.build)
        await self.stages.run("gate", key, trial, lambda: self.compute.run(work.gate, spec))

    async def _export(self, trial: int, layout: Layout, bench: Bench, weights: Weights) -> Artifact:
        key = export_key(layout, bench.runtime, bench.quantisation, weights.describe())
        # One orchestrator per study, so that nobody else writes here; and what a killed one left is written over.
        destination = self.scratch / "exports" / self.ledger.place / key
        spec: dict[str, Any] = {
            "layout": layout.to_json(),
            "runtime": bench.runtime.name,
            "quantisation": bench.quantisation,
            "weights": {"seed": weights.seed}
            if isinstance(weights, RandomWeights)
            else {"path": str(weights.path), "sha256": weights.sha256},
            "destination": str(destination),
            "lock": str(self.lock),
        }

        async def act() -> Outcome:
            outcome = await self.compute.run(work.export, spec)
            if "value" in outcome:
                self.ledger.keep_artifact(destination, Artifact.model_validate(outcome["value"]).stored.sha256)
            return outcome

        artifact = Artifact.model_validate(await self.stages.run("export", key, trial, act))
        kept = artifact.stored.sha256
        if not self.ledger.has_artifact(kept):
            # Collected by `nas gc` since: the same inputs write the same bytes.
            value_of(await act())
        self.ledger.pin(kept)
        return artifact

    async def _train(self, trial: int, job: TrainJob) -> TrainResult:
        value = await self.stages.run("train", job.key, trial, lambda: self._run_training(trial, job))
        return TrainResult.model_validate(value)

    async def _weights(self, trial: int, job: TrainJob) -> Checkpoint:
        trained = await self._train(trial, job)
        if not Path(trained.weights).is_file():
            # Removed since, or trained on another host: the same job makes them again.
            trained = TrainResult.model_validate(value_of(await self._run_training(trial, job)))
        return Checkpoint(Path(trained.weights), trained.weights_sha256)

    async def _run_training(self, trial: int, job: TrainJob) -> Outcome:
        spec = {
            "job": job.model_dump(mode="json"),
            "checkpoints": str(self.scratch / "checkpoints"),
            "lock": str(self.lock),
        }
        async with self.turns.turn(trial):
            return await self.compute.run(work.train, spec, "train")
