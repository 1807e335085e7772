"""Which repetitions count, and what they add up to."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from study_support import raw, reference_times, sample

from nas.core.errors import CandidateFailed
from nas.core.measurement import Repetition, Sample
from nas.core.plan import Conditions, EnergyUsed, Pair, RawRun
from nas.core.workload import Workload
from nas.infra.store.calibrations import ReferenceRun
from nas.measure.protocol.repetitions import (
    PROTOCOL_VERSION,
    THROTTLED,
    commonest,
    energy_figure,
    judge,
    measurement,
    reference_runs,
    summarise,
    undisturbed,
)
from nas.measure.runtimes.runner import read_sample

CALIBRATION = reference_times(sample())
WORKLOAD = Workload(prompt=64, gen=16)


def judged(reference: RawRun | None, candidate: RawRun) -> tuple[Repetition, CandidateFailed | None]:
    calibration = CALIBRATION if reference else None
    return judge(Pair(reference=reference, candidate=candidate), read_sample, calibration, attempt=2)


def scaled_sample(factor: float) -> Sample:
    return sample(10.0 * factor, 1.0 * factor)


def scaled(factor: float) -> RawRun:
    return raw(scaled_sample(factor))


def paired(candidate: Sample, reference: Sample) -> RawRun:
    return raw(candidate.model_copy(update={"reference": reference}))


def test_a_reference_in_the_same_process_is_the_repetitions_reference() -> None:
    pair = Pair(reference=None, candidate=paired(sample(20.0), scaled_sample(3.0)))
    rep, fault = judge(pair, read_sample, CALIBRATION, 0)
    assert rep.valid and fault is None
    assert rep.sample == sample(20.0)
    assert rep.reference == scaled_sample(3.0)
    assert rep.drift == pytest.approx(2.0)
    assert reference_runs([pair], [rep]) == [ReferenceRun(pytest.approx(3.0), None, True)]


def test_energy_is_that_of_the_candidate_alone() -> None:
    alone, both = rapl(30_000_000), rapl(70_000_000)
    pair = Pair(
        reference=None,
        alone=raw(sample(), energy=alone),
        candidate=paired(sample(), sample()).model_copy(update={"conditions": Conditions(energy=both)}),
    )
    assert judge(pair, read_sample, CALIBRATION, 0)[0].conditions.energy == alone


def test_a_candidate_that_fails_alone_has_failed() -> None:
    pair = Pair(reference=None, alone=raw(exit_code=-11), candidate=paired(sample(), sample()))
    _, fault = judge(pair, read_sample, CALIBRATION, 0)
    assert fault is not None and fault.reason == "crash"


def test_a_reference_that_fails_in_the_candidates_process_is_not_the_candidates_fault() -> None:
    rep, fault = judge(Pair(reference=None, candidate=raw(exit_code=69)), read_sample, CALIBRATION, 0)
    assert (rep.valid, fault) == (False, None)
    assert "the reference model failed" in (rep.reason or "")


@pytest.mark.parametrize(
    "changes",
    [{"turns": [4, 4]}, {"turns": [20, -4]}, {"decode_cpu_ns": [1]}, {"prefill_ns": [1], "prefill_cpu_ns": [1, 2]}],
)
def test_turns_and_clocks_that_do_not_fit_are_garbage(changes: dict[str, Any]) -> None:
    for broken in (raw(sample().model_copy(update=changes)), paired(sample(), sample().model_copy(update=changes))):
        _, fault = judge(Pair(reference=None, candidate=broken), read_sample, CALIBRATION, 0)
        assert fault is not None and fault.reason == "garbage_output"


def test_a_calm_pair_counts() -> None:
    rep, fault = judged(raw(sample()), raw(sample(20.0)))
    assert rep.valid
    assert fault is None
    assert rep.attempt == 2
    assert rep.drift == pytest.approx(0.0)
    assert rep.sample is not None
    assert rep.sample.ttft_ms == 20.0


@pytest.mark.parametrize("factor", [0.5, 0.94, 1.06, 3.0])
def test_a_reference_off_its_calibration_is_recorded_and_refuses_nothing(factor: float) -> None:
    rep, fault = judged(scaled(factor), raw(sample()))
    assert rep.valid
    assert fault is None
    assert rep.drift == pytest.approx(factor - 1)


def test_other_processes_are_recorded_and_refuse_nothing() -> None:
    rep, _ = judged(raw(sample(), foreign_cpu=0.2), raw(sample(), foreign_cpu=1.7))
    assert rep.valid
    assert rep.foreign_cpu == 1.7
    pair = Pair(reference=raw(sample()), candidate=raw(sample(), foreign_cpu=1.7), foreign_cpu=0.9)
    assert judge(pair, read_sample, CALIBRATION, 0)[0].foreign_cpu == 0.9, "over both runs, where it was read"


@pytest.mark.parametrize("who", ["reference", "candidate"])
def test_a_device_that_throttles_refuses_the_repetition(who: str) -> None:
    runs = {name: raw(sample(), throttled=name == who) for name in ("reference", "candidate")}
    rep, fault = judged(runs["reference"], runs["candidate"])
    assert (rep.valid, rep.reason) == (False, THROTTLED)
    assert fault is None


@pytest.mark.parametrize(
    ("conditions", "calm"),
    [({}, True), ({"foreign_cpu": 0.05}, True), ({"foreign_cpu": 0.06}, False), ({"throttled": True}, False)],
)
def test_undisturbed_is_next_to_no_other_process(conditions: dict[str, Any], calm: bool) -> None:
    assert undisturbed([Conditions(**conditions)], None) is calm


def test_what_could_not_be_read_refuses_nothing() -> None:
    unread = {"foreign_cpu": "no /proc/stat", "throttled": "no counter"}
    assert judged(raw(sample(), unread=unread), raw(sample(), unread=unread))[0].valid


def test_a_failed_reference_is_not_the_candidates_fault() -> None:
    rep, fault = judged(raw(exit_code=-9), raw(exit_code=-9))
    assert not rep.valid
    assert fault is None
    assert "the reference run failed" in (rep.reason or "")


def test_a_failure_beside_a_good_reference_is_the_candidates() -> None:
    rep, fault = judged(raw(sample()), raw(exit_code=-11))
    assert not rep.valid
    assert fault is not None
    assert fault.reason == "crash"


@pytest.mark.parametrize("exit_code", [127, -9, -15], ids=["not started", "killed from outside", "told to end"])
def test_a_run_that_somebody_else_ended_is_nobodys_fault(exit_code: int) -> None:
    rep, fault = judged(raw(sample()), raw(exit_code=exit_code))
    assert not rep.valid
    assert fault is None


@pytest.mark.parametrize(
    "nonsense",
    [
        {"ttft_ms": 0.0},
        {"load_ms": 0.0},
        {"peak_rss_mb": 0.0},
        {"prefill_rss_mb": -1.0},
        {"decode_rss_mb": 0.0},
        {"decode_ns": []},
        {"decode_ns": [1, 0]},
        {"prefill_ns": [0]},
        {"ttft_ms": 1e-7},
        {"prefill_cpu_ms": 1e-7, "decode_cpu_ns": [1] * 16},
        {"prefill_cpu_ms": -1.0, "decode_cpu_ns": [1] * 16},
    ],
)
def test_a_report_that_makes_no_sense_is_garbage(nonsense: dict[str, Any]) -> None:
    broken = sample().model_copy(update=nonsense)
    for pair in (
        Pair(reference=raw(sample()), candidate=raw(broken)),
        Pair(reference=None, candidate=paired(sample(), broken)),
    ):
        rep, fault = judge(pair, read_sample, CALIBRATION, 0)
        assert not rep.valid
        assert fault is not None
        assert fault.reason == "garbage_output"


def counted(*factors: float, tokens: int = 16, **more: Any) -> list[Repetition]:
    """Repetitions on a machine that runs each at another speed."""
    reps = []
    for factor in factors:
        report = sample(20.0 * factor, 2.0 * factor, tokens, **more)
        reps.append(Repetition(valid=True, sample=report, reference=sample(), drift=factor - 1))
    return reps


def test_the_machines_speed_is_taken_out_of_compute_times_only() -> None:
    """The machine was a tenth slower than when it was calibrated, for the reference, too."""
    reps = [Repetition(valid=True, sample=sample(22.0, 2.2), reference=sample(11.0, 1.1)) for _ in range(3)]
    figures = summarise(reps, WORKLOAD, 3_000_000, CALIBRATION)
    assert figures["ttft"].value == pytest.approx(20.0)
    assert figures["decode_p50"].value == pytest.approx(2.0)
    assert figures["latency"].value == pytest.approx(20.0 + 16 * 2.0)
    assert figures["prefill_tps"].value == pytest.approx(64 / 0.020)
    assert figures["ttft"].typical == 22.0
    assert figures["load"].value == 5.0
    assert figures["peak_rss"].value == 50.0
    assert figures["file_size"].value == 3.0
    assert figures["ttft"].n == 3


def test_a_repetition_without_its_reference_takes_the_interval_from_all() -> None:
    reps = [Repetition(valid=True, sample=sample(20.0, 2.0), reference=sample()) for _ in range(3)]
    assert summarise(reps, WORKLOAD, 1, CALIBRATION)["ttft"].log_sd is not None
    reps.append(Repetition(valid=True, sample=sample(20.0, 2.0)))
    assert summarise(reps, WORKLOAD, 1, CALIBRATION)["ttft"].log_sd is None


def test_a_neighbour_moves_no_p95() -> None:
    calm = reference_times(sample(10.0, 1.0, 600))
    slow = [Repetition(valid=True, sample=sample(20.0, 4.0, 600), reference=sample(20.0, 2.0, 600)) for _ in range(2)]
    figures = summarise(slow, WORKLOAD, 1, calm)
    assert figures["decode_p95"].value == pytest.approx(2.0)
    assert figures["decode_p95"].typical == pytest.approx(4.0), "as experienced"


@pytest.mark.parametrize(("tokens", "has_value"), [(499, False), (500, True)])
def test_a_95th_percentile_needs_a_thousand_tokens(tokens: int, has_value: bool) -> None:
    p95 = summarise(counted(1.0, 1.0, tokens=tokens), WORKLOAD, 1)["decode_p95"]
    assert (p95.value is not None) is has_value
    assert (p95.reason is None) is has_value


def test_a_peak_that_could_not_be_reset_is_null_with_its_reason() -> None:
    figures = summarise(counted(1.0, 1.0, decode_rss_mb=7.0), WORKLOAD, 1)
    assert figures["prefill_rss"].value is None
    assert figures["prefill_rss"].reason
    assert figures["decode_rss"].value == 7.0


def test_only_valid_repetitions_count() -> None:
    reps = [*counted(1.0, 1.02), Repetition(valid=False, reason=THROTTLED, sample=sample(9.0), drift=0.2)]
    reps[0].foreign_cpu, reps[1].foreign_cpu, reps[2].foreign_cpu = 0.4, 0.8, 2.0
    result = measurement(
        reps, artifact="a", runtime="fake", build="b", patched=False, device="box", workload=WORKLOAD, file_bytes=1,
        calibration=CALIBRATION, wall_s=3.0,
    )  # fmt: skip
    assert result.figures["ttft"].n == 2
    assert result.refused_share == pytest.approx(1 / 3)
    assert result.drift == pytest.approx(statistics.median([0.0, 0.02]))
    assert result.foreign_cpu == pytest.approx(0.6)
    assert (result.protocol, result.clock) == (PROTOCOL_VERSION, "wall")
    assert (result.calibration, result.calibration_ms) == (CALIBRATION, CALIBRATION.run_ms)
    assert result.wall_s == 3.0


def test_the_commonest_reason_is_told_by_its_worst_case() -> None:
    assert commonest(["it throttled", "used 0.20 of a core", "used 0.70 of a core"]) == "used 0.70 of a core"
    assert commonest([]) == "no reason given"


def rep_with(energy: EnergyUsed | None, reason: str = "") -> Repetition:
    unread = {} if energy else {"energy": reason}
    return Repetition(valid=True, reason=None, sample=sample(), conditions=Conditions(energy=energy, unread=unread))


def rapl(microjoules: int) -> EnergyUsed:
    return EnergyUsed(counter="RAPL package", joules=microjoules / 1e6, steps=microjoules)


def gauge(steps_of_10_mwh: int) -> EnergyUsed:
    steps = 10_000 * steps_of_10_mwh
    return EnergyUsed(counter="battery gauge, energy_now", joules=steps * 3.6e-3, steps=steps)


def test_energy_is_that_of_a_whole_run_per_decoded_token() -> None:
    figure = energy_figure([rep_with(rapl(energy)) for energy in (32_000_061, 35_200_122, 33_600_000)], gen=16)
    assert figure.value == pytest.approx(33.6e3 / 16)
    assert (figure.unit, figure.n) == ("mJ", 3)
    assert figure.low is not None and figure.low < 33.6e3 / 16 < (figure.high or 0)
    assert figure.resolution is not None and figure.resolution < 0.01


def test_a_gauge_that_moves_in_large_steps_tells_long_runs_only() -> None:
    """10 mWh are 36 J: one step in 20 is 5 %."""
    coarse = energy_figure([rep_with(gauge(steps)) for steps in (19, 20, 21)], gen=10)
    assert coarse.value is None
    assert coarse.resolution == pytest.approx(3600.0)
    assert coarse.reason is not None and "steps of 36 J, and a run took 6.8e+02 J" in coarse.reason
    fine = energy_figure([rep_with(gauge(steps)) for steps in (20, 21, 22)], gen=10)
    assert fine.value == pytest.approx(21 * 3600.0)
    assert fine.resolution == pytest.approx(3600.0)


@pytest.mark.parametrize(
    ("repetitions", "reason"),
    [
        ([], "no valid repetition"),
        ([rep_with(rapl(10)), rep_with(None, "no battery")], "no battery"),
        ([rep_with(None, "charging")] * 3, "charging"),
        ([rep_with(gauge(0))] * 3, "did not move"),
        ([rep_with(gauge(0)), rep_with(gauge(40))], "moves in steps"),
        ([Repetition(valid=True, sample=sample())], "not read"),
    ],
)
def test_energy_that_cannot_be_told_is_null_with_the_reason(repetitions: list[Repetition], reason: str) -> None:
    figure = energy_figure(repetitions, gen=16)
    assert figure.value is None
    assert figure.reason is not None and reason in figure.reason
