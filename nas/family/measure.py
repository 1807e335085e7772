"""Measures layouts for a family: by the protocol of studies, under the same keys, so that nothing is done twice."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nas.core import paths
from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.layout import Layout
from nas.core.measurement import Measurement
from nas.core.scoring import Place, require_sensors
from nas.core.space import SearchSpace
from nas.core.workload import Workload
from nas.family.calibrated import calibrated_bench
from nas.runtimes.base import Artifact, RandomWeights
from nas.service.benches import Preparer
from nas.service.farm import Farm, open_farm
from nas.service.keys import export_key, measure_key
from nas.service.measuring import Subject, measure
from nas.service.stage_work import DEPLOY_SEED, Bench
from nas.service.stages import Outcome, failure, value_of
from nas.store import artifacts, attempts, devices, results
from nas.store.rows import DeviceState, Health
from nas.store.store import Store

Log = Callable[[str], None]
Measurements = dict[Place, Measurement]

_THERE = (DeviceState.IDLE, DeviceState.LEASED, DeviceState.COOLING, DeviceState.PREPARING)
_TRUSTED = (Health.GOOD, Health.UNKNOWN)


@dataclass
class Measurer:
    """Devices that are ready for a family's candidates.

    Args:
        farm: whose devices.
        space: runtimes, workloads and limits.
        repetitions: that must be valid, for each workload.
        accept_noise: keep refused repetitions, marked.
        log: told what takes time.
    """

    farm: Farm
    space: SearchSpace
    repetitions: int
    accept_noise: bool
    log: Log
    benches: dict[tuple[str, str], Bench] = field(default_factory=dict)

    def prepare(self, device: str) -> None:
        """Makes every runtime of the space ready on a device, once.

        Raises:
            UnknownName: no such device.
            InfrastructureFailed: it cannot be reached, has no build, or is too noisy to calibrate.
        """
        if any(name == device for name, _ in self.benches):
            return
        workloads = {name: self.space.workloads[name] for name in self.space.measured}
        scratch, jobs = paths.home() / "work", self.farm.jobs(None)
        preparer = Preparer(self.farm, jobs, self.space.protocol, scratch, self.log, self.accept_noise, workloads)
        for spec in self.space.runtimes:
            self.benches[device, spec.name] = asyncio.run(calibrated_bench(preparer, device, spec, "family"))

    def id(self, device: str) -> str:
        """The id of a device that is ready."""
        return next(bench.device.id for (name, _), bench in self.benches.items() if name == device)

    def measure(self, layout: Layout, on: Sequence[str]) -> Measurements:
        """Every workload that counts, on these devices; what was measured before is found.

        Raises:
            CandidateFailed: a runtime cannot write or run the layout.
            InfrastructureFailed: a device went away, or is too noisy.
        """
        return asyncio.run(self._measure(layout, on))

    async def _measure(self, layout: Layout, on: Sequence[str]) -> Measurements:
        taken = await asyncio.gather(*(self._on_device(layout, device) for device in on), return_exceptions=True)
        for error in taken:
            if isinstance(error, BaseException):
                raise error
        return {place: each for found in taken if isinstance(found, dict) for place, each in found.items()}

    async def _on_device(self, layout: Layout, device: str) -> Measurements:
        found = {}
        for spec in self.space.runtimes:
            bench = self.benches[device, spec.name]
            artifact = self._artifact(layout, bench)
            for name in self.space.measured:
                found[Place(device, spec.name, name)] = await self._workload(
                    artifact, bench, self.space.workloads[name]
                )
        return found

    async def _workload(self, artifact: Artifact, bench: Bench, workload: Workload) -> Measurement:
        pinned = bench.device.pinned(workload)
        clean, noisy = (self._key(artifact, bench, pinned, accept) for accept in (False, True))
        # What was measured without noise serves, whether noise would be accepted or not.
        for known in (clean, noisy) if self.accept_noise else (clean,):
            row = results.get(self.farm.store, known)
            if row is not None:
                return _value(row.payload)
        subject = Subject(artifact, bench.runtime, bench.runner, bench.device, pinned)
        return await self._take(subject, bench, noisy if self.accept_noise else clean)

    def _key(self, artifact: Artifact, bench: Bench, workload: Workload, accept_noise: bool) -> str:
        return measure_key(
            artifact.sha256, bench.runner, bench.device.id, workload, self.repetitions, self.space.protocol,
            bench.reference.calibration_ms, accept_noise, energy_counter=bench.device.energy_counter,
        )  # fmt: skip

    async def _take(self, subject: Subject, bench: Bench, key: str) -> Measurement:
        store, protocol = self.farm.store, self.space.protocol
        # Rounds of tries that failed have lower numbers.
        tries = sum(attempt.job is None for attempt in attempts.of_key(store, key))
        try:
            taken = await measure(
                subject, bench.reference, self.farm.jobs(None), key, None, self.repetitions, protocol,
                accept_noise=self.accept_noise, first_round=tries * (protocol.max_attempts + 1),
            )  # fmt: skip
        except CandidateFailed as error:
            results.put(store, key, "measure", failure(error))
            raise
        except InfrastructureFailed as error:
            attempts.record(store, "infrastructure", str(error), result_key=key, stage="measure")
            raise
        row = results.put(store, key, "measure", {"value": taken.model_dump(mode="json")}, seconds=taken.wall_s)
        return _value(row.payload)

    def _artifact(self, layout: Layout, bench: Bench) -> Artifact:
        store, weights = self.farm.store, RandomWeights(DEPLOY_SEED)
        key = export_key(layout, bench.runtime, bench.quantisation, weights.describe())
        row = results.get(store, key)
        if row is not None and "value" in row.payload:
            artifact = Artifact.model_validate(row.payload["value"])
            if artifacts.get(store, artifact.stored.sha256) is not None:
                return artifact
        scratch = paths.home() / "work"
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            destination = Path(folder) / "model"
            artifact = bench.runtime.export(layout, bench.quantisation, weights, destination, recipe=True)
            artifacts.put_file(store, destination)
        results.put(store, key, "export", {"value": artifact.model_dump(mode="json")})
        return artifact

    def held_out(self, used: Collection[str]) -> str | None:
        """The id of a device that is there and none of `used`: one that passed its last check, if there is one."""
        rows = [row for row in devices.all(self.farm.store) if row.state in _THERE and row.health in _TRUSTED]
        free = sorted((row.health is not Health.GOOD, row.id) for row in rows if row.id not in used)
        return free[0][1] if free else None


@contextmanager
def open_measurer(
    store: Store, space: SearchSpace, repetitions: int, accept_noise: bool, log: Log
) -> Iterator[Measurer]:
    """The space's devices, ready to measure while the context is open.

    Raises:
        UnknownName: no such device or runtime.
        InvalidInput: a device lacks a sensor that an objective needs.
        InfrastructureFailed: a device cannot be reached, or is too noisy to calibrate.
    """
    with open_farm(store) as farm:
        require_sensors(space, {name: farm.device(name) for name in space.devices})
        measurer = Measurer(farm, space, repetitions, accept_noise, log)
        for device in space.devices:
            measurer.prepare(device)
        yield measurer


def _value(outcome: Outcome) -> Measurement:
    return Measurement.model_validate(value_of(outcome))
