"""Health checks of devices: queues runs of the reference model when a check is due, and judges the results.

Each coordinator process has one keeper. Its state is in the database, under keys that are computed from the device's
row, so that several keepers over one database queue and judge each check once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nas.core.canonical import result_key
from nas.core.errors import InfrastructureFailed, NasError, Unsupported
from nas.core.measurement import ReferenceTimes, Sample
from nas.core.plan import Pair, Plan, Round, RoundResult, Runner
from nas.core.space import MeasurementSettings
from nas.core.units import show_share
from nas.core.wire import on_the_way
from nas.infra.store import calibrations, jobs, outcomes
from nas.infra.store.calibrations import FASTER_LIMIT, SLOWER_LIMIT, CalibrationKey, ReferenceRun, off_by
from nas.infra.store.jobs import CHECK_PRIORITY
from nas.infra.store.rows import Blame, CheckOutcome, DeviceRow, JobKind, JobRow, JobState
from nas.infra.store.store import Store
from nas.measure.farm.trust import Admissions
from nas.measure.protocol.estimator import clock_of, run_times
from nas.measure.protocol.reference import (
    CALIBRATION_RUNS,
    CHECK_RUNS,
    calibration_name,
    keep_calibration,
    known_calibration,
    reference_model,
    reference_plan,
)
from nas.measure.protocol.repetitions import read_run, undisturbed
from nas.measure.protocol.rounds import COOL_DOWN_S
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Artifact, Runtime

log = logging.getLogger(__name__)
_STEP_S = 1.0

_DEVICES_PER_STEP = 25
"""Maximum number of devices per step: with a thousand due at once, agents need not wait for all of them."""

_STOP_S = 5.0

_CACHED_S = 10.0
"""Time for which `AnyDevice` caches the result for a kind of device."""

_PROTOCOL = MeasurementSettings()
"""The defaults: checks do not depend on a study's space."""

PlanOf = Callable[[DeviceRow], Plan]
"""Returns a device's reference run. Raises `NasError` if it cannot be checked now."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check.

    Args:
        outcome: passed, failed or unsure.
        reason: why it did not pass.
        runs: those that worked, as ratios to the calibration, if there is one.
        calibration: the same as they are, to calibrate a device that was not; empty if there are too few.
        disturbed: whether other processes ran during all of them.
    """

    outcome: CheckOutcome
    reason: str | None = None
    runs: tuple[ReferenceRun, ...] = ()
    calibration: tuple[Sample, ...] = ()
    disturbed: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    sample: Sample
    throttled: bool
    calm: bool
    temperature_c: float | None
    battery_percent: float | None


@dataclass(frozen=True, slots=True)
class _Kind:
    target: str
    features: frozenset[str]
    libc: str | None


@dataclass(frozen=True, slots=True)
class _Reference:
    runtime: Runtime
    runner: Runner
    model: Artifact


