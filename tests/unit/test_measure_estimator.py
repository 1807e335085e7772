"""Ratios to the reference model, the clock that they are read from, and how sure figures are."""

from __future__ import annotations

import math
import random
from statistics import fmean, median

import pytest
from study_support import sample

from nas.core.measurement import Figure, ReferenceTimes, Sample
from nas.core.stats import Z95, t_critical
from nas.measure.protocol.estimator import (
    DISTURBED_LOG_SD,
    NOISE,
    SLICE,
    RunTimes,
    clock_of,
    log_ratios,
    rate,
    reference_times,
    spread,
    time_figures,
    token_time,
)

CALM = reference_times([sample(10.0, 1.0)], 1)


GPU = {"name": "Vulkan0", "description": "a GPU", "software": False, "memory_mb": 100.0}


def figures(
    samples: list[Sample],
    beside: list[Sample] | None = None,
    calibration: ReferenceTimes | None = CALM,
    threads: int = 1,
    gen: int = 16,
) -> dict[str, Figure]:
    """Of samples, each beside a calm reference."""
    references = [sample(10.0, 1.0) for _ in samples] if beside is None else beside
    return time_figures(samples, references, calibration, threads, gen)


def on_cpu(ttft_ms: float, token_ms: float, wall: float = 3.0) -> Sample:
    """A run that had the core for a third of the time that passed."""
    return sample(ttft_ms * wall, token_ms * wall, prefill_cpu_ms=ttft_ms, decode_cpu_ns=[round(token_ms * 1e6)] * 16)


def test_one_thread_is_timed_by_its_processor_time() -> None:
    beside = [on_cpu(10.0, 1.0)] * 3
    measured = figures([on_cpu(20.0, 3.0, wall) for wall in (1.0, 3.0, 7.0)], beside)
    assert measured["ttft"].value == pytest.approx(20.0)
    assert measured["decode_p50"].value == pytest.approx(3.0)
    assert measured["decode_mean"].value == pytest.approx(3.0)
    assert measured["ttft"].typical == pytest.approx(60.0), "the median that people wait for"
    assert measured["decode_p50"].typical == pytest.approx(9.0)
    assert measured["latency"].typical == pytest.approx(60.0 + 16 * 9.0)


@pytest.mark.parametrize(
    ("threads", "samples"),
    [
        (2, [on_cpu(10.0, 1.0)] * 2),
        (1, [on_cpu(10.0, 1.0), sample(30.0, 3.0)]),
        (1, [on_cpu(10.0, 1.0), sample(30.0, 3.0, prefill_cpu_ms=0.0, decode_cpu_ns=[1] * 16)]),
        (1, [on_cpu(10.0, 1.0).model_copy(update={"prefill_ns": [30_000_000] * 2, "prefill_cpu_ns": [0, 10_000_000]})]),
        (1, [on_cpu(10.0, 1.0).model_copy(update={"info": {"gpu": GPU}})] * 2),
    ],
    ids=["two threads", "one run does not report it", "a clock that stands still", "a coarse clock", "a GPU computes"],
)
def test_anything_else_is_timed_by_the_wall(threads: int, samples: list[Sample]) -> None:
    assert clock_of(samples, threads) == "wall"
    assert figures(samples, threads=threads)["ttft"].value == pytest.approx(30.0)


def test_tokens_that_were_interrupted_do_not_count_and_a_longer_context_does() -> None:
    growing = [1.0 + place / 100 for place in range(3 * SLICE + 2)]
    calm = token_time(growing)
    assert calm == growing[17], "the second token of the middle one of three slices"
    assert token_time([time * (1 if place % SLICE < 2 else 5) for place, time in enumerate(growing)]) == calm
    assert token_time([3.0, 2.0, 4.0]) == 2.0, "too few for two slices"
    assert token_time([1.0, 3.0, 2.0, 4.0, 5.0, 6.0], turns=[3, 3]) == 3.5, "the first token of a turn is left out"


def turns(speeds: list[float], size: int = 4, token_ms: float = 1.0) -> RunTimes:
    """A run on a machine whose speed is another one in each turn."""
    tokens = [token_ms * speed for speed in speeds for _ in range(size)]
    return RunTimes((10.0,), tuple(tokens), (size,) * len(speeds))


def test_a_machine_that_changes_its_speed_between_turns_changes_no_ratio() -> None:
    speeds = [1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 1.5]
    between = [1.0, 1.0, 2.5, 4.0, 4.0, 2.75, 1.5]  # of the candidate's turn: between two of the reference's
    ratios = log_ratios(turns(between, token_ms=2.0), turns(speeds))
    assert math.exp(ratios["decode"]) == pytest.approx(2.0)
    assert math.exp(ratios["decode_mean"]) == pytest.approx(2.0)


def test_passes_over_the_prompt_are_compared_with_those_beside_them() -> None:
    candidate = RunTimes((20.0, 60.0, 20.0), (1.0,) * 4)
    reference = RunTimes((10.0, 10.0, 50.0), (1.0,) * 4)
    assert math.exp(log_ratios(candidate, reference)["ttft"]) == pytest.approx(2.0)


def test_turns_of_other_sizes_are_not_compared_one_by_one() -> None:
    odd = RunTimes((10.0,), (2.0,) * 28, (14, 14))
    assert math.exp(log_ratios(odd, turns([1.0] * 7))["decode"]) == pytest.approx(2.0)


def test_the_speed_of_the_machine_is_no_part_of_a_figure() -> None:
    measured = figures([sample(22.0, 2.6)] * 3, [sample(11.0, 1.3)] * 3)
    assert measured["ttft"].value == pytest.approx(20.0)
    assert measured["decode_p50"].value == pytest.approx(2.0)
    assert measured["latency"].value == pytest.approx(20.0 + 16 * 2.0)
    assert measured["ttft"].typical == 22.0, "as experienced"


