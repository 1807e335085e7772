"""Figures from the repetitions of a candidate and of the reference model beside them.

Other processes only ever make a run slower, so the fastest runs of several fresh processes tell what a machine can do:
a figure is the floor of the repetitions. Where one thread is timed, its processor time leaves out the time in which
other processes had the core. What remains, clock frequency and shared caches, slows the reference model down too:
times are corrected by its floor in the same minutes. Pure functions; all constants are here.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nas.core.measurement import ClockName, Figure, ReferenceTimes, Sample
from nas.core.stats import Z95, floor

Phase = Literal["ttft", "decode"]


@dataclass(frozen=True, slots=True)
class NoiseModel:
    """How one kind of time is corrected, and how far it may be off.

    Args:
        exponent: power of the reference's slowness that the figure is corrected by; 0: not at all.
        base: standard deviation of the logarithm that more repetitions do not remove.
        spread_weight: of (spread of the repetitions / square root of their number).
        correction_weight: of the logarithm of the correction: what the machine did to the reference, it may have done
            to the candidate in another measure.
    """

    exponent: float
    base: float
    spread_weight: float
    correction_weight: float


NOISE: Mapping[ClockName, Mapping[Phase, NoiseModel]] = {
    # One thread, by its processor time.
    "cpu": {
        "ttft": NoiseModel(exponent=0.5, base=0.012, spread_weight=1.0, correction_weight=0.7),
        "decode": NoiseModel(exponent=1.0, base=0.015, spread_weight=1.0, correction_weight=0.75),
    },
    # Several threads, which wait for each other, or a runner that does not report processor time.
    "wall": {
        "ttft": NoiseModel(exponent=1.0, base=0.05, spread_weight=1.0, correction_weight=0.2),
        "decode": NoiseModel(exponent=1.0, base=0.05, spread_weight=1.0, correction_weight=0.05),
    },
}
"""Constants of the protocol, fitted to recorded runs of both runtimes on a calm and a busy machine of two cores.

