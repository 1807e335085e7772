"""Metrics of candidates, for budgets and objectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nas.core.errors import UnknownName


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a candidate.

    Args:
        name: as in YAML and JSON.
        unit: of its value.
        direction: which way is better.
        transform: its coordinate in the hypervolume: log of the ratio to the published reference, or the value itself.
        source: a device measurement, the artifact, or the proxy.
        doc: one line.
        needs: a field of `Device` without which a device cannot measure it.
    """

    name: str
    unit: str
    direction: Literal["min", "max"]
    transform: Literal["log", "linear"]
    source: Literal["device", "artifact", "proxy"]
    doc: str
    needs: Literal["energy_counter"] | None = None


RECALL_METRIC = "quality.recall"
RECALL = ("task/automata", "task/selcopy", "task/induction", "task/mqar", "task/noisyrecall", "lm/recall")
"""Groups of recall begin with one of these."""

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("quality", "", "max", "linear", "proxy", "mean over evaluation groups of score / published reference's"),
        Metric(RECALL_METRIC, "", "max", "linear", "proxy", "the same mean, over the groups of recall alone"),
        Metric("latency", "ms", "min", "log", "device", "TTFT + gen x decode p50"),
        Metric("ttft", "ms", "min", "log", "device", "time to first token"),
        Metric("prefill_tps", "tok/s", "max", "log", "device", "prompt tokens per second"),
        Metric("decode_p50", "ms", "min", "log", "device", "median time per decoded token"),
        Metric("decode_p95", "ms", "min", "log", "device", "95th percentile of the time per decoded token"),
        Metric("peak_rss", "MB", "min", "log", "device", "peak resident memory of the runner, load included"),
        Metric("prefill_rss", "MB", "min", "log", "device", "peak resident memory during the prompt"),
        Metric("decode_rss", "MB", "min", "log", "device", "peak resident memory while decoding"),
        Metric(
            "energy_mj_per_token",
            "mJ",
            "min",
            "log",
            "device",
            "energy of a whole run, loading and prompt included, per decoded token; needs an energy counter",
            needs="energy_counter",
        ),
        Metric("file_size", "MB", "min", "log", "artifact", "bytes of the exported file"),
    )
}


def metric(name: str) -> Metric:
    """Returns the metric called `name`.

    Raises:
        UnknownName: there is none; the message suggests the nearest.
    """
    if name not in METRICS:
        raise UnknownName("metric", name, METRICS)
    return METRICS[name]
