"""Measuring one artifact: rounds of repetitions on a device until enough of them count.

A round is a job that an agent claims; what comes back is judged here. Refused repetitions are asked for again after a
cool-down. A run that fails twice beside reference runs that work is the candidate's failure; anything else that goes
wrong is the infrastructure's.
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
from nas.core.space import Protocol as MeasurementProtocol
from nas.core.workload import Workload
from nas.runtimes.base import Artifact, Runtime
from nas.service.judge import commonest, judge, measurement, read_run, reference_runs
from nas.store import jobs as jobs_table
from nas.store.calibrations import ReferenceRun

_FAULTS_TO_FAIL = 2


class Jobs(Protocol):
    """Device jobs, wherever their agents are."""

    async def run(self, key: str, number: int, device: str, round_: Round, trial: int | None = None) -> RoundResult:
        """Runs round `number` of the stage `key` for `trial`; a round that was done before is returned as it was.

        Raises:
            CandidateFailed: the candidate's own failure, found by the job table's rules.
            InfrastructureFailed: no agent could finish it.
        """


@dataclass(frozen=True)
class Reference:
    """The device's reference model, ready to stand next to candidates.

    Args:
        plan: one run of it.
        calibration_ms: what a run takes on the calm device.
        note: keeps the runs that stood in one job, which it is told the id of.
    """

    plan: Plan
    calibration_ms: float
    note: Callable[[str, Sequence[ReferenceRun]], None] = lambda job, runs: None


@dataclass(frozen=True)
class Subject:
    """What is measured, where."""

    artifact: Artifact
    runtime: Runtime
    runner: Runner
    device: Device
    workload: Workload


async def measure(
    subject: Subject, reference: Reference, jobs: Jobs, key: str, trial: int | None, repetitions: int,
    protocol: MeasurementProtocol, *, accept_noise: bool = False, first_round: int = 0,
) -> Measurement:  # fmt: skip
    """`repetitions` valid repetitions of `subject`.

    Args:
        subject: artifact, device, workload.
        reference: stands before each repetition.
        jobs: where rounds run.
        key: the stage's result key, which names its jobs.
        trial: whom the jobs are for, if a trial.
        repetitions: how many must be valid.
        protocol: limits and attempts.
        accept_noise: keep refused repetitions, marked, instead of measuring again.
        first_round: number of the first job; rounds of an earlier try, which failed, have lower ones.

    Raises:
        CandidateFailed: the runner failed twice on this candidate while the reference ran.
        InfrastructureFailed: too few valid repetitions after all attempts; the message says why and what helps.
    """
    plan = subject.runtime.plan(subject.artifact, subject.runner, subject.workload, protocol.deadline_s)
    done: list[Repetition] = []
    faults: list[CandidateFailed] = []
    wall_s = 0.0
    for attempt in range(protocol.max_attempts + 1):
        missing = repetitions - sum(rep.valid for rep in done)
        # Twice as long each time: what disturbed one round is often still there a few seconds later.
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


def _remedy(done: Sequence[Repetition], protocol: MeasurementProtocol) -> str:
    """What helps: calm, but not where the calibration itself was taken when the device was slow."""
    drifts = [rep.drift for rep in done if rep.drift is not None]
    if drifts and statistics.median(drifts) < -protocol.drift_limit:
        return "The device was slower when it was calibrated: begin another study, which calibrates it anew"
    return "Calm the machine and resume"


async def calibrate(
    plan: Plan, runtime: Runtime, device: Device, jobs: Jobs, key: str, number: int, runs: int
) -> tuple[list[tuple[Sample, Pair]], list[str]]:
    """Runs the reference model alone, until the first run that fails.

    Returns:
        For each good run its sample and what it was taken from; and why others failed.

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
