"""The verdict on a health check: whether the reference model ran on a device, and as it did when calibrated."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nas.core.errors import NasError
from nas.core.plan import Pair, RoundResult
from nas.core.space import Protocol
from nas.core.stats import coefficient_of_variation
from nas.runtimes.base import Runtime
from nas.service.judge import disturbance, read_run, total_ms
from nas.service.references import CALIBRATION_RUNS, CHECK_RUNS
from nas.store.calibrations import ReferenceRun, off_by
from nas.store.rows import Calibration, CheckOutcome


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a check ended.

    Args:
        outcome: passed, failed or unsure.
        reason: why it was not passed.
        times_ms: of the runs that worked.
        runs: the same, as ratios to the calibration, if there is one.
        calibration_ms: what the device is calibrated with from now on, if it was not.
    """

    outcome: CheckOutcome
    reason: str | None = None
    times_ms: tuple[float, ...] = ()
    runs: tuple[ReferenceRun, ...] = ()
    calibration_ms: float | None = None


@dataclass(frozen=True, slots=True)
class _Run:
    ms: float
    throttled: bool
    calm: bool
    temperature_c: float | None


def judge_check(
    results: Sequence[RoundResult], runtime: Runtime, known: Calibration | None, protocol: Protocol, *, final: bool
) -> Verdict | None:
    """What the rounds of a check say; None: not enough yet.

    The device is good where enough runs worked, unthrottled, and their median is within the limit of the calibration.
    It is bad where the runs failed. Where they worked, but slower or faster than they should, it may be the device or
    what else runs there: each measurement is guarded against that by its own reference runs.

    Args:
        results: of the rounds so far.
        runtime: reads the runs.
        known: the device's calibration; None: the check calibrates it, if it is calm enough.
        protocol: the limits.
        final: whether no other round follows.
    """
    worked: list[_Run] = []
    failure: NasError | None = None
    for pair in (pair for result in results for pair in result.pairs):
        sample, failed = read_run(pair.candidate, runtime.parse)
        failure = failed or failure
        if sample is not None:
            worked.append(_run(total_ms(sample), pair, protocol))
    good = [run for run in worked if not run.throttled]
    if len(good) >= CHECK_RUNS:
        return _passed_or_drifted(good, known, protocol)
    if not final:
        return None
    if failure is not None:
        return Verdict(CheckOutcome.FAILED, f"the reference model of {runtime.name} failed: {failure}")
    return Verdict(CheckOutcome.UNSURE, "it throttled while the reference model ran")


def _run(ms: float, pair: Pair, protocol: Protocol) -> _Run:
    conditions = pair.candidate.conditions
    calm = disturbance([conditions], pair.foreign_cpu, protocol) is None
    return _Run(ms, bool(conditions.throttled), calm, conditions.temperature_c)


def _passed_or_drifted(good: Sequence[_Run], known: Calibration | None, protocol: Protocol) -> Verdict:
    times = tuple(run.ms for run in good)
    if known is None:
        return Verdict(CheckOutcome.PASSED, times_ms=times, calibration_ms=_calibration_ms(good, protocol))
    runs = tuple(ReferenceRun(run.ms / known.reference_ms, run.temperature_c, run.calm) for run in good)
    off, too_far = off_by([run.ratio for run in runs], protocol.drift_limit)
    if not too_far:
        return Verdict(CheckOutcome.PASSED, times_ms=times, runs=runs)
    busy = "" if all(run.calm for run in good) else "; other processes ran there"
    limit = f"(limit {protocol.drift_limit:.0%}){busy}; the next study calibrates it anew"
    return Verdict(CheckOutcome.UNSURE, f"the reference model runs {off:+.1%} off its calibration {limit}", times, runs)


def _calibration_ms(good: Sequence[_Run], protocol: Protocol) -> float | None:
    """The median, where enough runs were calm and alike; else the first study calibrates the device."""
    calm = [run.ms for run in good if run.calm]
    if len(calm) < CALIBRATION_RUNS or (coefficient_of_variation(calm) or 0.0) > protocol.drift_limit:
        return None
    return statistics.median(calm)