class HealthKeeper:
    """Checks devices that are due, in a thread, while the context is open.

    Args:
        store: where devices and jobs are.
        notify: called after a job was queued.
        plan_of: returns the reference run of a device.
        among: ids of the devices that this process checks; None: all.
    """

    def __init__(
        self, store: Store, notify: Callable[[], None], plan_of: PlanOf, among: Collection[str] | None = None
    ) -> None:
        self._store, self._notify, self._plan_of, self._among = store, notify, plan_of, among
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._stop.wait(_STEP_S):
            try:
                self.step()
            except NasError as error:
                log.warning("devices cannot be checked now: %s", error)
            except (OSError, ValueError, TypeError, LookupError):  # a row that another version wrote
                log.exception("devices cannot be checked now")

    def step(self) -> None:
        """Advances the checks that are due by one step, the longest waiting first.

        Raises:
            InfrastructureFailed: the database cannot be used.
        """
        for device in outcomes.due_checks(self._store, among=self._among, most=_DEVICES_PER_STEP):
            try:
                rounds = jobs.of_key(self._store, check_key(device))
                if not rounds:
                    self._begin(device)
                elif rounds[-1].state not in jobs.LIVE:
                    self._continue(device, rounds)
            except ValueError as error:  # of one device, such as a runtime that was uninstalled meanwhile
                self._end(device, _cannot(error), None)

    def _begin(self, device: DeviceRow) -> None:
        try:
            plan = self._plan_of(device)
        except (NasError, OSError) as error:
            self._end(device, _cannot(error), None)
            return
        self._queue(device, plan, 0, CHECK_RUNS if self._calibration(device, plan) else CALIBRATION_RUNS)

    def _continue(self, device: DeviceRow, rounds: list[JobRow]) -> None:
        last = rounds[-1]
        verdict = _not_run(last) or self._judge(device, rounds)
        if verdict is not None:
            self._end(device, verdict, last)
        elif len(rounds) <= _PROTOCOL.max_attempts:
            cool_down_s = COOL_DOWN_S * 2 ** (len(rounds) - 1)
            self._queue(device, last.payload.candidate, len(rounds), last.payload.repetitions, cool_down_s)

    def _judge(self, device: DeviceRow, rounds: list[JobRow]) -> CheckResult | None:
        plan = rounds[-1].payload.candidate
        calibration = self._calibration(device, plan)
        results = [row.result for row in rounds if row.result is not None]
        final = len(rounds) > _PROTOCOL.max_attempts
        return judge_check(results, RUNTIMES[plan.runner.runtime], calibration, plan.threads, final=final)

    def _queue(self, device: DeviceRow, plan: Plan, number: int, runs: int, cool_down_s: float = 0.0) -> None:
        round_ = Round(candidate=plan, repetitions=runs, cool_down_s=cool_down_s)
        jobs.enqueue(
            self._store,
            check_key(device),
            round_,
            device=device.id,
            number=number,
            kind=JobKind.CHECK,
            priority=CHECK_PRIORITY,
        )
        self._notify()

    def _end(self, device: DeviceRow, verdict: CheckResult, last: JobRow | None) -> None:
        at = last.updated if last else self._store.now()
        number = device.check_number
        with self._store.write():
            if outcomes.conclude_check(self._store, device.id, number, verdict.outcome, verdict.reason, at) and last:
                self._keep(device, verdict, last)
        if verdict.outcome is not CheckOutcome.PASSED and verdict.reason != device.health_reason:
            log.warning("%s: health check: %s", device.id, verdict.reason)
        self._notify()

    def _keep(self, device: DeviceRow, verdict: CheckResult, last: JobRow) -> None:
        plan = last.payload.candidate
        if verdict.calibration:
            keep_calibration(
                self._store, _calibration_key(device, plan), verdict.calibration, plan, disturbed=verdict.disturbed
            )
        calibration = self._calibration(device, plan)
        if calibration is not None and verdict.runs:
            calibrations.note_runs(
                self._store, _calibration_key(device, plan), last.id, verdict.runs, calibration.run_ms
            )

    def _calibration(self, device: DeviceRow, plan: Plan) -> ReferenceTimes | None:
        return known_calibration(self._store, _calibration_key(device, plan))


class AnyDevice:
    """Plans reference runs for any device, with the first runtime that has a build for it.

    The build depends on the device's target, processor features and C library. Finding it reads all builds on the disk,
    so the result is cached for some seconds.

    Args:
        store: has the reference models.
        runners: where the runners are admitted.
        scratch: folder for files being written.
    """

    def __init__(self, store: Store, runners: Admissions, scratch: Path) -> None:
        self._store, self._runners, self._scratch = store, runners, scratch
        self._cache: dict[_Kind, tuple[float, _Reference | str]] = {}

    def plan(self, device: DeviceRow) -> Plan:
        """Plans the device's reference run.

        Raises:
            InfrastructureFailed: no runtime has a build for it.
        """
        about = device.device
        reference = self._cached(_Kind(about.target, frozenset(about.cpu_features), about.libc))
        if isinstance(reference, str):
            raise InfrastructureFailed(reference)
        return reference_plan(reference.runtime, reference.runner, reference.model, about)

    def _cached(self, kind: _Kind) -> _Reference | str:
        now = self._store.clock.monotonic()
        self._cache = {cached_kind: entry for cached_kind, entry in self._cache.items() if now < entry[0] + _CACHED_S}
        if kind not in self._cache:
            self._cache[kind] = now, self._find(kind)
        return self._cache[kind][1]

    def _find(self, kind: _Kind) -> _Reference | str:
        """Returns what a device of that kind runs, or why there is nothing."""
        reasons: list[str] = []
        for runtime in RUNTIMES.values():
            for patched in (False, True):
                try:
                    runner = runtime.runner(kind.target, kind.features, patched=patched, libc=kind.libc)
                    self._runners.admit(runner, runtime.runner_folder(runner))
                    model = reference_model(self._store, self._scratch, runtime, runtime.quantisations[0])
                    return _Reference(runtime, runner, model)
                except (InfrastructureFailed, Unsupported) as error:
                    reasons.append(str(error))
        return "; ".join(reasons)


