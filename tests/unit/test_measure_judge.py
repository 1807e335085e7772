"""Which repetitions count, and what they add up to."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from study_support import raw, sample

from nas.core.errors import CandidateFailed
from nas.core.measurement import Repetition
from nas.core.plan import Conditions, EnergyUsed, Pair, RawRun
from nas.core.space import MeasurementSettings
from nas.core.workload import Workload
from nas.measure.protocol import commonest, energy_figure, judge, measurement, summarise, total_ms
from nas.runtimes.runner import read_sample

LIMITS = MeasurementSettings(drift_limit=0.05, foreign_cpu_limit=0.1)
CALIBRATED_MS = total_ms(sample())
WORKLOAD = Workload(prompt=64, gen=16)


def judged(reference: RawRun | None, candidate: RawRun) -> tuple[Repetition, CandidateFailed | None]:
    calibration = CALIBRATED_MS if reference else None
    return judge(Pair(reference=reference, candidate=candidate), read_sample, calibration, LIMITS, attempt=2)


def scaled(factor: float) -> RawRun:
    return raw(sample(10.0 * factor, 1.0 * factor))


def test_a_calm_pair_counts() -> None:
    rep, fault = judged(raw(sample()), raw(sample(20.0)))
    assert rep.valid
    assert fault is None
    assert rep.attempt == 2
    assert rep.drift == pytest.approx(0.0)
    assert rep.sample is not None
    assert rep.sample.ttft_ms == 20.0


@pytest.mark.parametrize("factor", [0.94, 1.06])
def test_a_reference_off_its_calibration_refuses_the_repetition(factor: float) -> None:
    rep, fault = judged(scaled(factor), raw(sample()))
    assert not rep.valid
    assert fault is None
    assert rep.reason is not None
    assert "off its calibration (limit 5%)" in rep.reason
    assert rep.drift == pytest.approx(factor - 1)


@pytest.mark.parametrize("who", ["reference", "candidate"])
@pytest.mark.parametrize(
    ("condition", "reason"),
    [({"throttled": True}, "throttled"), ({"foreign_cpu": 0.2}, "0.20 of a core (limit 0.10)")],
)
def test_a_disturbance_of_either_run_refuses_both(who: str, condition: dict[str, Any], reason: str) -> None:
    runs = {name: raw(sample(), **(condition if name == who else {})) for name in ("reference", "candidate")}
    rep, fault = judged(runs["reference"], runs["candidate"])
    assert not rep.valid
    assert fault is None
    assert reason in (rep.reason or "")
    assert rep.sample is not None, "it can still be kept under --accept-noise"


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


@pytest.mark.parametrize("exit_code", [127, -9], ids=["not started", "killed from outside"])
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
    ],
)
def test_a_report_that_makes_no_sense_is_garbage(nonsense: dict[str, Any]) -> None:
    rep, fault = judged(raw(sample()), raw(sample().model_copy(update=nonsense)))
    assert not rep.valid
    assert fault is not None
    assert fault.reason == "garbage_output"


def counted(*factors: float, tokens: int = 16, **more: Any) -> list[Repetition]:
    """Repetitions on a machine that runs each at another speed."""
    made = []
    for factor in factors:
        report = sample(20.0 * factor, 2.0 * factor, tokens, **more)
        made.append(Repetition(valid=True, sample=report, reference=sample(), drift=factor - 1))
    return made


def test_drift_is_divided_out_of_times_only() -> None:
    figures = summarise(counted(0.96, 1.0, 1.04), WORKLOAD, file_bytes=3_000_000)
    assert figures["ttft"].value == pytest.approx(20.0)
    assert figures["ttft"].minimum == pytest.approx(figures["ttft"].maximum)
    assert figures["decode_p50"].value == pytest.approx(2.0)
    assert figures["latency"].value == pytest.approx(20.0 + 16 * 2.0)
    assert figures["prefill_tps"].value == pytest.approx(64 / 0.020)
    assert figures["load"].value == 5.0
    assert figures["peak_rss"].value == 50.0
    assert figures["file_size"].value == 3.0
    assert figures["ttft"].n == 3


def test_intervals_are_on_logarithms_of_medians_per_repetition() -> None:
    reps = [Repetition(valid=True, sample=sample(10.0 * 2**i), drift=0.0) for i in range(3)]
    ttft = summarise(reps, WORKLOAD, 1)["ttft"]
    assert ttft.low is not None
    assert ttft.high is not None
    assert math.sqrt(ttft.low * ttft.high) == pytest.approx(20.0)


@pytest.mark.parametrize(("tokens", "there"), [(499, False), (500, True)])
def test_a_95th_percentile_needs_a_thousand_tokens(tokens: int, there: bool) -> None:
    p95 = summarise(counted(1.0, 1.0, tokens=tokens), WORKLOAD, 1)["decode_p95"]
    assert (p95.value is not None) is there
    assert (p95.reason is None) is there


def test_a_peak_that_could_not_be_reset_is_null_with_its_reason() -> None:
    figures = summarise(counted(1.0, 1.0, decode_rss_mb=7.0), WORKLOAD, 1)
    assert figures["prefill_rss"].value is None
    assert figures["prefill_rss"].reason
    assert figures["decode_rss"].value == 7.0


def measured(reps: list[Repetition], noisy: bool) -> Any:
    return measurement(
        reps, noisy=noisy, artifact="a", runtime="fake", build="b", patched=False, device="box", workload=WORKLOAD,
        file_bytes=1, calibration_ms=CALIBRATED_MS, wall_s=3.0,
    )  # fmt: skip


def test_refused_repetitions_count_only_where_noise_is_accepted() -> None:
    reps = [*counted(1.0, 1.02), Repetition(valid=False, reason="noise", sample=sample(99.0), drift=0.2)]
    calm, noisy = measured(reps, False), measured(reps, True)
    assert calm.figures["ttft"].n == 2
    assert noisy.figures["ttft"].n == 3
    assert calm.refused_share == noisy.refused_share == pytest.approx(1 / 3)
    assert calm.drift == pytest.approx(statistics.median([0.0, 0.02]))
    assert noisy.noisy
    assert calm.wall_s == 3.0


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
    figure = energy_figure([rep_with(rapl(each)) for each in (32_000_061, 35_200_122, 33_600_000)], gen=16)
    assert figure.value == pytest.approx(33.6e3 / 16)
    assert (figure.unit, figure.n) == ("mJ", 3)
    assert figure.low is not None and figure.low < 33.6e3 / 16 < (figure.high or 0)
    assert figure.resolution is not None and figure.resolution < 0.01


def test_a_gauge_that_moves_in_large_steps_tells_long_runs_only() -> None:
    """10 mWh are 36 J: one step in 20 is 5 %."""
    coarse = energy_figure([rep_with(gauge(each)) for each in (19, 20, 21)], gen=10)
    assert coarse.value is None
    assert coarse.resolution == pytest.approx(3600.0)
    assert coarse.reason is not None and "steps of 36 J, and a run took 6.8e+02 J" in coarse.reason
    fine = energy_figure([rep_with(gauge(each)) for each in (20, 21, 22)], gen=10)
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