def test_a_95th_percentile_is_a_ratio_too() -> None:
    def run(token_ms: float, slow: float) -> Sample:
        times = [round(token_ms * slow * (1.5 if token % 10 == 9 else 1.0) * 1e6) for token in range(500)]
        return sample(10.0).model_copy(update={"decode_ns": times})

    calm = reference_times([run(1.0, 1.0)], 1)
    measured = figures([run(2.0, 3.0)] * 2, [run(1.0, 3.0)] * 2, calm)
    assert measured["decode_p95"].value == pytest.approx(3.0)
    assert measured["decode_p95"].typical == pytest.approx(9.0), "as experienced"
    assert measured["decode_p95"].log_sd is not None


def test_without_a_reference_or_a_calibration_the_noise_is_unknown() -> None:
    for measured in (figures([sample(20.0, 3.0)] * 3, []), figures([sample(20.0, 3.0)] * 3, calibration=None)):
        assert measured["ttft"].value == pytest.approx(20.0)
        assert measured["decode_p50"].value == pytest.approx(3.0)
        assert {figure.log_sd for figure in measured.values()} == {None}


def test_noise_is_made_of_spread_base_and_slowness() -> None:
    noise = NOISE["wall"]["ttft"]
    values = [20.0, 20.4, 21.0, 20.2]
    measured = figures([sample(value * 1.2) for value in values], [sample(12.0)] * 4)["ttft"]
    logs = [math.log(value) for value in values]
    variance = (noise.run_sd**2 + sum((log - fmean(logs)) ** 2 for log in logs)) / 4
    error = t_critical(0.95, 4) / Z95 * math.sqrt(variance / 4)
    expected = math.hypot(error, noise.base, noise.slowdown * math.log(1.2))
    assert measured.log_sd == pytest.approx(expected)
    assert measured.shared_log_sd == pytest.approx(noise.calibration)
    whole = math.hypot(expected, noise.calibration)
    assert measured.value is not None
    assert (measured.low, measured.high) == pytest.approx(
        (measured.value * math.exp(-Z95 * whole), measured.value * math.exp(Z95 * whole))
    )


def test_a_calibration_is_the_floor_of_its_runs_and_knows_its_noise() -> None:
    values = [10.0, 10.0, 10.4, 10.4, 10.4, 11.0]
    calibration = reference_times([sample(value) for value in values], 1)
    assert calibration.ttft_ms == 10.0
    assert spread(values) == pytest.approx(math.log(1.04))
    expected = math.hypot(NOISE["wall"]["ttft"].calibration, math.log(1.04) * math.sqrt(2 / 6))
    assert calibration.log_sd["ttft"] == pytest.approx(expected)
    disturbed = reference_times([sample(value) for value in values], 1, disturbed=True)
    assert disturbed.ttft_ms == 10.0
    assert disturbed.log_sd["ttft"] == pytest.approx(math.hypot(expected, DISTURBED_LOG_SD))
    assert calibration.decode_p95_ms is None, "too few tokens"


def test_the_errors_of_a_latency_are_those_of_its_parts() -> None:
    measured = figures([sample(100.0, 1.0)] * 3, gen=100)
    ttft, p50, latency = (measured[name].log_sd for name in ("ttft", "decode_p50", "latency"))
    assert ttft is not None and p50 is not None
    assert latency == pytest.approx((ttft + p50) / 2), "two parts of equal length"


def test_one_repetition_has_no_interval() -> None:
    measured = figures([sample(20.0)])
    assert {figure.low for figure in measured.values()} == {figure.log_sd for figure in measured.values()} == {None}
    assert measured["latency"].value == pytest.approx(36.0)


def test_no_repetition_is_null_with_a_reason() -> None:
    assert {(figure.value, figure.reason) for figure in figures([]).values()} == {(None, "no valid repetition")}


def test_a_rate_turns_the_interval_round() -> None:
    time = figures([sample(10.0), sample(12.0), sample(14.0)])["ttft"]
    tps = rate(time, 64, "tok/s")
    assert time.value and time.low and time.high and time.minimum
    assert (tps.value, tps.low, tps.high) == (64e3 / time.value, 64e3 / time.high, 64e3 / time.low)
    assert (tps.maximum, tps.log_sd, tps.unit) == (64e3 / time.minimum, time.log_sd, "tok/s")
    assert rate(Figure(value=None, unit="ms", reason="none"), 64, "tok/s").unit == "tok/s"
    nothing = rate(Figure(value=0.0, unit="ms"), 64, "tok/s")
    assert nothing.value is None and nothing.unit == "tok/s" and nothing.reason


def test_intervals_hold_the_truth_on_a_machine_that_changes_its_speed_all_the_time() -> None:
    """Medians of the same runs err by tens of per cent."""
    rng = random.Random(0)

    def repetition() -> tuple[Sample, Sample]:
        speed = math.exp(rng.gauss(0.2, 0.3))
        runs = [speed * math.exp(rng.gauss(0, 0.01)) for _ in range(2)]
        return sample(20.0 * runs[0]), sample(10.0 * runs[1])

    held, errors, medians = 0, [], []
    for _ in range(400):
        pairs = [repetition() for _ in range(5)]
        ttft = figures([candidate for candidate, _ in pairs], [reference for _, reference in pairs])["ttft"]
        assert ttft.value and ttft.log_sd
        error = math.log(ttft.value / 20.0)
        held += abs(error) <= Z95 * ttft.log_sd
        errors.append(abs(error))
        medians.append(abs(math.log(median(candidate.ttft_ms for candidate, _ in pairs) / 20.0)))
    assert held >= 0.93 * 400
    assert median(errors) < 0.01 < 0.1 < median(medians)
