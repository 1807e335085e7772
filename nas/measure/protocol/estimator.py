"""Times of a candidate from its repetitions, each measured in turn with a reference model.

What slows a machine down for milliseconds or minutes (other processes, a host's other guests, the clock frequency)
slows neighbouring turns of two models of like size down alike. So each repetition yields the logarithm of the ratio
candidate / reference of every time, and a figure is the mean ratio times what the reference takes on this device when
nothing disturbs it (its calibration). Where one thread is timed, processor time leaves out the time in which other
processes had the core. Pure functions; all constants are here.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from nas.core.measurement import ClockName, Figure, ReferenceTimes, Sample
from nas.core.stats import P95_MIN_TOKENS, Z95, floor, quantile, sum_log_sd, t_critical

TimeName = Literal["ttft", "decode", "decode_mean", "decode_p95"]
TIMES: tuple[TimeName, ...] = get_args(TimeName)


@dataclass(frozen=True, slots=True)
class NoiseModel:
    """How far one kind of time may be off.

    Args:
        run_sd: expected standard deviation of the logarithm of one repetition's ratio; it counts as one repetition, as
            few hardly tell their own noise.
        base: standard deviation that more repetitions do not remove.
        slowdown: of (logarithm of the reference's slowness): the machine may slow two models down unalike.
        calibration: standard deviation of the reference's own time that more runs of it do not remove.
    """

    run_sd: float
    base: float
    slowdown: float
    calibration: float


NOISE: Mapping[ClockName, Mapping[TimeName, NoiseModel]] = {
    # One thread, by its processor time.
    "cpu": {
        "ttft": NoiseModel(run_sd=0.02, base=0.005, slowdown=0.1, calibration=0.01),
        "decode": NoiseModel(run_sd=0.02, base=0.01, slowdown=0.1, calibration=0.01),
        "decode_mean": NoiseModel(run_sd=0.02, base=0.015, slowdown=0.1, calibration=0.01),
        "decode_p95": NoiseModel(run_sd=0.04, base=0.02, slowdown=0.15, calibration=0.02),
    },
    # Several threads, which wait for each other, or a runner that does not report processor time.
    "wall": {
        "ttft": NoiseModel(run_sd=0.04, base=0.01, slowdown=0.1, calibration=0.02),
        "decode": NoiseModel(run_sd=0.04, base=0.015, slowdown=0.1, calibration=0.02),
        "decode_mean": NoiseModel(run_sd=0.04, base=0.02, slowdown=0.1, calibration=0.02),
        "decode_p95": NoiseModel(run_sd=0.08, base=0.03, slowdown=0.2, calibration=0.04),
    },
}
"""Constants of the protocol, fitted to recorded runs on calm and busy machines.

`python -m benchmarks.noise.report` prints the fit and how often intervals hold; see docs/measured/noise.md.
"""

DISTURBED_LOG_SD = 0.2
"""Of a calibration beside processes that never rested: loops slow it down by 2 %, copies of memory by 40 %."""

SLICE = 16
"""Decoded tokens of which the fastest counts, where two models do not take turns."""


def token_time(times: Sequence[float], turns: Sequence[int] = ()) -> float:
    """Returns the median over turns of the fastest token of each; without turns, over slices of `SLICE` tokens."""
    return statistics.median(_fastest(times, turns or _slices(len(times))))


def _slices(tokens: int) -> list[int]:
    count = max(1, tokens // SLICE)
    edges = [tokens * place // count for place in range(count + 1)]
    return [end - begin for begin, end in itertools.pairwise(edges)]


def _fastest(times: Sequence[float], turns: Sequence[int]) -> list[float]:
    """Returns the fastest token of each turn, the first of a longer turn left out: caches hold the other model."""
    edges = itertools.accumulate(turns, initial=0)
    return [min(times[begin + (end - begin > 2) : end]) for begin, end in itertools.pairwise(edges)]


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Times of one repetition in ms, on one clock.

    Args:
        prompts: of each pass over the prompt.
        tokens: of each decoded token.
        turns: tokens of each turn; (): the model was not interrupted.
    """

    prompts: tuple[float, ...]
    tokens: tuple[float, ...]
    turns: tuple[int, ...] = ()

    def of(self, name: TimeName) -> float | None:
        """Returns one time as a plain statistic; None where there are too few tokens for it."""
        if name != "ttft" and not self.tokens:
            return None
        match name:
            case "ttft":
                return statistics.median(self.prompts)
            case "decode":
                return statistics.median(self.tokens)
            case "decode_mean":
                return statistics.fmean(self.tokens)
            case "decode_p95":
                return quantile(self.tokens, 0.95)

    @property
    def run_ms(self) -> float:
        """Time of the prompt once and all tokens."""
        return statistics.median(self.prompts) + math.fsum(self.tokens)


def clock_of(samples: Sequence[Sample], threads: int) -> ClockName:
    """Returns "cpu" where `threads` is 1 and all samples have processor times, else "wall"."""
    return "cpu" if threads == 1 and all(_reports_cpu(sample) for sample in samples) else "wall"


def run_times(sample: Sample, clock: ClockName) -> RunTimes:
    """Returns the times of a sample on a clock that it has."""
    wall = sample.prefill_ns or [round(sample.ttft_ms * 1e6)]
    prompts, tokens = wall, sample.decode_ns
    if clock == "cpu" and sample.prefill_cpu_ms and sample.decode_cpu_ns is not None:
        prompts, tokens = sample.prefill_cpu_ns or [round(sample.prefill_cpu_ms * 1e6)], sample.decode_cpu_ns
    return RunTimes(tuple(ns / 1e6 for ns in prompts), tuple(ns / 1e6 for ns in tokens), tuple(sample.turns))


def reference_times(samples: Sequence[Sample], threads: int, *, disturbed: bool = False) -> ReferenceTimes:
    """Returns what a model takes by runs of it alone: floors over the runs, as other processes only slow it down.

    `disturbed` says that others had much of the device during all of them: no run tells how slow they made it.
    """
    clock = clock_of(samples, threads)
    runs = [run_times(sample, clock) for sample in samples]
    floors: dict[str, float] = {}
    log_sd: dict[str, float] = {}
    for name in TIMES:
        values = [value for run in runs if (value := run.of(name)) is not None]
        if len(values) == len(runs):
            floors[name] = floor(values)
            floor_sd = spread(values) * math.sqrt(2 / len(values))
            log_sd[name] = math.hypot(NOISE[clock][name].calibration, floor_sd, DISTURBED_LOG_SD * disturbed)
    return ReferenceTimes(
        **{f"{name}_ms": value for name, value in floors.items()},
        run_ms=floor([run.run_ms for run in runs]),
        log_sd=log_sd,
    )


def spread(values: Sequence[float]) -> float:
    """Returns how far the median lies above the floor, in logarithms: a robust measure of one-sided noise."""
    return math.log(statistics.median(values) / floor(values))


def log_ratios(candidate: RunTimes, reference: RunTimes) -> dict[TimeName, float]:
    """Returns the logarithm of candidate / reference of each time that one repetition tells.

    Of passes over the prompt and of turns, each is compared with the reference's before and after it.
    """
    prompts = _neighbours(candidate.prompts, reference.prompts)
    if not candidate.tokens or not reference.tokens:
        return {"ttft": statistics.median(prompts)}
    if candidate.turns and candidate.turns == reference.turns:
        fastest = (_fastest(run.tokens, run.turns) for run in (candidate, reference))
    else:
        fastest = ([token_time(run.tokens)] for run in (candidate, reference))
    decoded = _neighbours(*fastest)
    ratios: dict[TimeName, float] = {
        "ttft": statistics.median(prompts),
        "decode": statistics.median(decoded),
        "decode_mean": statistics.fmean(decoded),
    }
    tails = candidate.of("decode_p95"), reference.of("decode_p95")
    if tails[0] is not None and tails[1] is not None:
        ratios["decode_p95"] = math.log(tails[0] / tails[1])
    return ratios


def _neighbours(candidate: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Returns log(candidate / mean of the reference's turns before and after it) of each turn."""
    return [
        math.log(time) - math.log(statistics.fmean(reference[index : index + 2]))
        for index, time in enumerate(candidate[: len(reference)])
    ]


def time_figures(
    samples: Sequence[Sample],
    references: Sequence[Sample],
    calibration: ReferenceTimes | None,
    threads: int,
    gen: int,
) -> dict[str, Figure]:
    """Returns ttft, decode_p50, decode_mean, decode_p95, and latency of a request of `gen` tokens.

    Of a request that decodes nothing, the time of the prompt is `encoding`, and these are null.

    Args:
        samples: of the candidate.
        references: the reference's beside each; none: figures are medians as measured, of unknown noise.
        calibration: of the reference.
        threads: of the workload.
        gen: decoded tokens of the request.
    """
    names = {"ttft": "ttft", "decode": "decode_p50", "decode_mean": "decode_mean", "decode_p95": "decode_p95"}
    if not samples:
        none = Figure(value=None, unit="ms", reason="no valid repetition")
        return dict.fromkeys((*names.values(), "latency", *([] if gen else ["encoding"])), none)
    clock = clock_of([*samples, *references], threads)
    candidates = [run_times(sample, clock) for sample in samples]
    beside = [run_times(sample, clock) for sample in references]
    experienced = [run_times(sample, "wall") for sample in samples]
    figures = {}
    for name in TIMES if gen else TIMES[:1]:
        typical = [value for run in experienced if (value := run.of(name)) is not None]
        if name == "decode_p95" and (reason := _too_few(candidates)):
            figure = Figure(value=None, unit="ms", reason=reason)
        elif beside and calibration is not None and (calm := getattr(calibration, f"{name}_ms")) is not None:
            figure = _relative(name, candidates, beside, calm, calibration, clock)
        else:
            plain = [value for run in candidates if (value := run.of(name)) is not None]
            figure = Figure(
                value=statistics.median(plain), minimum=min(plain), maximum=max(plain), n=len(plain), unit="ms"
            )
        figures[names[name]] = figure.model_copy(update={"typical": statistics.median(typical) if typical else None})
    if not gen:
        none = Figure(value=None, unit="ms", reason="the workload decodes nothing")
        return dict.fromkeys((*names.values(), "latency"), none) | {"encoding": figures["ttft"]}
    return figures | {"latency": _latency(figures["ttft"], figures["decode_p50"], gen)}


def _too_few(runs: Sequence[RunTimes]) -> str | None:
    tokens = sum(len(run.tokens) for run in runs)
    if tokens < P95_MIN_TOKENS:
        return f"{tokens} tokens; a p95 needs {P95_MIN_TOKENS}"
    if any(run.of("decode_p95") is None for run in runs):
        return "no repetition has the 20 tokens that a p95 needs"
    return None


def _relative(
    name: TimeName,
    candidates: Sequence[RunTimes],
    references: Sequence[RunTimes],
    calm: float,
    calibration: ReferenceTimes,
    clock: ClockName,
) -> Figure:
    """Returns the mean ratio of one time, times the reference's calm one; no interval for a single repetition."""
    noise = NOISE[clock][name]
    pairs = [
        (ratios[name], math.log(slow / calm))
        for candidate, reference in zip(candidates, references, strict=True)
        if name in (ratios := log_ratios(candidate, reference)) and (slow := reference.of(name)) is not None
    ]
    values = [ratio for ratio, _ in pairs]
    slowness = max(0.0, statistics.fmean(slow for _, slow in pairs))
    mean, count = statistics.fmean(values), len(values)
    sd: float | None = None
    if count > 1:
        variance = (noise.run_sd**2 + sum((value - mean) ** 2 for value in values)) / count
        error = t_critical(0.95, count) / Z95 * math.sqrt(variance / count)
        sd = math.hypot(error, noise.base, noise.slowdown * slowness)
    shared = calibration.log_sd.get(name)
    value = calm * math.exp(mean)
    return Figure(
        value=value,
        **_interval(value, sd, shared),
        minimum=calm * math.exp(min(values)),
        maximum=calm * math.exp(max(values)),
        n=count,
        unit="ms",
    )


def rate(time: Figure, amount: float, unit: str) -> Figure:
    """Returns the figure of `amount` / time, in units of `amount` per second."""
    if time.value is None:
        return time.model_copy(update={"unit": unit})
    if time.value == 0:  # the rest of another time, on a clock of coarse steps
        return Figure(value=None, unit=unit, reason="it took no time that the clock shows")

    def inverse(ms: float | None) -> float | None:
        return None if ms is None else amount * 1e3 / ms

    return Figure(
        value=inverse(time.value),
        low=inverse(time.high),
        high=inverse(time.low),
        log_sd=time.log_sd,
        shared_log_sd=time.shared_log_sd,
        typical=inverse(time.typical),
        minimum=inverse(time.maximum),
        maximum=inverse(time.minimum),
        n=time.n,
        unit=unit,
    )


def _latency(ttft: Figure, p50: Figure, gen: int) -> Figure:
    def total(name: str) -> float:
        return float(getattr(ttft, name) + gen * getattr(p50, name))

    def noise(name: str) -> float | None:
        first, token = getattr(ttft, name), getattr(p50, name)
        if first is None or token is None or ttft.value is None or p50.value is None:
            return None
        return sum_log_sd((ttft.value, first), (gen * p50.value, token))

    value = total("value")
    return Figure(
        value=value,
        **_interval(value, noise("log_sd"), noise("shared_log_sd")),
        typical=total("typical"),
        minimum=total("minimum"),
        maximum=total("maximum"),
        n=ttft.n,
        unit="ms",
    )


def _interval(value: float, sd: float | None, shared: float | None) -> dict[str, float | None]:
    if sd is None:
        return {"low": None, "high": None, "log_sd": None, "shared_log_sd": shared}
    whole = Z95 * math.hypot(sd, shared or 0.0)
    return {"low": value * math.exp(-whole), "high": value * math.exp(whole), "log_sd": sd, "shared_log_sd": shared}


def _reports_cpu(sample: Sample) -> bool:
    if sample.gpu is not None or sample.decode_cpu_ns is None:  # the processor sleeps while a GPU computes
        return False
    # In sandboxes whose clock has coarse steps, what is short takes no time.
    return bool(sample.prefill_cpu_ms) and all(ns > 0 for ns in (*(sample.prefill_cpu_ns or ()), *sample.decode_cpu_ns))
