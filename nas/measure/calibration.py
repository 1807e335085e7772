"""Prepares devices for measuring: a runner for each runtime, a reference model, and its calibration."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from nas.core.canonical import result_key
from nas.core.device import Device
from nas.core.errors import InfrastructureFailed, InvalidInput, UnknownName, Unsupported
from nas.core.measurement import ReferenceTimes, Sample
from nas.core.plan import Plan, Runner
from nas.core.space import MeasurementSettings, RuntimeSpace
from nas.core.workload import Workload
from nas.farm.farm import Farm
from nas.measure.estimator import read_times
from nas.measure.protocol import PROTOCOL_VERSION, THROTTLED
from nas.measure.reference import (
    CALIBRATION_RUNS,
    CHECK_RUNS,
    DEADLINE_S,
    calibration_name,
    keep_calibration,
    known_calibration,
    reference_model,
    reference_plan,
)
from nas.measure.rounds import COOL_DOWN_S, Jobs, Reference, calibrate
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
    """The calibration that a study began with: the runner's build, and what the reference model took."""

    build: str
    times: ReferenceTimes


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
        workloads: what will be measured.
    """

    farm: Farm
    jobs: Jobs
    protocol: MeasurementSettings
    scratch: Path
    log: Log
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
            InfrastructureFailed: no build of the runtime, or its reference model fails.
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
            times = await self._calibration(device, runtime, plan)
        else:
            times = saved.times
            if devices.get(self.farm.store, device.id).health is Health.BAD:
                await self._run_reference(device, runtime, plan, CHECK_RUNS)
        name = (device.id, runtime.name, calibration_name(plan))
        note = partial(calibrations.note_runs, self.farm.store, name, calibration_ms=times.run_ms)
        return MeasurementTarget(device, runtime, runner, spec.quantisation, Reference(plan, times, note))

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

    async def _calibration(self, device: Device, runtime: Runtime, plan: Plan) -> ReferenceTimes:
        """Returns the device's calibration; calibrates the device if there is none, or it does not hold any more.

        The device need not be calm. A few runs of the reference model decide whether a known calibration is kept; if
        they are off it, many more have a second look.
        """
        place = (device.id, runtime.name, calibration_name(plan))
        known = known_calibration(self.farm.store, place)
        samples: list[Sample] = []
        if known is not None:
            samples = await self._run_reference(device, runtime, plan, CHECK_RUNS)
            if not _off(samples, plan, known)[1]:
                return known
        self.log(f"{device.id}: calibrating {runtime.name} ({CALIBRATION_RUNS} runs of the reference model)")
        samples += await self._run_reference(device, runtime, plan, CALIBRATION_RUNS)
        if known is not None:
            off, replace = _off(samples, plan, known)
            if not replace:
                return known
            why = "it was calibrated in a bad minute" if off < 0 else "the device changed"
            self.log(f"{device.id}: the reference model runs {off:+.1%} off its calibration: {why}; calibrated again")
        return keep_calibration(self.farm.store, place, samples, plan.threads)

    async def _run_reference(self, device: Device, runtime: Runtime, plan: Plan, runs: int) -> list[Sample]:
        """Runs the reference model `runs` times; a device on which it works is in good health.

        Raises:
            InfrastructureFailed: runs failed, or the device throttled, in all attempts.
        """
        key = result_key(
            "calibrate", device=device.id, build=plan.runner.build, protocol=PROTOCOL_VERSION, at=time.time()
        )
        samples: list[Sample] = []
        failures: list[str] = []
        cool_down_s = 0.0
        for attempt in range(self.protocol.max_attempts + 1):
            missing = runs - len(samples)
            good, failed = await calibrate(plan, runtime, device, self.jobs, key, attempt, missing, cool_down_s)
            samples += [sample for sample, pair in good if not pair.candidate.conditions.throttled]
            throttled = any(pair.candidate.conditions.throttled for _, pair in good)
            failures += [*failed, *([THROTTLED] if throttled else [])]
            cool_down_s = COOL_DOWN_S * 2**attempt if throttled else 0.0
            if len(samples) >= runs:
                devices.set_health(self.farm.store, device.id, Health.GOOD)
                return samples
        raise InfrastructureFailed(f"{device.id}: the reference model of {runtime.name} failed: {failures[-1]}")


def _off(samples: Sequence[Sample], plan: Plan, known: ReferenceTimes) -> tuple[float, bool]:
    """Returns the drift from a calibration, as a share, and whether to calibrate again."""
    return off_by([ms / known.run_ms for ms in read_times(samples, plan.threads).run])


def known_runtime(spec: RuntimeSpace) -> Runtime:
    """Returns the runtime that a space names.

    Raises:
        UnknownName: no such runtime or quantisation.
    """
    runtime = RUNTIMES[spec.name]
    if spec.quantisation not in runtime.quantisations:
        raise UnknownName(f"quantisation of {spec.name}", spec.quantisation, runtime.quantisations)
    return runtime
