"""Measurements as a family records them."""

from __future__ import annotations

from collections.abc import Iterator

from nas.core.family import Figure, Measured, Metric
from nas.core.measurement import Figure as Taken
from nas.core.measurement import Measurement
from nas.core.space import SearchSpace
from nas.family.terms import Measurements


def measured_of(taken: Measurements, space: SearchSpace, *, searched: bool = True) -> tuple[Measured, ...]:
    """One record for each device and runtime, whatever the number of workloads.

    Args:
        taken: place -> measurement.
        space: whose runtimes they are.
        searched: whether the search used these devices.
    """
    quantisations = {runtime.name: runtime.quantisation for runtime in space.runtimes}
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for each in taken.values():
        groups.setdefault((each.device, each.runtime), []).append(each)
    return tuple(
        Measured(
            device=device,
            runtime=runtime,
            quantisation=quantisations[runtime],
            threads=group[0].workload.threads,
            figures=tuple(figure for each in group for figure in _figures(each)),
            searched=searched,
            noisy=any(each.noisy for each in group),
        )
        for (device, runtime), group in groups.items()
    )


def _figures(taken: Measurement) -> Iterator[Figure]:
    workload, figures = taken.workload, taken.figures
    yield _figure("prefill_tps", workload.prompt, figures["prefill_tps"])
    yield _figure("ttft_ms", workload.prompt, figures["ttft"])
    yield _per_second(workload.prompt, figures["decode_mean"])
    yield _figure("peak_rss_mb", workload.window, figures["peak_rss"])


def _figure(metric: Metric, prompt: int, taken: Taken) -> Figure:
    interval = None if taken.low is None or taken.high is None else (taken.low, taken.high)
    return Figure(metric=metric, prompt=prompt, value=taken.value, ci95=interval, reason=taken.reason or "")


def _per_second(prompt: int, token_ms: Taken) -> Figure:
    """Decode speed: tokens over their time, hence from the mean."""
    interval = None if not token_ms.low or not token_ms.high else (1e3 / token_ms.high, 1e3 / token_ms.low)
    value = 1e3 / token_ms.value if token_ms.value else None
    return Figure(metric="decode_tps", prompt=prompt, value=value, ci95=interval, reason=token_ms.reason or "")
