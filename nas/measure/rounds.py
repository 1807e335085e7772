"""Measures one artifact: rounds of repetitions on a device until enough of them are valid.

A round is a job that an agent claims; its result is judged here. Refused repetitions are repeated after a cool-down. A
run that fails twice while the reference runs work is the candidate's failure; all other failures are infrastructure
failures.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nas.core.device import Device
from nas.core.errors import CandidateFailed, FailureReason, InfrastructureFailed
from nas.core.measurement import Measurement, Repetition, Sample
from nas.core.plan import Pair, Plan, Round, RoundResult, Runner
from nas.core.space import MeasurementSettings
from nas.core.workload import Workload
from nas.measure.protocol import commonest, judge, measurement, read_run, reference_runs
from nas.runtimes.base import Artifact, Runtime
from nas.store import jobs as jobs_table
from nas.store.calibrations import ReferenceRun

_FAULTS_TO_FAIL = 2

_ROUNDS_OF_A_TRY = 10_000
"""More than a try ever has, whatever the settings: rounds of two tries never have the same number."""


class Jobs(Protocol):
    """Runs rounds on devices; see `nas.farm.queue.DeviceJobs`."""

    async def run(self, key: str, number: int, device: str, round_: Round, trial: int | None = None) -> RoundResult:
        """Runs round `number` of the stage `key` for `trial`; returns the stored result if it ran before.

        Raises:
            CandidateFailed: the candidate's own failure, found by the job table's rules.
            InfrastructureFailed: no agent could finish it.
        """


@dataclass(frozen=True)
class Reference:
    """A device's calibrated reference model.

    Args:
        plan: one run of it.
        calibration_ms: time of a run on the calm device.
        note: stores the reference runs of a job, given its id.
    """

    plan: Plan
    calibration_ms: float
    note: Callable[[str, Sequence[ReferenceRun]], None] = lambda job, runs: None


@dataclass(frozen=True)
class Subject:
    """An artifact, and the device and workload with which it is measured."""

    artifact: Artifact
    runtime: Runtime
    runner: Runner
    device: Device
    workload: Workload


async def measure(
    subject: Subject, reference: Reference, jobs: Jobs, key: str, trial: int | None, repetitions: int,
    protocol: MeasurementSettings, *, accept_noise: bool = False, tries: int = 0,
) -> Measurement:  # fmt: skip
    """Measures `subject` until `repetitions` are valid.

    Args:
        subject: artifact, device, workload.
        reference: runs before each repetition.
        jobs: where rounds run.
        key: the stage's result key, which names its jobs.
        trial: number of the trial that the jobs belong to, if any.
        repetitions: how many must be valid.
        protocol: limits and attempts.
        accept_noise: keep refused repetitions, marked, instead of measuring again.
        tries: how many earlier tries failed; their rounds are not read again.

    Raises:
        CandidateFailed: the runner failed twice on this candidate while the reference ran.
        InfrastructureFailed: too few valid repetitions after all attempts; the message says why and what helps.
    """
    plan = subject.runtime.plan(subject.artifact, subject.runner, subject.workload, protocol.deadline_s)
    done: list[Repetition] = []
    faults: list[CandidateFailed] = []
    wall_s, first_round = 0.0, tries * _ROUNDS_OF_A_TRY
    for attempt in range(protocol.max_attempts + 1):
        missing = repetitions - sum(rep.valid for rep in done)
        # Doubles each time: what disturbed a round often lasts for more than a few seconds.
        cool_down = protocol.cool_down_s * 2 ** (attempt - 1) if attempt else 0.0
        round_ = Round(candidate=plan, reference=reference.plan, repetitions=missing, cool_down_s=cool_down)
        result = await jobs.run(key, first_round + attempt, subject.device.id, round_, trial)
        wall_s += result.wall_s
        judged = [
            judge(pair, subject.runtime.parse, reference.calibration_ms, protocol, attempt) for pair in result.pairs
        ]
        reps = [rep for rep, _ in judged]
        done += reps
        faults += [fault for _, fault in judged if fault]
        reference.note(jobs_table.job_id(key, first_round + attempt), reference_runs(result.pairs, reps, protocol))
        if len(faults) >= _FAULTS_TO_FAIL:
            raise _commonest(faults)
        if sum(rep.valid for rep in done) >= repetitions:
            return _result(subject, reference, done, wall_s, noisy=False)
        if accept_noise and sum(rep.sample is not None for rep in done) >= repetitions:
            return _result(subject, reference, done, wall_s, noisy=True)
    refused = [rep.reason for rep in done if rep.reason]
    raise InfrastructureFailed(
        f"{subject.device.id}: {len(refused)} of {len(done)} repetitions were refused: {commonest(refused)}. "
        f"{_remedy(done, protocol)}, or keep such numbers with --accept-noise"
    )


async def calibrate(
    plan: Plan, runtime: Runtime, device: Device, jobs: Jobs, key: str, number: int, runs: int
) -> tuple[list[tuple[Sample, Pair]], list[str]]:
    """Runs the reference model alone, until the first run that fails.

    Returns:
        The sample and pair of each run that worked; and why others failed.

    Raises:
        InfrastructureFailed: no agent could finish it.
    """
    result = await jobs.run(key, number, device.id, Round(candidate=plan, reference=None, repetitions=runs))
    good: list[tuple[Sample, Pair]] = []
    failures: list[str] = []
    for pair in result.pairs:
        sample, failure = read_run(pair.candidate, runtime.parse)
        if sample is not None:
            good.append((sample, pair))
        else:
            failures.append(str(failure))
    return good, failures


def _remedy(done: Sequence[Repetition], protocol: MeasurementSettings) -> str:
    """Returns advice: calm the machine, unless the device was slow when it was calibrated."""
    drifts = [rep.drift for rep in done if rep.drift is not None]
    if drifts and statistics.median(drifts) < -protocol.drift_limit:
        return "The device was slower when it was calibrated: begin another study, which calibrates it again"
    return "Calm the machine and resume"


def _result(
    subject: Subject, reference: Reference, done: list[Repetition], wall_s: float, *, noisy: bool
) -> Measurement:
    return measurement(
        done, noisy=noisy, artifact=subject.artifact.sha256, runtime=subject.runtime.name,
        build=subject.runner.build, patched=subject.runner.patched, device=subject.device.id,
        workload=subject.workload, file_bytes=subject.artifact.size, calibration_ms=reference.calibration_ms,
        wall_s=wall_s,
    )  # fmt: skip


def _commonest(faults: list[CandidateFailed]) -> CandidateFailed:
    reason: FailureReason = Counter(fault.reason for fault in faults).most_common(1)[0][0]
    return next(fault for fault in faults if fault.reason == reason)
