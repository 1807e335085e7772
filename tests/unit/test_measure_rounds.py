"""Rounds until enough repetitions count."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_support import DEVICE, ScriptedJobs, raw, reference_times, sample

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.layout import Layout
from nas.core.measurement import Measurement
from nas.core.plan import Pair, RawRun, RoundResult
from nas.core.space import MeasurementSettings
from nas.core.workload import Workload
from nas.infra.store.calibrations import ReferenceRun
from nas.measure.protocol.rounds import Reference, Subject, calibrate, measure
from nas.measure.runtimes.base import RandomWeights
from nas.testing.fake_runtime import FakeRuntime

LIMITS = MeasurementSettings(max_attempts=2)
CALM, NOISY, HOT = raw(sample()), raw(sample(), foreign_cpu=1.0), raw(sample(), throttled=True)
KILLED, CRASHED = raw(exit_code=-9), raw(exit_code=-11)


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    runtime = FakeRuntime(tmp_path)
    layout = Layout.parse("d128 v256 ffn=swiglu:320 [C3 A2/1 C3]")
    artifact = runtime.export(layout, "q4_0", RandomWeights(), tmp_path / "model")
    return Subject(artifact, runtime, runtime.runner(DEVICE.target), DEVICE, Workload(prompt=64, gen=16))


def reference(subject: Subject) -> Reference:
    plan = subject.runtime.plan(subject.artifact, subject.runner, subject.workload, 60.0)
    return Reference(subject.artifact, plan, reference_times())


def answer(*candidates: RawRun, beside: RawRun = CALM) -> RoundResult:
    return RoundResult(pairs=[Pair(reference=beside, candidate=run) for run in candidates], wall_s=2.0)


def measured(subject: Subject, *script: Any, **options: Any) -> tuple[Measurement, ScriptedJobs]:
    jobs = ScriptedJobs(list(script))
    measurement = asyncio.run(measure(subject, reference(subject), jobs, "key", 3, 2, LIMITS, **options))
    return measurement, jobs


def test_the_reference_runs_of_every_round_are_kept_whatever_the_round_was_good_for(subject: Subject) -> None:
    noted: list[tuple[str, list[ReferenceRun]]] = []
    recorder = replace(reference(subject), note=lambda job, runs: noted.append((job, list(runs))))
    drifted, broken = raw(sample(20.0, 2.0), temperature_c=70.0), answer(CALM, beside=KILLED)
    script = [answer(HOT, beside=drifted), broken, answer(CALM, NOISY)]
    asyncio.run(measure(subject, recorder, ScriptedJobs(script), "key", 3, 2, LIMITS, past_tries=5))
    calm, noisy = ReferenceRun(1.0, None, True), ReferenceRun(1.0, None, False)
    assert noted == [("key.5000", [ReferenceRun(2.0, 70.0, False)]), ("key.5001", []), ("key.5002", [calm, noisy])]


def test_one_round_is_enough_on_a_calm_machine(subject: Subject) -> None:
    measurement, jobs = measured(subject, answer(CALM, CALM))
    assert measurement.figures["ttft"].n == 2
    assert measurement.refused_share == 0.0
    assert measurement.wall_s == 2.0
    ((key, number, round_),) = jobs.calls
    assert (key, number, round_.repetitions, round_.cool_down_s) == ("key", 0, 2, 0.0)
    assert round_.candidate.inputs["model"].sha256 == subject.artifact.sha256
    assert round_.candidate.inputs["reference"] == reference(subject).model.file
    assert round_.candidate.deadline_s == LIMITS.deadline_s + 60.0
    assert (round_.reference, round_.alone, round_.compares) == (None, None, True)


def test_energy_is_measured_in_runs_of_the_candidate_alone(subject: Subject) -> None:
    counted = replace(subject, device=DEVICE.model_copy(update={"energy_counter": "RAPL package"}))
    _, jobs = measured(counted, answer(CALM, CALM))
    alone = jobs.calls[0][2].alone
    assert alone is not None and list(alone.inputs) == ["model"]


@pytest.mark.parametrize("why", ["runner", "memory"])
def test_processes_alternate_where_one_cannot_hold_both_models(subject: Subject, why: str) -> None:
    if why == "runner":
        runtime = replace(subject.runtime, paired=False)  # type: ignore[type-var]
        subject = replace(subject, runtime=runtime, runner=runtime.runner(DEVICE.target))
    else:
        subject = replace(subject, artifact=subject.artifact.model_copy(update={"size": 700_000_000}))
    _, jobs = measured(subject, answer(CALM, CALM))
    round_ = jobs.calls[0][2]
    assert round_.reference == reference(subject).plan
    assert list(round_.candidate.inputs) == ["model"]


def test_a_pair_that_the_memory_cannot_hold_is_no_fault_of_the_candidate(subject: Subject) -> None:
    killed = KILLED.model_copy(update={"conditions": KILLED.conditions.model_copy(update={"oom_kills": 1})})
    measurement, jobs = measured(subject, answer(killed), answer(CALM, CALM))
    assert [list(round_.candidate.inputs) for _, _, round_ in jobs.calls] == [["model", "reference"], ["model"]]
    assert measurement.figures["ttft"].n == 2
    with pytest.raises(CandidateFailed) as failure:
        measured(subject, answer(killed), answer(killed), answer(killed))
    assert failure.value.reason == "out_of_memory"


def test_after_a_failure_the_reference_also_runs_by_itself(subject: Subject) -> None:
    _, jobs = measured(subject, answer(CRASHED), answer(CALM, CALM))
    assert [round_.reference is not None for _, _, round_ in jobs.calls] == [False, True]


def test_noise_fails_nothing_and_is_recorded(subject: Subject) -> None:
    slow = raw(sample(50.0, 5.0), foreign_cpu=2.0)
    measurement, jobs = measured(subject, answer(NOISY, slow, beside=raw(sample(20.0, 2.0), foreign_cpu=1.0)))
    assert len(jobs.calls) == 1
    assert measurement.figures["ttft"].n == 2
    assert measurement.refused_share == 0.0
    assert measurement.foreign_cpu == pytest.approx(1.5)
    assert measurement.drift == pytest.approx(1.0)


def test_repetitions_of_a_hot_device_are_asked_for_again_after_a_cool_down(subject: Subject) -> None:
    measurement, jobs = measured(subject, answer(CALM, HOT), answer(HOT), answer(CALM))
    assert [(number, r.repetitions, r.cool_down_s) for _, number, r in jobs.calls] == [
        (0, 2, 0.0), (1, 1, 5.0), (2, 1, 10.0),
    ]  # fmt: skip
    assert measurement.refused_share == pytest.approx(1 / 2)
    assert [rep.attempt for rep in measurement.repetitions] == [0, 0, 1, 2]
    assert measurement.wall_s == 6.0


def test_failed_runs_are_repeated_at_once(subject: Subject) -> None:
    _, jobs = measured(subject, answer(CALM, KILLED), answer(CALM))
    assert [(number, r.repetitions, r.cool_down_s) for _, number, r in jobs.calls] == [(0, 2, 0.0), (1, 1, 0.0)]


def test_after_all_attempts_it_fails_as_the_infrastructures_and_says_why(subject: Subject) -> None:
    with pytest.raises(InfrastructureFailed, match=r"6 of 6 repetitions do not count: the device throttled"):
        measured(subject, *[answer(HOT, HOT)] * 3)


def test_the_jobs_of_tries_never_have_the_same_numbers_whatever_the_attempts(subject: Subject) -> None:
    """Studies may share a measurement and differ in `max_attempts`."""
    numbers = []
    for tries, attempts in ((1, 5), (2, 1)):
        jobs = ScriptedJobs([*[answer(KILLED)] * attempts, answer(CALM, CALM)])
        limits = MeasurementSettings(max_attempts=attempts)
        asyncio.run(measure(subject, reference(subject), jobs, "key", 3, 2, limits, past_tries=tries))
        numbers.append({number for _, number, _ in jobs.calls})
    assert not numbers[0] & numbers[1]


@pytest.mark.parametrize("run", [KILLED, CRASHED], ids=["killed", "crashed"])
def test_one_run_that_ended_early_is_no_failure_of_the_candidate(subject: Subject, run: RawRun) -> None:
    measurement, jobs = measured(subject, answer(run), answer(CALM, CALM))
    assert measurement.figures["ttft"].n == 2
    assert len(jobs.calls) == 2


def test_a_runner_that_is_killed_from_outside_again_and_again_is_no_failure_of_the_candidate(subject: Subject) -> None:
    with pytest.raises(InfrastructureFailed, match="killed from outside"):
        measured(subject, *[answer(KILLED)] * 3)


def test_two_failures_beside_a_good_reference_are(subject: Subject) -> None:
    with pytest.raises(CandidateFailed) as failed:
        measured(subject, answer(CRASHED), answer(CALM, CRASHED))
    assert failed.value.reason == "crash"


def test_failures_beside_a_failed_reference_are_the_infrastructures(subject: Subject) -> None:
    with pytest.raises(InfrastructureFailed, match="the reference run failed"):
        measured(subject, *[answer(CRASHED, beside=CRASHED)] * 3)


def test_what_the_jobs_say_passes(subject: Subject) -> None:
    for error in (CandidateFailed("crash", "twice"), InfrastructureFailed("offline")):
        with pytest.raises(type(error), match=str(error)):
            measured(subject, error)


def test_calibration_gives_good_runs_and_tells_of_others(subject: Subject) -> None:
    runs = [Pair(reference=None, candidate=run) for run in (CALM, NOISY, KILLED)]
    jobs = ScriptedJobs([RoundResult(pairs=runs)])
    plan = reference(subject).plan
    good, failures = asyncio.run(calibrate(plan, subject.runtime, DEVICE, jobs, "key", 1, 3))
    assert [pair.candidate.conditions.foreign_cpu for _, pair in good] == [None, 1.0]
    assert len(failures) == 1
    assert "killed" in failures[0]
    assert jobs.calls[0][2].reference is None
