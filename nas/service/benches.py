"""Makes devices ready to measure: a runner for each runtime, a reference model, and its calibration."""

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
from nas.core.space import Protocol, RuntimeSpace
from nas.core.stats import coefficient_of_variation
from nas.core.workload import Workload
from nas.runtimes import RUNTIMES
from nas.runtimes.base import Artifact, Runtime
from nas.service.farm import Farm
from nas.service.judge import commonest, disturbance, total_ms
from nas.service.keys import PROTOCOL_VERSION
from nas.service.measuring import Jobs, Reference, calibrate
from nas.service.references import (
    CALIBRATION_RUNS,
    CHECK_RUNS,
    DEADLINE_S,
    calibration_name,
    reference_model,
    reference_plan,
)
from nas.service.stage_work import Bench
from nas.store import calibrations, devices
from nas.store.calibrations import off_by
from nas.store.rows import Health

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Kept:
    """The calibration that a study began with."""

    build: str
    ms: float


@dataclass(frozen=True)
class Preparer:
    """Prepares benches.

    Args:
        farm: whose devices.
        jobs: runs the calibrations.
        protocol: the measurement protocol.
        scratch: folder for files being written.
        log: told what takes time.
        accept_noise: calibrate on a noisy machine, too.
        workloads: what will be measured.
    """

    farm: Farm
    jobs: Jobs
    protocol: Protocol
    scratch: Path
    log: Log
    accept_noise: bool = False
    workloads: Mapping[str, Workload] = field(default_factory=dict)

    async def bench(self, device_name: str, spec: RuntimeSpace, kept: Kept | None = None) -> Bench:
        """One device with one runtime.

        Args:
            device_name: as in the space.
            spec: the runtime and its quantisation.
            kept: of the study that is resumed; None: the device's own calibration, checked, or a new one.

        Raises:
            InvalidInput: the study began with another build of the runtime.
            UnknownName: no such device, runtime or quantisation.
            Unsupported: the runtime cannot run one of the workloads.
            InfrastructureFailed: no build of the runtime, or the machine is too noisy to calibrate.
        """
        runtime = known_runtime(spec)
        device = self.farm.device(device_name)
        # The patched build carries what stock carries, too, so that one build measures all of a study.
        patched = spec.build == "any"
        runner = runtime.runner(device.target, device.cpu_features, patched=patched, libc=device.libc)
        if kept is not None and kept.build != runner.build:
            raise InvalidInput(
                f"{device_name}: the study began with build {kept.build[:12]} of {runtime.name}, which is build "
                f"{runner.build[:12]} now; figures of two builds do not compare, so begin a new study"
            )
        self.farm.admit(runtime, runner)
        model = reference_model(self.farm.store, self.scratch, runtime, spec.quantisation)
        self._require_workloads(runtime, model, runner, device)
        plan = reference_plan(runtime, runner, model, device)
        if kept is None:
            ms = await self._calibration(device, runtime, runner, plan)
        else:
            ms = kept.ms
            if devices.get(self.farm.store, device.id).health is Health.BAD:
                await self._time_reference(device, runtime, plan, CHECK_RUNS)
        place = (device.id, runtime.name, calibration_name(plan))
        note = partial(calibrations.note_runs, self.farm.store, place, calibration_ms=ms)
        return Bench(device, runtime, runner, spec.quantisation, Reference(plan, ms, note))

    def _require_workloads(self, runtime: Runtime, model: Artifact, runner: Runner, device: Device) -> None:
        """Plans each once, so that what a runtime or a device lacks is told now and not after an hour."""
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
        """The device's calibration, if the reference model still runs like that; else a new one for new studies."""
        name = calibration_name(plan)
        known = calibrations.get(self.farm.store, device.id, runtime.name, name)
        if known is not None:
            now = await self._time_reference(device, runtime, plan, CHECK_RUNS)
            off, recalibrate = off_by([ms / known.reference_ms for ms in now], self.protocol.drift_limit)
            if not recalibrate:
                return known.reference_ms
            self.log(f"{device.id}: the reference model runs {off:+.1%} off its calibration; calibrating anew")
        else:
            self.log(f"{device.id}: calibrating {runtime.name} ({CALIBRATION_RUNS} runs of the reference model)")
        times = await self._time_reference(device, runtime, plan, CALIBRATION_RUNS)
        ms, spread = statistics.median(times), coefficient_of_variation(times) or 0.0
        if self.accept_noise:
            return ms  # of this study alone
        if spread > self.protocol.drift_limit:
            raise InfrastructureFailed(
                f"{device.id}: runs of the reference model spread by {spread:.1%}, too much to calibrate (limit "
                f"{self.protocol.drift_limit:.0%}). Calm the machine and start again, or keep noisy numbers with "
                "--accept-noise"
            )
        calibrations.put(self.farm.store, device.id, runtime.name, name, ms, {"ms": times})
        return ms

    async def _time_reference(self, device: Device, runtime: Runtime, plan: Plan, runs: int) -> list[float]:
        """Times of the reference model on a calm machine, in ms. A device that gets this far is good."""
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
    """The runtime a space names.

    Raises:
        UnknownName: no such runtime or quantisation.
    """
    runtime = RUNTIMES[spec.name]
    if spec.quantisation not in runtime.quantisations:
        raise UnknownName(f"quantisation of {spec.name}", spec.quantisation, runtime.quantisations)
    return runtime
