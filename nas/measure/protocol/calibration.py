"""Prepares devices for measuring: a runner for each runtime, a reference model, and its calibration."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nas.core.canonical import content_hash, result_key
from nas.core.device import Device, show_cores
from nas.core.errors import InfrastructureFailed, InvalidInput, StudyChanged, Unsupported
from nas.core.measurement import ReferenceTimes, Sample
from nas.core.plan import Plan, Runner
from nas.core.progress import Log
from nas.core.space import MeasurementSettings, RuntimeSpace
from nas.core.units import show_share
from nas.core.workload import Workload
from nas.infra.store import calibrations, devices
from nas.infra.store.calibrations import off_by
from nas.infra.store.rows import Health
from nas.measure.farm.farm import Farm
from nas.measure.protocol.estimator import clock_of, run_times
from nas.measure.protocol.reference import (
    CALIBRATION_RUNS,
    CALIBRATION_S,
    CHECK_RUNS,
    calibration_name,
    keep_calibration,
    known_calibration,
    reference_model,
    reference_plan,
)
from nas.measure.protocol.repetitions import PROTOCOL_VERSION, THROTTLED, foreign_cpu
from nas.measure.protocol.rounds import COOL_DOWN_S, Jobs, Reference, calibrate
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Artifact, RoundingRuntime, Runtime

BUSY_CPU = 0.5
"""Cores that other processes use from which on a device is slow because of them, rather than because it changed."""

DEPLOY_SEED = 0
"""Seed of the random weights of deploy-scale models: speed does not depend on them."""

_CONDITIONS = {
    "device": "device",
    "build": "build",
    "energy_counter": "energy counter",
    "page_size": "memory page size in bytes",
    "cores": "cores",
    "calibration": "reference run",
    "protocol": "measurement protocol version",
    "writer": "model writer version",
}
"""Conditions in the order in which differences are listed -> what they are called."""

_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class SavedCalibration:
    """The calibration that a study began with.

    Args:
        build: of the runner.
        times: workload -> of the reference model.
        conditions: `PreparedDevice.conditions` at that time.
    """

    build: str
    times: Mapping[str, ReferenceTimes]
    conditions: Mapping[str, Any]


@dataclass(frozen=True)
class PreparedDevice:
    """One device with one runtime, ready to be calibrated.

    Args:
        name: of the device in the space.
        device: its description.
        runtime: of the runner.
        runner: for the device.
        quantisation: of the models.
        model: the reference model.
        workloads: name -> what will be measured, with the cores that it runs on.
        plans: workload -> one run of the reference model alone.
    """

    name: str
    device: Device
    runtime: Runtime
    runner: Runner
    quantisation: str
    model: Artifact
    workloads: Mapping[str, Workload]
    plans: Mapping[str, Plan]

    @property
    def conditions(self) -> dict[str, Any]:
        """All inputs of measurement keys that are not part of a search space, as JSON."""
        references = [calibration_name(plan) for plan in self.plans.values()]
        return {
            "device": self.device.id,
            "build": self.runner.build,
            "energy_counter": self.device.energy_counter,
            "page_size": self.device.page_size,
            "cores": {name: list(workload.affinity) for name, workload in self.workloads.items()},
            "threads": {name: workload.threads for name, workload in self.workloads.items()},
            "calibration": references[0] if len(references) == 1 else content_hash(references),
            "protocol": PROTOCOL_VERSION,
            "writer": self.runtime.writer_version,
        }

    def require_unchanged(self, began: Mapping[str, Any]) -> None:
        """Compares the conditions with those that a study began with.

        Raises:
            StudyChanged: one differs; the message names each.
        """
        now = self.conditions
        changes = [
            f"{_CONDITIONS[name]} {_condition_text(began[name])}, which is {_condition_text(now[name])} now"
            for name in _CONDITIONS
            if began[name] != now[name]
        ]
        if changes:
            raise StudyChanged(
                f"{self.name} with {self.runtime.name}: the study began with {'; '.join(changes)}. Its figures would "
                "not compare, so restore what has changed or begin a new study"
            )


@dataclass(frozen=True)
class MeasurementTarget:
    """One device with one runtime, calibrated and ready to measure.

    Args:
        device: its description.
        runtime: of the runner.
        runner: for the device.
        quantisation: of the models.
        references: workload, with its cores -> the reference model under it.
    """

    device: Device
    runtime: Runtime
    runner: Runner
    quantisation: str
    references: Mapping[Workload, Reference]

    @property
    def shortest(self) -> Reference:
        """The reference model under the workload that takes it the least time."""
        return min(self.references.values(), key=lambda reference: reference.calibration.run_ms)


@dataclass(frozen=True)
class Calibrator:
    """Makes measurement targets.

    Args:
        farm: has the devices.
        jobs: runs the calibrations.
        protocol: the measurement protocol.
        scratch: folder for files being written.
        log: called with a line before something that takes time.
        workloads: what will be measured.
        weights: about as many as the models have that will be measured; None: as the smallest reference model.
    """

    farm: Farm
    jobs: Jobs
    protocol: MeasurementSettings
    scratch: Path
    log: Log
    workloads: Mapping[str, Workload]
    weights: int | None = None

    async def target(
        self, device_name: str, spec: RuntimeSpace, saved: SavedCalibration | None = None
    ) -> MeasurementTarget:
        """Prepares one device with one runtime; without `saved`, by the device's own calibration or a new one.

        Raises:
            StudyChanged: the study that saved its calibration began under other conditions.
            UnknownName: no such device, runtime or quantisation.
            Unsupported: the runtime cannot run one of the workloads.
            InfrastructureFailed: no build of the runtime, or its reference model fails.
        """
        return await self.calibrated(self.prepare(device_name, spec), saved)

    def prepare(self, device_name: str, spec: RuntimeSpace) -> PreparedDevice:
        """Prepares one device with one runtime, without running anything on it.

        Raises:
            NasError: see `target`.
        """
        runtime = known_runtime(spec)
        device = self.farm.device(device_name)
        # The patched build runs what the stock build runs, too, so that one build measures all of a study.
        patched = spec.build == "any"
        if device.isa is not None and runtime.dispatches:
            raise Unsupported(
                f"{runtime.name} chooses kernels by the processor when it runs: {device.id} cannot restrict it to"
                f" {device.isa}"
            )
        images = any(workload.media for workload in self.workloads.values())
        runner = runtime.runner(device.target, device.cpu_features, patched=patched, libc=device.libc, images=images)
        self.farm.admit(runtime, runner)
        model = reference_model(self.farm.store, self.scratch, runtime, spec.quantisation, self.weights)
        plans = self._plans(runtime, model, runner, device)
        workloads = {name: device.pinned(workload) for name, workload in self.workloads.items()}
        return PreparedDevice(device_name, device, runtime, runner, spec.quantisation, model, workloads, plans)

    async def calibrated(self, prepared: PreparedDevice, saved: SavedCalibration | None) -> MeasurementTarget:
        """Calibrates a prepared device; `saved` is that of `target`.

        Raises:
            NasError: see `target`.
        """
        device, runtime, plans = prepared.device, prepared.runtime, prepared.plans
        if saved is None:
            times = {name: await self._calibration(device, runtime, plan, name) for name, plan in plans.items()}
        else:
            prepared.require_unchanged({**saved.conditions, "build": saved.build})
            times = dict(saved.times)
            if devices.get(self.farm.store, device.id).health is Health.BAD:
                await self._run_reference(device, runtime, next(iter(plans.values())), CHECK_RUNS)
        references = {
            prepared.workloads[name]: self._reference(prepared, plan, times[name]) for name, plan in plans.items()
        }
        return MeasurementTarget(device, runtime, prepared.runner, prepared.quantisation, references)

    def _reference(self, prepared: PreparedDevice, plan: Plan, times: ReferenceTimes) -> Reference:
        key = (prepared.device.id, prepared.runtime.name, calibration_name(plan))
        note = partial(calibrations.note_runs, self.farm.store, key, calibration_ms=times.run_ms)
        return Reference(prepared.model, plan, times, note)

    def _plans(self, runtime: Runtime, model: Artifact, runner: Runner, device: Device) -> dict[str, Plan]:
        """Returns workload -> a run of the reference model; what a runtime or device lacks is reported here."""
        plans = {}
        for name, workload in self.workloads.items():
            try:
                plans[name] = reference_plan(runtime, runner, model, device, workload, self.protocol.deadline_s)
            except Unsupported as error:
                raise Unsupported(f"workload {name!r} on {runtime.name}: {error}", where="workloads") from error
            except InvalidInput as error:
                raise InvalidInput(f"workload {name!r}: {error}", where="workloads") from error
            if pinning := device.pinning(workload):
                self.log(f"{device.id}: {name} runs on {pinning}")
        return plans

    async def _calibration(self, device: Device, runtime: Runtime, plan: Plan, workload: str) -> ReferenceTimes:
        """Returns the device's calibration; calibrates the device if there is none, or it does not hold any more.

        The device need not be calm. A few runs of the reference model decide whether a known calibration is kept; if
        they are off it, many more have a second look. A device that is slower beside other processes is busy and keeps
        its calibration.
        """
        key = (device.id, runtime.name, calibration_name(plan))
        times = known_calibration(self.farm.store, key)
        runs: list[tuple[Sample, bool]] = []
        if times is not None:
            runs = await self._run_reference(device, runtime, plan, CHECK_RUNS)
            if not _off([sample for sample, _ in runs], plan, times)[1]:
                return times
        what = f"{device.id}: calibrating {runtime.name}"
        more = CALIBRATION_RUNS
        if not runs:
            self.log(f"{what}: the reference model on {workload!r}")
            runs = await self._run_reference(device, runtime, plan, CHECK_RUNS)
            more -= CHECK_RUNS
        run_s = statistics.median(_whole_ms(sample) for sample, _ in runs) / 1e3
        if (more := min(more, int(CALIBRATION_S / run_s))) > 0:
            self.log(f"{what}: {more} more runs of {run_s:.1f} s on {workload!r}")
            runs += await self._run_reference(device, runtime, plan, more)
        samples = [sample for sample, _ in runs]
        if times is not None:
            off, replace = _off(samples, plan, times)
            if not replace:
                return times
            moved = f"the reference model runs {show_share(off, signed=True)}"
            if off > 0 and all(busy for _, busy in runs):
                self.log(f"{device.id}: {moved} off its calibration beside other processes")
                return times
            why = "it was calibrated in a bad minute" if off < 0 else "the device changed"
            self.log(f"{device.id}: {moved} off its calibration: {why}; calibrated again")
        if disturbed := all(busy for _, busy in runs):
            self.log(f"{device.id}: other processes ran all the while: milliseconds are less certain than ratios")
        return keep_calibration(self.farm.store, key, samples, plan, disturbed=disturbed)

    async def _run_reference(
        self, device: Device, runtime: Runtime, plan: Plan, runs: int
    ) -> list[tuple[Sample, bool]]:
        """Runs the reference model `runs` times; a device on which it works is in good health, or as a person left it.

        Returns:
            The sample of each run, and whether other processes had much of the device meanwhile.

        Raises:
            InfrastructureFailed: runs failed, or the device throttled, in all attempts.
        """
        key = result_key(
            "calibrate", device=device.id, build=plan.runner.build, protocol=PROTOCOL_VERSION, at=time.time()
        )
        samples: list[tuple[Sample, bool]] = []
        failures: list[str] = []
        cool_down_s = 0.0
        for attempt in range(self.protocol.max_attempts + 1):
            missing = runs - len(samples)
            good, failed = await calibrate(plan, runtime, device, self.jobs, key, attempt, missing, cool_down_s)
            samples += [
                (sample, (foreign_cpu([pair.candidate.conditions], pair.foreign_cpu) or 0.0) > BUSY_CPU)
                for sample, pair in good
                if not pair.candidate.conditions.throttled
            ]
            throttled = any(pair.candidate.conditions.throttled for _, pair in good)
            failures += [*failed, *([THROTTLED] if throttled else [])]
            cool_down_s = COOL_DOWN_S * 2**attempt if throttled else 0.0
            if len(samples) >= runs:
                with self.farm.store.write() as connection:
                    if devices.read(connection, device.id).health not in (Health.MAINTENANCE, Health.RETIRED):
                        devices.set_health(self.farm.store, device.id, Health.GOOD)
                return samples
        raise InfrastructureFailed(f"{device.id}: the reference model of {runtime.name} failed: {failures[-1]}")


def _off(samples: Sequence[Sample], plan: Plan, reference: ReferenceTimes) -> tuple[float, bool]:
    """Returns the drift from a calibration, as a share, and whether to calibrate again."""
    clock = clock_of(samples, plan.threads)
    return off_by([run_times(sample, clock).run_ms / reference.run_ms for sample in samples])


def _whole_ms(sample: Sample) -> float:
    return sample.load_ms + max(sample.ttft_ms, sum(sample.prefill_ns) / 1e6) + sum(sample.decode_ns) / 1e6


def known_runtime(spec: RuntimeSpace) -> Runtime:
    """Returns the runtime that a space names.

    Raises:
        UnknownName: there is no such runtime or quantisation.
        Unsupported: candidates are to choose the quantisation, and the runtime cannot tell what it loses.
    """
    runtime = RUNTIMES[spec.name]
    for name in spec.choices or (spec.quantisation,):
        runtime.require_quantisation(name)
    if spec.choices and not isinstance(runtime, RoundingRuntime):
        raise Unsupported(f"what a quantisation of {spec.name} loses is not known: name one, not a list")
    return runtime


def _condition_text(value: Any) -> str:
    """Formats a condition: hashes are shortened, None is "none"."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {show_cores(cores) or 'any'}" for name, cores in value.items())
    text = "none" if value is None else str(value)
    return text[:12] if _HASH.fullmatch(text) else text
