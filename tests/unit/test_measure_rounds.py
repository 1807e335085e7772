"""Rounds until enough repetitions count."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_support import DEVICE, ScriptedJobs, raw, sample

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.layout import Layout
from nas.core.measurement import Measurement
from nas.core.plan import Pair, RawRun, RoundResult
from nas.core.space import MeasurementSettings
from nas.core.workload import Workload
from nas.measure.protocol import total_ms
from nas.measure.rounds import Reference, Subject, calibrate, measure
from nas.runtimes.base import RandomWeights
from nas.store.calibrations import ReferenceRun
from nas.testing.fake_runtime import FakeRuntime

LIMITS = MeasurementSettings(max_attempts=2, cool_down_s=7.0)
CALM, NOISY = raw(sample()), raw(sample(), foreign_cpu=1.0)
KILLED, CRASHED = raw(exit_code=-9), raw(exit_code=-11)


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    runtime = FakeRuntime(tmp_path)
    layout = Layout.parse("d128 v256 ffn=swiglu:320 [C3 A2/1 C3]")
    artifact = runtime.export(layout, "q4_0", RandomWeights(), tmp_path / "model")
    return Subject(artifact, runtime, runtime.runner(DEVICE.target), DEVICE, Workload(prompt=64, gen=16))


def reference(subject: Subject) -> Reference:
    plan = subject.runtime.plan(subject.artifact, subject.runner, Workload(prompt=16, gen=4), 60.0)
    return Reference(plan, total_ms(sample()))


def answer(*candidates: RawRun, beside: RawRun = CALM) -> RoundResult:
    return RoundResult(pairs=[Pair(reference=beside, candidate=run) for run in candidates], wall_s=2.0)


def measured(subject: Subject, *script: Any, **options: Any) -> tuple[Measurement, ScriptedJobs]:
    jobs, protocol = ScriptedJobs(list(script)), options.pop("protocol", LIMITS)
    taken = asyncio.run(measure(subject, reference(subject), jobs, "key", 3, 2, protocol, **options))
    return taken, jobs


def test_the_reference_runs_of_every_round_are_kept_whatever_the_round_was_good_for(subject: Subject) -> None:
    noted: list[tuple[str, list[ReferenceRun]]] = []
    told = replace(reference(subject), note=lambda job, runs: noted.append((job, list(runs))))
    drifted, broken = raw(sample(20.0, 2.0), temperature_c=70.0), answer(CALM, beside=KILLED)
    script = [answer(CALM, beside=drifted), broken, answer(CALM, NOISY, CALM)]
    asyncio.run(measure(subject, told, ScriptedJobs(script), "key", 3, 2, LIMITS, tries=2))
    calm, noisy = ReferenceRun(1.0, None, True), ReferenceRun(1.0, None, False)
    assert noted == [
        ("key.20000", [ReferenceRun(2.0, 70.0, True)]),
        ("key.20001", []),
        ("key.20002", [calm, noisy, calm]),
    ]


def test_one_round_is_enough_on_a_calm_machine(subject: Subject) -> None:
    taken, jobs = measured(subject, answer(CALM, CALM))
    assert taken.figures["ttft"].n == 2
    assert taken.refused_share == 0.0
    assert taken.wall_s == 2.0
    ((key, number, round_),) = jobs.asked
    assert (key, number, round_.repetitions, round_.cool_down_s) == ("key", 0, 2, 0.0)
    assert round_.candidate.inputs["model"].sha256 == subject.artifact.sha256
    assert round_.reference is not None


def test_refused_repetitions_are_asked_for_again_after_a_cool_down(subject: Subject) -> None:
    taken, jobs = measured(subject, answer(CALM, NOISY), answer(CALM))
    assert [(number, r.repetitions, r.cool_down_s) for _, number, r in jobs.asked] == [(0, 2, 0.0), (1, 1, 7.0)]
    assert taken.refused_share == pytest.approx(1 / 3)
    assert not taken.noisy
    assert [rep.attempt for rep in taken.repetitions] == [0, 0, 1]
    assert taken.wall_s == 4.0


def test_after_all_attempts_it_fails_as_the_infrastructures_and_says_what_helps(subject: Subject) -> None:
    script = [answer(NOISY, NOISY)] * 3
    with pytest.raises(InfrastructureFailed, match=r"6 of 6 repetitions were refused.*--accept-noise"):
        measured(subject, *script)


def test_a_device_that_was_calibrated_when_it_was_slow_needs_another_study(subject: Subject) -> None:
    fast = raw(sample(5.0, 0.5))
    with pytest.raises(InfrastructureFailed, match=r"ran -50\.0% off its calibration.*begin another study"):
        measured(subject, *[answer(CALM, CALM, beside=fast)] * 3)


def test_a_later_try_uses_rounds_of_its_own(subject: Subject) -> None:
    numbers: list[int] = []
    for tries in range(3):
        # Studies that share a measurement may allow different numbers of rounds.
        protocol = LIMITS.model_copy(update={"max_attempts": 3 - tries})
        rounds = [answer(NOISY, NOISY)] * protocol.max_attempts + [answer(CALM, CALM)]
        _, jobs = measured(subject, *rounds, tries=tries, protocol=protocol)
        numbers += [number for _, number, _ in jobs.asked]
    assert len(numbers) == len(set(numbers)) == 4 + 3 + 2


def test_noise_is_kept_and_marked_where_accepted(subject: Subject) -> None:
    taken, jobs = measured(subject, answer(CALM, NOISY), accept_noise=True)
    assert taken.noisy
    assert taken.figures["ttft"].n == 2
    assert len(jobs.asked) == 1


def test_accepting_noise_marks_nothing_that_is_calm(subject: Subject) -> None:
    assert not measured(subject, answer(CALM, CALM), accept_noise=True)[0].noisy


@pytest.mark.parametrize("run", [KILLED, CRASHED], ids=["killed", "crashed"])
def test_one_run_that_ended_early_is_no_failure_of_the_candidate(subject: Subject, run: RawRun) -> None:
    taken, jobs = measured(subject, answer(run), answer(CALM, CALM))
    assert taken.figures["ttft"].n == 2
    assert len(jobs.asked) == 2


def test_a_runner_that_is_killed_from_outside_again_and_again_is_no_failure_of_the_candidate(subject: Subject) -> None:
    with pytest.raises(InfrastructureFailed, match="killed from outside"):
        measured(subject, *[answer(KILLED)] * 3)


def test_two_failures_beside_a_good_reference_are(subject: Subject) -> None:
    with pytest.raises(CandidateFailed) as failed:
        measured(subject, answer(CRASHED), answer(CALM, CRASHED))
    assert failed.value.reason == "crash"


def test_accepted_noise_does_not_cover_failures(subject: Subject) -> None:
    with pytest.raises(CandidateFailed):
        measured(subject, answer(CRASHED), answer(CRASHED), accept_noise=True)


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
    assert jobs.asked[0][2].reference is None
