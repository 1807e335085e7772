"""Prepares devices for measuring: a runner for each runtime, a reference model, and its calibration."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from nas.core.canonical import result_key
from nas.core.device import Device
from nas.core.errors import InfrastructureFailed, InvalidInput, UnknownName, Unsupported
from nas.core.plan import Plan, Runner
from nas.core.space import MeasurementSettings, RuntimeSpace
from nas.core.stats import coefficient_of_variation
from nas.core.workload import Workload
from nas.farm.farm import Farm
from nas.measure.protocol import commonest, disturbance, total_ms
from nas.measure.reference import (
    CALIBRATION_RUNS,
    CHECK_RUNS,
    DEADLINE_S,
    PROTOCOL_VERSION,
    calibration_name,
    reference_model,
    reference_plan,
)
from nas.measure.rounds import Jobs, Reference, calibrate
from nas.runtimes import RUNTIMES
from nas.runtimes.base import Artifact, Runtime
from nas.store import calibrations, devices
from nas.store.calibrations import off_by
from nas.store.rows import Health

Log = Callable[[str], None]

DEPLOY_SEED = 0
"""Seed of the random weights of deploy-scale models: speed does not depend on them."""


@dataclass(frozen=True, slots=True)
class SavedCalibration:
    """The calibration that a study began with: the runner's build, and the reference model's time in ms."""

    build: str
    ms: float


@dataclass(frozen=True)
class MeasurementTarget:
    """One device with one runtime, calibrated and ready to measure."""

    device: Device
    runtime: Runtime
    runner: Runner
    quantisation: str
    reference: Reference


@dataclass(frozen=True)
class Calibrator:
    """Makes measurement targets.

    Args:
        farm: has the devices.
        jobs: runs the calibrations.
        protocol: the measurement protocol.
        scratch: folder for files being written.
        log: called with a line before something that takes time.
        accept_noise: calibrate on a noisy machine, too.
        workloads: what will be measured.
    """

    farm: Farm
    jobs: Jobs
    protocol: MeasurementSettings
    scratch: Path
    log: Log
    accept_noise: bool = False
    workloads: Mapping[str, Workload] = field(default_factory=dict)

    async def target(
        self, device_name: str, spec: RuntimeSpace, saved: SavedCalibration | None = None
    ) -> MeasurementTarget:
        """Prepares one device with one runtime.

        Args:
            device_name: as in the space.
            spec: the runtime and its quantisation.
            saved: of the study that is resumed; None: the device's own calibration, checked, or a new one.

        Raises:
            InvalidInput: the study began with another build of the runtime.
            UnknownName: no such device, runtime or quantisation.
            Unsupported: the runtime cannot run one of the workloads.
            InfrastructureFailed: no build of the runtime, or the machine is too noisy to calibrate.
        """
        runtime = known_runtime(spec)
        device = self.farm.device(device_name)
        # The patched build runs what the stock build runs, too, so that one build measures all of a study.
        patched = spec.build == "any"
        runner = runtime.runner(device.target, device.cpu_features, patched=patched, libc=device.libc)
        if saved is not None and saved.build != runner.build:
            raise InvalidInput(
                f"{device_name}: the study began with build {saved.build[:12]} of {runtime.name}, which is build "
                f"{runner.build[:12]} now; figures of two builds do not compare, so begin a new study"
            )
        self.farm.admit(runtime, runner)
        model = reference_model(self.farm.store, self.scratch, runtime, spec.quantisation)
        self._require_workloads(runtime, model, runner, device)
        plan = reference_plan(runtime, runner, model, device)
        if saved is None:
            ms = await self._calibration(device, runtime, runner, plan)
        else:
            ms = saved.ms
            if devices.get(self.farm.store, device.id).health is Health.BAD:
                await self._time_reference(device, runtime, plan, CHECK_RUNS)
        name = (device.id, runtime.name, calibration_name(plan))
        note = partial(calibrations.note_runs, self.farm.store, name, calibration_ms=ms)
        return MeasurementTarget(device, runtime, runner, spec.quantisation, Reference(plan, ms, note))

    def _require_workloads(self, runtime: Runtime, model: Artifact, runner: Runner, device: Device) -> None:
        """Plans each workload once, so that what a runtime or a device lacks is reported before the study runs."""
        for name, workload in self.workloads.items():
            try:
                runtime.plan(model, runner, device.pinned(workload), DEADLINE_S)
            except Unsupported as error:
                raise Unsupported(f"workload {name!r} on {runtime.name}: {error}", where="workloads") from error
            except InvalidInput as error:
                raise InvalidInput(f"workload {name!r}: {error}", where="workloads") from error
            if pinning := device.pinning(workload):
                self.log(f"{device.id}: {name} runs on {pinning}")

    async def _calibration(self, device: Device, runtime: Runtime, runner: Runner, plan: Plan) -> float:
        """Returns the device's calibration if the reference model still runs as fast; else calibrates the device."""
        name = calibration_name(plan)
        known = calibrations.get(self.farm.store, device.id, runtime.name, name)
        if known is not None:
            now = await self._time_reference(device, runtime, plan, CHECK_RUNS)
            off, recalibrate = off_by([ms / known.reference_ms for ms in now], self.protocol.drift_limit)
            if not recalibrate:
                return known.reference_ms
            self.log(f"{device.id}: the reference model runs {off:+.1%} off its calibration; calibrating again")
        else:
            self.log(f"{device.id}: calibrating {runtime.name} ({CALIBRATION_RUNS} runs of the reference model)")
        times = await self._time_reference(device, runtime, plan, CALIBRATION_RUNS)
        ms, spread = statistics.median(times), coefficient_of_variation(times) or 0.0
        if self.accept_noise:
            return ms  # not stored: for this study alone
        if spread > self.protocol.drift_limit:
            raise InfrastructureFailed(
                f"{device.id}: runs of the reference model spread by {spread:.1%}, too much to calibrate (limit "
                f"{self.protocol.drift_limit:.0%}). Calm the machine and start again, or keep noisy numbers with "
                "--accept-noise"
            )
        calibrations.put(self.farm.store, device.id, runtime.name, name, ms, {"ms": times})
        return ms

    async def _time_reference(self, device: Device, runtime: Runtime, plan: Plan, runs: int) -> list[float]:
        """Times the reference model on a calm machine, in ms; a device on which it runs is in good health."""
        key = result_key(
            "calibrate", device=device.id, build=plan.runner.build, protocol=PROTOCOL_VERSION, at=time.time()
        )
        times: list[float] = []
        refused: list[str] = []
        failures: list[str] = []
        for attempt in range(self.protocol.max_attempts + 1):
            good, failed = await calibrate(plan, runtime, device, self.jobs, key, attempt, runs - len(times))
            failures += failed
            for sample, pair in good:
                calm = disturbance([pair.candidate.conditions], pair.foreign_cpu, self.protocol)
                reason = None if self.accept_noise else calm
                if reason is None:
                    times.append(total_ms(sample))
                else:
                    refused.append(reason)
            if len(times) >= runs:
                devices.set_health(self.farm.store, device.id, Health.GOOD)
                return times
        if failures:
            raise InfrastructureFailed(f"{device.id}: the reference model of {runtime.name} failed: {failures[-1]}")
        raise InfrastructureFailed(
            f"{device.id}: {len(refused)} runs of the reference model were refused: {commonest(refused)}. Calm the "
            "machine and start again, or keep noisy numbers with --accept-noise"
        )


def known_runtime(spec: RuntimeSpace) -> Runtime:
    """Returns the runtime that a space names.

    Raises:
        UnknownName: no such runtime or quantisation.
    """
    runtime = RUNTIMES[spec.name]
    if spec.quantisation not in runtime.quantisations:
        raise UnknownName(f"quantisation of {spec.name}", spec.quantisation, runtime.quantisations)
    return runtime
