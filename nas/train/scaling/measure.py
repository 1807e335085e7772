"""Measures layouts for a family by the protocol of studies, under the same result keys: known results are reused."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nas.core import paths
from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.family import MeasuredModel, RecordedFigure
from nas.core.layout import Layout
from nas.core.measurement import Measurement
from nas.core.metrics import Metric, recorded
from nas.core.progress import Log
from nas.core.scoring import MeasurementKey, require_sensors
from nas.core.space import MeasurementSettings, SearchSpace
from nas.core.workload import Workload
from nas.infra.store import artifacts, devices, outcomes, results
from nas.infra.store.rows import DeviceState, Health
from nas.infra.store.store import Store
from nas.measure.farm.farm import Farm, open_farm
from nas.measure.protocol.calibration import DEPLOY_SEED, Calibrator, MeasurementTarget, known_runtime
from nas.measure.protocol.reference import export_key, measure_key, reference_layout
from nas.measure.protocol.rounds import Reference, Subject, measure
from nas.measure.runtimes.base import Artifact, RandomWeights
from nas.search.compute.worker import Outcome, failure
from nas.search.study.stages import value_of
from nas.train.scaling.source import Measurements

_AVAILABLE = (DeviceState.IDLE, DeviceState.LEASED, DeviceState.COOLING, DeviceState.PREPARING)
_TRUSTED = (Health.GOOD, Health.UNKNOWN)


@dataclass
class Measurer:
    """Measures a family's candidates on calibrated devices.

    Args:
        farm: has the devices.
        space: runtimes, workloads and limits.
        repetitions: per workload.
        log: takes one line at a time.
        benches: (device, runtime, id of the reference model) -> calibrated.
    """

    farm: Farm
    space: SearchSpace
    repetitions: int
    log: Log
    benches: dict[tuple[str, str, str], MeasurementTarget] = field(default_factory=dict)

    def prepare(self, device: str) -> None:
        """Builds every runtime of the space on a device and runs its smallest reference model, unless that is done.

        Raises:
            UnknownName: no such device.
            InfrastructureFailed: it cannot be reached, has no build, or its reference model fails.
        """
        if any(name == device for name, _, _ in self.benches):
            return
        for label in self.space.labels_on(device):
            asyncio.run(self._bench(device, label, None))

    async def _bench(self, device: str, label: str, layout: Layout | None) -> MeasurementTarget:
        """Returns a device with a runtime, calibrated with a reference model of like size as `layout`."""
        spec, weights = self.space.labelled[label], None if layout is None else layout.params.active
        key = device, label, reference_layout(known_runtime(spec), weights).id
        if key not in self.benches:
            workloads = {name: self.space.workloads[name] for name in self.space.measured}
            scratch, jobs = paths.home() / "work", self.farm.jobs(None)
            calibrator = Calibrator(self.farm, jobs, self.space.protocol, scratch, self.log, workloads, weights)
            self.benches[key] = await calibrator.target(device, spec)
        return self.benches[key]

    def id(self, device: str) -> str:
        """Returns the id of a prepared device."""
        return next(bench.device.id for (name, *_), bench in self.benches.items() if name == device)

    def measure(self, layout: Layout, on: Sequence[str]) -> Measurements:
        """Measures every workload that an objective needs on the devices `on`; reuses earlier results.

        Raises:
            CandidateFailed: a runtime cannot write or run the layout.
            InfrastructureFailed: a device went away.
        """
        return asyncio.run(self._measure(layout, on))

    async def _measure(self, layout: Layout, on: Sequence[str]) -> Measurements:
        outcomes = await asyncio.gather(*(self._on_device(layout, device) for device in on), return_exceptions=True)
        measurements: dict[MeasurementKey, Measurement] = {}
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            measurements |= outcome
        return measurements

    async def _on_device(self, layout: Layout, device: str) -> Measurements:
        measurements = {}
        for label in self.space.labels_on(device):
            bench = await self._bench(device, label, layout)
            for name in self.space.measured:
                measurements[MeasurementKey(device, label, name)] = await measure_layout(
                    layout, bench, self.farm, self.space.workloads[name], self.repetitions, self.space.protocol
                )
        return measurements

    def held_out(self, used: Collection[str]) -> str | None:
        """Returns the id of an available device that is not in `used`, preferably one that passed its last check."""
        rows = [row for row in devices.all(self.farm.store) if row.state in _AVAILABLE and row.health in _TRUSTED]
        free = sorted((row.health is not Health.GOOD, row.id) for row in rows if row.id not in used)
        return free[0][1] if free else None


@contextmanager
def open_measurer(store: Store, space: SearchSpace, repetitions: int, log: Log) -> Iterator[Measurer]:
    """Yields a measurer with the space's devices prepared.

    Raises:
        UnknownName: no such device or runtime.
        InvalidInput: a device lacks a sensor that an objective needs.
        InfrastructureFailed: a device cannot be reached, or its reference model fails.
    """
    with open_farm(store) as farm:
        require_sensors(space, {name: farm.device(name) for name in space.devices})
        measurer = Measurer(farm, space, repetitions, log)
        for device in space.devices:
            measurer.prepare(device)
        yield measurer


async def measure_layout(
    layout: Layout,
    target: MeasurementTarget,
    farm: Farm,
    workload: Workload,
    repetitions: int,
    protocol: MeasurementSettings,
    first: int = 0,
) -> Measurement:
    """Returns the measurement of a layout with random weights; the store's where it has that of the same inputs.

    Args:
        layout: to measure.
        target: to measure on.
        farm: of the target.
        workload: to run.
        repetitions: valid ones.
        protocol: deadline and attempts.
        first: number of the first repetition: another one gives fresh repetitions.

    Raises:
        CandidateFailed: the runtime cannot write or run the layout.
        InfrastructureFailed: the device went away.
    """
    store, runtime, weights = farm.store, target.runtime, RandomWeights(DEPLOY_SEED)
    artifact = export_once(
        store,
        export_key(layout, runtime, target.quantisation, weights.describe()),
        lambda path: runtime.export(layout, target.quantisation, weights, path, recipe=True),
    )
    subject = Subject(artifact, runtime, target.runner, target.device, target.device.pinned(workload))
    reference = target.references[target.device.pinned(workload)]
    key = subject_key(subject, reference, repetitions, protocol, first)

    async def run() -> Measurement:
        tries = sum(attempt.job is None for attempt in outcomes.attempts_of_key(store, key))
        try:
            return await measure(
                subject, reference, farm.jobs(None), key, None, repetitions, protocol, past_tries=tries
            )
        except InfrastructureFailed as error:
            outcomes.record_attempt(store, "infrastructure", str(error), result_key=key, stage="measure")
            raise

    return Measurement.model_validate(value_of(await stored_outcome(store, key, run)))


def subject_key(
    subject: Subject, reference: Reference, repetitions: int, protocol: MeasurementSettings, first: int = 0
) -> str:
    """Returns the key of a measurement with all its inputs; `first` is the number of its first repetition."""
    device = subject.device
    return measure_key(
        subject.artifact.sha256,
        subject.runner,
        device.id,
        subject.workload,
        repetitions,
        protocol,
        reference.calibration,
        first,
        device.energy_counter,
        device.page_size,
    )


async def stored_outcome(store: Store, key: str, run: Callable[[], Awaitable[Measurement]]) -> Outcome:
    """Returns the outcome of a measurement under `key`; `run` measures it if the store has none."""
    if (row := results.get(store, key)) is not None:
        return row.payload
    try:
        measurement = await run()
    except CandidateFailed as error:
        return results.put(store, key, "measure", failure(error)).payload
    outcome = {"value": measurement.model_dump(mode="json")}
    return results.put(store, key, "measure", outcome, seconds=measurement.wall_s).payload


def export_once(store: Store, key: str, export: Callable[[Path], Artifact]) -> Artifact:
    """Returns the artifact that was exported under `key` if the store has it undamaged, else exports and stores it."""
    row = results.get(store, key)
    if row is not None and "value" in row.payload:
        artifact = Artifact.model_validate(row.payload["value"])
        if artifacts.intact(store, artifact.stored.sha256):
            return artifact
    scratch = paths.home() / "work"
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        destination = Path(folder) / "model"
        artifact = export(destination)
        artifacts.put_file(store, destination)
    results.put(store, key, "export", {"value": artifact.model_dump(mode="json")})
    return artifact


def measured_of(measurements: Measurements, space: SearchSpace, *, searched: bool = True) -> tuple[MeasuredModel, ...]:
    """Returns one record for each device and runtime, with the figures of all workloads.

    Args:
        measurements: of a layout.
        space: has the runtimes.
        searched: whether the search used these devices.
    """
    specs = space.labelled
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for key, measurement in measurements.items():
        groups.setdefault((measurement.device, key.runtime), []).append(measurement)
    return tuple(
        MeasuredModel(
            device=device,
            runtime=specs[label].name,
            quantisation=specs[label].quantisation,
            threads=group[0].workload.threads,
            figures=tuple(
                recorded_figure(metric, _tokens(metric, measurement.workload), measurement)
                for measurement in group
                for metric in recorded()
            ),
            searched=searched,
        )
        for (device, label), group in groups.items()
    )


def _tokens(metric: Metric, workload: Workload) -> int:
    """Returns the context of a figure: peak memory is of the whole window."""
    return workload.window if metric.unit == "MB" else workload.prompt


def recorded_figure(metric: Metric, prompt: int, measurement: Measurement) -> RecordedFigure:
    """Returns a figure of a measurement for a family's records; `prompt` is its context in tokens."""
    figure = metric.figure(measurement.figures)
    interval = None if figure.low is None or figure.high is None else (figure.low, figure.high)
    return RecordedFigure(
        metric=metric.name, prompt=prompt, value=figure.value, ci95=interval, reason=figure.reason or ""
    )