`python -m benchmarks.noise.report` prints the fit and how often intervals hold; see docs/measured/noise.md.
"""


SLICE = 16
"""Decoded tokens of which the fastest counts."""


def token_time(times: Sequence[float], size: int = SLICE) -> float:
    """Returns the median over slices, of at least `size` consecutive tokens, of the fastest token of each slice.

    Other processes interrupt tokens, not slices; a longer context slows all tokens of a slice.
    """
    count = max(1, len(times) // size)
    edges = [len(times) * place // count for place in range(count + 1)]
    return statistics.median(min(times[begin:end]) for begin, end in itertools.pairwise(edges))


@dataclass(frozen=True, slots=True)
class Times:
    """Times of each repetition in ms, on one clock; of decoded tokens `token_time` and the mean."""

    clock: ClockName
    ttft: Sequence[float]
    p50: Sequence[float]
    mean: Sequence[float]
    run: Sequence[float]

    def floors(self) -> ReferenceTimes:
        """Returns the floors over the repetitions."""
        return ReferenceTimes(ttft_ms=floor(self.ttft), decode_ms=floor(self.p50), run_ms=floor(self.run))


def read_times(samples: Sequence[Sample], threads: int) -> Times:
    """Returns the times of repetitions: processor time where `threads` is 1 and all report it, else wall time."""
    clock: ClockName = "cpu" if threads == 1 and all(_reports_cpu(sample) for sample in samples) else "wall"
    ttft = [_ttft_ms(sample, clock) for sample in samples]
    tokens = [_decode_ms(sample, clock) for sample in samples]
    return Times(
        clock,
        ttft=ttft,
        p50=[token_time(run) for run in tokens],
        mean=[statistics.fmean(run) for run in tokens],
        run=[first + sum(run) for first, run in zip(ttft, tokens, strict=True)],
    )


def slowness(reference: ReferenceTimes | None, calibration: ReferenceTimes | None) -> dict[Phase, float]:
    """Returns how many times slower than when it was calibrated the reference model ran; 1 where there is none."""
    if reference is None or calibration is None:
        return {"ttft": 1.0, "decode": 1.0}
    return {
        "ttft": reference.ttft_ms / calibration.ttft_ms,
        "decode": reference.decode_ms / calibration.decode_ms,
    }


def time_figures(samples: Sequence[Sample], times: Times, slow: Mapping[Phase, float], gen: int) -> dict[str, Figure]:
    """Returns ttft, decode_p50, decode_mean and latency, of a request of `gen` tokens; `slow` is of `slowness`."""
    if not samples:
        none = Figure(value=None, unit="ms", reason="no valid repetition")
        return dict.fromkeys(("ttft", "decode_p50", "decode_mean", "latency"), none)
    tokens = [[ns / 1e6 for ns in sample.decode_ns] for sample in samples]
    wall_ttft = [sample.ttft_ms for sample in samples]
    wall_p50 = [statistics.median(run) for run in tokens]
    noise = NOISE[times.clock]
    ttft = _estimate(times.ttft, wall_ttft, slow["ttft"], noise["ttft"])
    p50 = _estimate(times.p50, wall_p50, slow["decode"], noise["decode"])
    mean = _estimate(times.mean, [statistics.fmean(run) for run in tokens], slow["decode"], noise["decode"])
    return {"ttft": ttft, "decode_p50": p50, "decode_mean": mean, "latency": _latency(ttft, p50, gen)}


def rate(time: Figure, amount: float, unit: str) -> Figure:
    """Returns the figure of `amount` / time, in units of `amount` per second."""
    if time.value is None:
        return time.model_copy(update={"unit": unit})

    def inverse(ms: float | None) -> float | None:
        return None if ms is None else amount * 1e3 / ms

    return Figure(
        value=inverse(time.value),
        low=inverse(time.high),
        high=inverse(time.low),
        log_sd=time.log_sd,
        typical=inverse(time.typical),
        minimum=inverse(time.maximum),
        maximum=inverse(time.minimum),
        n=time.n,
        unit=unit,
    )


def spread(values: Sequence[float]) -> float:
    """Returns how far the median lies above the floor, in logarithms: a robust measure of one-sided noise."""
    return math.log(statistics.median(values) / floor(values))


def _estimate(values: Sequence[float], experienced: Sequence[float], slow: float, noise: NoiseModel) -> Figure:
    """Returns the corrected floor with its interval; no interval for a single value."""
    correction = slow**-noise.exponent
    value = floor(values) * correction
    sd: float | None = None
    if len(values) > 1:
        sd = math.sqrt(
            noise.base**2
            + (noise.spread_weight * spread(values)) ** 2 / len(values)
            + (noise.correction_weight * math.log(correction)) ** 2
        )
    return Figure(
        value=value,
        **_interval(value, sd),
        typical=statistics.median(experienced),
        minimum=min(values) * correction,
        maximum=max(values) * correction,
        n=len(values),
        unit="ms",
    )


def _latency(ttft: Figure, p50: Figure, gen: int) -> Figure:
    def total(name: str) -> float:
        return float(getattr(ttft, name) + gen * getattr(p50, name))

    value = total("value")
    sd: float | None = None
    if ttft.log_sd is not None and p50.log_sd is not None and ttft.value is not None and p50.value is not None:
        sd = math.hypot(ttft.value * ttft.log_sd, gen * p50.value * p50.log_sd) / value
    return Figure(
        value=value,
        **_interval(value, sd),
        typical=total("typical"),
        minimum=total("minimum"),
        maximum=total("maximum"),
        n=ttft.n,
        unit="ms",
    )


def _interval(value: float, sd: float | None) -> dict[str, float | None]:
    if sd is None:
        return {"low": None, "high": None, "log_sd": None}
    return {"low": value * math.exp(-Z95 * sd), "high": value * math.exp(Z95 * sd), "log_sd": sd}


def _reports_cpu(sample: Sample) -> bool:
    return bool(sample.prefill_cpu_ms and sample.decode_cpu_ns and all(ns > 0 for ns in sample.decode_cpu_ns))


def _ttft_ms(sample: Sample, clock: ClockName) -> float:
    return sample.prefill_cpu_ms if clock == "cpu" and sample.prefill_cpu_ms else sample.ttft_ms


def _decode_ms(sample: Sample, clock: ClockName) -> list[float]:
    times = sample.decode_cpu_ns if clock == "cpu" and sample.decode_cpu_ns else sample.decode_ns
    return [ns / 1e6 for ns in times]