def judge_check(
    results: Sequence[RoundResult],
    runtime: Runtime,
    calibration: ReferenceTimes | None,
    threads: int,
    *,
    final: bool,
) -> CheckResult | None:
    """Judges the rounds of a check; None: another round is needed, which cannot be where `final`.

    A device passes if enough runs worked unthrottled and their floor is within the limits of the calibration, which a
    check without one makes. It fails if the runs failed. If they were slower or faster than that, the cause may be the
    device or other processes: the verdict is unsure, and figures are ratios to the reference beside them.
    """
    worked: list[_Run] = []
    failure: NasError | None = None
    for pair in (pair for result in results for pair in result.pairs):
        sample, failed = read_run(pair.candidate, runtime.parse)
        failure = failed or failure
        if sample is not None:
            worked.append(_run(sample, pair))
    good = [run for run in worked if not run.throttled]
    if len(good) >= CHECK_RUNS:
        return _passed_or_drifted(good, calibration, threads)
    if not final:
        return None
    if failure is not None:
        return CheckResult(CheckOutcome.FAILED, f"the reference model of {runtime.name} failed: {failure}")
    return CheckResult(CheckOutcome.UNSURE, "it throttled while the reference model ran")


def check_key(device: DeviceRow) -> str:
    """Returns the result key of a device's current check."""
    return result_key("check", device=device.id, number=device.check_number)


def _cannot(error: Exception) -> CheckResult:
    return CheckResult(CheckOutcome.UNSURE, f"it cannot be checked: {error}")


def _not_run(last: JobRow) -> CheckResult | None:
    """Returns the verdict on a check whose job ended without a result; None if it has one."""
    if last.state is JobState.DONE:
        return None
    if last.state is JobState.FAILED and on_the_way(last.message or ""):
        return CheckResult(CheckOutcome.UNSURE, f"the health check did not reach it: {last.message}")
    if last.state is JobState.FAILED and last.blame is not Blame.REFUSED:
        return CheckResult(CheckOutcome.FAILED, f"the health check could not be run: {last.message}")
    return CheckResult(CheckOutcome.UNSURE, f"the health check was {last.blame or last.state}: {last.message}")


def _calibration_key(device: DeviceRow, plan: Plan) -> CalibrationKey:
    return device.id, plan.runner.runtime, calibration_name(plan)


def _run(sample: Sample, pair: Pair) -> _Run:
    conditions = pair.candidate.conditions
    calm = undisturbed([conditions], pair.foreign_cpu)
    return _Run(sample, bool(conditions.throttled), calm, conditions.temperature_c, conditions.battery_percent)


def _passed_or_drifted(good: Sequence[_Run], calibration: ReferenceTimes | None, threads: int) -> CheckResult:
    samples = tuple(run.sample for run in good)
    if calibration is None:
        disturbed = not any(run.calm for run in good)
        enough = len(samples) >= CALIBRATION_RUNS
        return CheckResult(CheckOutcome.PASSED, calibration=samples if enough else (), disturbed=disturbed)
    clock = clock_of(samples, threads)
    ratios = [run_times(sample, clock).run_ms / calibration.run_ms for sample in samples]
    runs = tuple(
        ReferenceRun(ratio, run.temperature_c, run.calm, run.battery_percent)
        for ratio, run in zip(ratios, good, strict=True)
    )
    off, too_far = off_by(ratios)
    if not too_far:
        return CheckResult(CheckOutcome.PASSED, runs=runs)
    busy = "" if all(run.calm for run in good) else "; other processes ran there"
    reason = (
        f"the reference model runs {show_share(off, signed=True)} off its calibration "
        f"(limits -{100 * FASTER_LIMIT:g} and +{100 * SLOWER_LIMIT:g} %)"
        f"{busy}; the next study has a second look and calibrates it again"
    )
    return CheckResult(CheckOutcome.UNSURE, reason, runs)
