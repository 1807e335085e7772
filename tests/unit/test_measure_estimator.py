"""Floors, the clock that they are read from, their correction, and how sure they are."""

from __future__ import annotations

import math
import random
from statistics import median
from typing import Any

import pytest
from study_support import reference_times, sample

from nas.core.measurement import Figure, ReferenceTimes, Sample
from nas.core.stats import Z95
from nas.measure.protocol import estimator
from nas.measure.protocol.estimator import (
    NOISE,
    SLICE,
    NoiseModel,
    rate,
    read_times,
    slowness,
    spread,
    time_figures,
    token_time,
)

STILL = {"ttft": 1.0, "decode": 1.0}


def figures(samples: list[Sample], threads: int = 1, slow: Any = None, gen: int = 16) -> dict[str, Figure]:
    return time_figures(samples, read_times(samples, threads), slow or STILL, gen)


def on_cpu(ttft_ms: float, token_ms: float, wall: float = 3.0) -> Sample:
    """A run that had the core for a third of the time that passed."""
    return sample(ttft_ms * wall, token_ms * wall, prefill_cpu_ms=ttft_ms, decode_cpu_ns=[round(token_ms * 1e6)] * 16)


def test_one_thread_is_timed_by_its_processor_time() -> None:
    found = figures([on_cpu(10.0, 1.0, wall) for wall in (1.0, 3.0, 7.0)])
    assert found["ttft"].value == pytest.approx(10.0)
    assert found["decode_p50"].value == pytest.approx(1.0)
    assert found["decode_mean"].value == pytest.approx(1.0)
    assert found["ttft"].typical == pytest.approx(30.0), "the median that people wait for"
    assert found["decode_p50"].typical == pytest.approx(3.0)
    assert found["latency"].typical == pytest.approx(30.0 + 16 * 3.0)


@pytest.mark.parametrize(
    ("threads", "samples"),
    [
        (2, [on_cpu(10.0, 1.0)] * 2),
        (1, [on_cpu(10.0, 1.0), sample(30.0, 3.0)]),
        (1, [on_cpu(10.0, 1.0), sample(30.0, 3.0, prefill_cpu_ms=0.0, decode_cpu_ns=[1] * 16)]),
    ],
    ids=["two threads", "one run does not report it", "a clock that stands still"],
)
def test_anything_else_is_timed_by_the_wall(threads: int, samples: list[Sample]) -> None:
    assert read_times(samples, threads).clock == "wall"
    assert figures(samples, threads)["ttft"].value == pytest.approx(30.0)


def test_tokens_that_were_interrupted_do_not_count_and_a_longer_context_does() -> None:
    growing = [1.0 + place / 100 for place in range(3 * SLICE + 2)]
    calm = token_time(growing)
    assert calm == growing[16], "the fastest token of the middle one of three slices"
    assert token_time([time * (1 if place % SLICE < 2 else 5) for place, time in enumerate(growing)]) == calm
    assert token_time([3.0, 2.0, 4.0]) == 2.0, "too few for two slices"
    assert token_time([3.0, 2.0, 4.0, 5.0], size=2) == 3.0


def test_slow_repetitions_do_not_move_a_figure() -> None:
    fast = [sample(10.0 + i / 10, 1.0) for i in range(4)]
    calm, busy = figures(fast + [sample(11.0, 1.0)] * 8), figures(fast + [sample(90.0, 9.0)] * 8)
    assert busy["ttft"].value == pytest.approx(calm["ttft"].value)
    assert busy["ttft"].log_sd is not None and calm["ttft"].log_sd is not None
    assert busy["ttft"].log_sd > calm["ttft"].log_sd, "but it is less sure"
    assert (busy["ttft"].minimum, busy["ttft"].maximum, busy["ttft"].n) == (pytest.approx(10.0), 90.0, 12)


def test_the_speed_of_the_machine_is_taken_out_each_phase_by_its_own() -> None:
    slow = slowness(reference_times(sample(11.0, 1.3)), reference_times(sample(10.0, 1.0)))
    assert slow == {"ttft": pytest.approx(1.1), "decode": pytest.approx(1.3)}
    found = figures([sample(22.0, 2.6)] * 3, slow=slow)
    assert found["ttft"].value == pytest.approx(20.0)
    assert found["decode_p50"].value == pytest.approx(2.0)
    assert found["latency"].value == pytest.approx(20.0 + 16 * 2.0)
    assert found["ttft"].typical == 22.0, "as experienced"


