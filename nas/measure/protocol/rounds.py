"""Measures one artifact: rounds of repetitions on a device until enough of them count.

In each repetition one process holds the candidate and the reference model, which take turns. Where a runner cannot do
that, or the device has too little memory for both, their processes alternate. A round is a job that an agent claims;
its result is judged here. Repetitions that do not count are repeated, after a pause if the device throttled. A run that
fails twice while the reference runs work is the candidate's failure; all other failures are infrastructure failures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nas.core.device import Device
from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.measurement import Measurement, ReferenceTimes, Repetition, Sample
from nas.core.plan import REFERENCE, Pair, Plan, Round, RoundResult, Runner
from nas.core.space import MeasurementSettings
from nas.core.workload import Workload
from nas.infra.store import jobs as jobs_table
from nas.infra.store.calibrations import ReferenceRun
from nas.measure.protocol.repetitions import THROTTLED, commonest, judge, measurement, read_run, reference_runs
from nas.measure.runtimes.base import Artifact, Runtime

_FAULTS_TO_FAIL = 2

_MEMORY_SHARE = 0.6
"""Share of a device's memory that the files of two models may have together."""

COOL_DOWN_S = 5.0
"""Pause before repetitions are tried again on a device that throttled; doubles each time."""

_ROUNDS_PER_TRY = 1000
"""Numbers of jobs that each try of a measurement has for itself, more than any has attempts."""


class Jobs(Protocol):
    """Runs rounds on devices; see `nas.measure.farm.queue.DeviceJobs`."""

    async def run(self, key: str, number: int, device: str, round_: Round, trial: int | None = None) -> RoundResult:
        """Runs round `number` of the stage `key` for `trial`; returns the stored result if it ran before.

        Raises:
            CandidateFailed: the candidate's own failure, found by the job table's rules.
            InfrastructureFailed: no agent could finish it.
        """


@dataclass(frozen=True)
class Reference:
    """A device's calibrated reference model for one workload.

    Args:
        model: the exported model.
        plan: one run of it alone, of the workload that is measured against it.
        calibration: what it takes, as figures refer to it.
        note: stores the reference runs of a job, given its id.
    """

    model: Artifact
    plan: Plan
    calibration: ReferenceTimes
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
    subject: Subject,
    reference: Reference,
    jobs: Jobs,
    key: str,
    trial: int | None,
    repetitions: int,
    protocol: MeasurementSettings,
    *,
    past_tries: int = 0,
) -> Measurement:
    """Measures `subject` against `reference` until `repetitions` count.

    `key` is the stage's result key, which names the jobs, and `trial` what they belong to. Lower numbers of jobs
    belong to the `past_tries` that failed.

    Raises:
        CandidateFailed: the runner failed twice on this candidate while the reference ran.
        InfrastructureFailed: runs failed, or the device throttled, in all attempts; the message says which.
    """
    plans, workload = _plans(subject, reference, protocol.deadline_s), subject.workload
    done: list[Repetition] = []
    faults: list[CandidateFailed] = []
    wall_s = cool_down_s = 0.0
    for attempt in range(protocol.max_attempts + 1):
        number = past_tries * _ROUNDS_PER_TRY + attempt
        missing = repetitions - sum(rep.valid for rep in done)
        # After a failure the reference model also runs by itself: where that fails, too, the device is at fault.
        beside = {"reference": reference.plan} if faults else {}
        round_ = plans.model_copy(update={"repetitions": missing, "cool_down_s": cool_down_s, **beside})
        result = await jobs.run(key, number, subject.device.id, round_, trial)
        wall_s += result.wall_s
        judged = [
            judge(
                pair, subject.runtime.parse, reference.calibration, attempt, workload.threads, encodes=workload.encodes
            )
            for pair in result.pairs
        ]
        reps = [rep for rep, _ in judged]
        done += reps
        faults += [fault for _, fault in judged if fault]
        if plans.reference is None and any(map(_ran_out_of_memory, result.pairs, [fault for _, fault in judged])):
            # Two models at once may be too much for a device on which the candidate fits alone.
            alone = _alone(subject, protocol.deadline_s)
            plans, faults = Round(candidate=alone, reference=reference.plan, repetitions=1), []
        reference.note(jobs_table.job_id(key, number), reference_runs(result.pairs, reps))
        if len(faults) >= _FAULTS_TO_FAIL:
            reason = Counter(fault.reason for fault in faults).most_common(1)[0][0]
            raise next(fault for fault in faults if fault.reason == reason)
        if sum(rep.valid for rep in done) >= repetitions:
            return _result(subject, reference, done, wall_s)
        cool_down_s = COOL_DOWN_S * 2**attempt if any(rep.reason == THROTTLED for rep in reps) else 0.0
    failed = [rep.reason for rep in done if rep.reason]
    raise InfrastructureFailed(
        f"{subject.device.id}: {len(failed)} of {len(done)} repetitions do not count: {commonest(failed)}"
    )


def _ran_out_of_memory(pair: Pair, fault: CandidateFailed | None) -> bool:
    return bool(pair.candidate.conditions.oom_kills) or (fault is not None and fault.reason == "out_of_memory")


def _alone(subject: Subject, deadline_s: float) -> Plan:
    return subject.runtime.plan(subject.artifact, subject.runner, subject.workload, deadline_s)


def _plans(subject: Subject, reference: Reference, deadline_s: float) -> Round:
    """Returns one repetition."""
    artifact, runner, device = subject.artifact, subject.runner, subject.device
    alone = _alone(subject, deadline_s)
    room = artifact.bytes + reference.model.size <= _MEMORY_SHARE * 1e6 * device.memory_mb
    if f"--{REFERENCE}" not in runner.options or not room:
        return Round(candidate=alone, reference=reference.plan, repetitions=1)
    both = subject.runtime.plan(
        artifact, runner, subject.workload, deadline_s + reference.plan.deadline_s, reference=reference.model
    )
    return Round(candidate=both, alone=alone if device.energy_counter else None, repetitions=1)


async def calibrate(
    plan: Plan,
    runtime: Runtime,
    device: Device,
    jobs: Jobs,
    key: str,
    number: int,
    runs: int,
    cool_down_s: float = 0.0,
) -> tuple[list[tuple[Sample, Pair]], list[str]]:
    """Runs the reference model alone, until the first run that fails.

    Returns:
        The sample and pair of each run that worked; and why others failed.

    Raises:
        InfrastructureFailed: no agent could finish it.
    """
    round_ = Round(candidate=plan, reference=None, repetitions=runs, cool_down_s=cool_down_s)
    result = await jobs.run(key, number, device.id, round_)
    good: list[tuple[Sample, Pair]] = []
    failures: list[str] = []
    for pair in result.pairs:
        sample, failure = read_run(pair.candidate, runtime.parse)
        if sample is not None:
            good.append((sample, pair))
        else:
            failures.append(str(failure))
    return good, failures


def _result(subject: Subject, reference: Reference, done: list[Repetition], wall_s: float) -> Measurement:
    return measurement(
        done,
        artifact=subject.artifact.sha256,
        runtime=subject.runtime.name,
        build=subject.runner.build,
        patched=subject.runner.patched,
        device=subject.device.id,
        workload=subject.workload,
        file_bytes=subject.artifact.bytes,
        calibration=reference.calibration,
        wall_s=wall_s,
        vectors=subject.artifact.vectors,
    )