def test_without_a_reference_or_a_calibration_nothing_is_corrected() -> None:
    times = ReferenceTimes(ttft_ms=1, decode_ms=1, run_ms=1)
    assert slowness(None, times) == slowness(times, None) == STILL


def test_the_exponent_tells_how_much_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    half = NoiseModel(exponent=0.5, base=0.01, spread_weight=1.0, correction_weight=0.0)
    monkeypatch.setattr(estimator, "NOISE", {"wall": {"ttft": half, "decode": half}})
    found = figures([sample(40.0)] * 3, slow={"ttft": 4.0, "decode": 1.0})
    assert found["ttft"].value == pytest.approx(20.0)
    assert found["ttft"].log_sd == pytest.approx(0.01)


def test_an_interval_is_made_of_base_spread_and_correction() -> None:
    values = [10.0, 10.0, 10.4, 10.4, 10.4, 11.0]
    noise = NOISE["wall"]["ttft"]
    found = figures([sample(each) for each in values], slow={"ttft": 1.2, "decode": 1.0})["ttft"]
    assert spread(values) == pytest.approx(math.log(1.04))
    expected = math.sqrt(
        noise.base**2
        + noise.spread_weight**2 * math.log(1.04) ** 2 / 6
        + noise.correction_weight**2 * noise.exponent**2 * math.log(1.2) ** 2
    )
    assert found.log_sd == pytest.approx(expected)
    assert found.value is not None
    assert (found.low, found.high) == pytest.approx(
        (found.value * math.exp(-Z95 * expected), found.value * math.exp(Z95 * expected))
    )


def test_the_errors_of_a_latency_are_those_of_its_parts() -> None:
    found = figures([sample(100.0, 1.0)] * 3, gen=100)
    ttft, p50, latency = (found[name].log_sd for name in ("ttft", "decode_p50", "latency"))
    assert ttft is not None and p50 is not None
    assert latency == pytest.approx(math.hypot(ttft, p50) / 2), "two parts of equal length"


def test_one_repetition_has_no_interval() -> None:
    found = figures([sample(20.0)])
    assert {each.low for each in found.values()} == {each.log_sd for each in found.values()} == {None}
    assert found["latency"].value == pytest.approx(36.0)


def test_no_repetition_is_null_with_a_reason() -> None:
    assert {(each.value, each.reason) for each in figures([]).values()} == {(None, "no valid repetition")}


def test_a_rate_turns_the_interval_round() -> None:
    time = figures([sample(10.0), sample(12.0), sample(14.0)])["ttft"]
    tps = rate(time, 64, "tok/s")
    assert time.value and time.low and time.high and time.minimum
    assert (tps.value, tps.low, tps.high) == (64e3 / time.value, 64e3 / time.high, 64e3 / time.low)
    assert (tps.maximum, tps.log_sd, tps.unit) == (64e3 / time.minimum, time.log_sd, "tok/s")
    assert rate(Figure(value=None, unit="ms", reason="none"), 64, "tok/s").unit == "tok/s"


def test_the_floor_errs_less_than_the_median_beside_bursts() -> None:
    """Half of the runs lose up to twice their time to others: the median is pulled up, the floor is not."""
    rng = random.Random(0)

    def run() -> Sample:
        lost = rng.choice([0.0, rng.random() * 2])
        return sample(100.0 * (1 + lost) * math.exp(rng.gauss(0, 0.005)))

    errors: dict[str, list[float]] = {"floor": [], "median": []}
    for _ in range(200):
        samples = [run() for _ in range(10)]
        value = figures(samples)["ttft"].value
        assert value is not None
        errors["floor"].append(abs(value / 100 - 1))
        errors["median"].append(abs(median(each.ttft_ms for each in samples) / 100 - 1))
    assert median(errors["floor"]) < 0.02 < median(errors["median"])
