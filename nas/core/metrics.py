"""Metrics of candidates and members, one row each: budgets, objectives and tables take label and unit from here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from nas.core.errors import UnknownName
from nas.core.measurement import Figure
from nas.core.tower import Media


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a candidate.

    Args:
        name: as in YAML and JSON.
        label: as in tables for people, without the unit.
        unit: of its value.
        doc: one line.
        direction: which way is better.
        transform: its coordinate in the hypervolume: log of the ratio to the published reference, or the value itself.
        source: a device measurement, the artifact, or the proxy.
        needs: a field of `Device` without which a device cannot measure it.
        inverse_of: figure of a measurement in milliseconds that it is the inverse of, per second. Budgets and
            objectives name that figure's metrics instead.
        recorded: whether it is in the records of families and in comparisons with published models.
        compared: whether pages that compare trials show it.
        of_vectors: whether it is of workloads that encode a text (`Workload.encodes`), which have it in place of those
            of prompts and decoded tokens.
        of_media: whether it is of workloads with images, or with sounds, alone.
        counted: whether it is counted, not measured: it has no noise.

    Example:
        A new metric of devices is one row of `METRICS`, beside the figure of that name in measurements:

        >>> Metric("load", "loading", "ms", "time until the model is loaded").title
        'loading, ms'
    """

    name: str
    label: str
    unit: str
    doc: str
    _: KW_ONLY
    direction: Literal["min", "max"] = "min"
    transform: Literal["log", "linear"] = "log"
    source: Literal["device", "artifact", "proxy"] = "device"
    needs: Literal["energy_counter"] | None = None
    inverse_of: str | None = None
    recorded: bool = False
    compared: bool = False
    of_vectors: bool = False
    of_media: Media | None = None
    counted: bool = False

    @property
    def title(self) -> str:
        """Label and unit, such as 'peak memory, MB'."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    def figure(self, figures: dict[str, Figure]) -> Figure:
        """Returns the figure of a measurement, converted where the metric is another figure's inverse.

        Raises:
            KeyError: the measurement has none.
        """
        if self.inverse_of is None:
            return figures[self.name]
        figure = figures[self.inverse_of]
        value, low, high = (1e3 / number if number else None for number in (figure.value, figure.high, figure.low))
        return figure.model_copy(update={"value": value, "low": low, "high": high, "unit": self.unit})


RECALL_METRIC = "quality.recall"
RECALL = (
    "task/automata",
    "task/selcopy",
    "task/induction",
    "task/mqar",
    "task/recall",
    "task/noisyrecall",
    "lm/recall",
)
"""Groups of recall begin with one of these."""

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "quality",
            "quality",
            "",
            "mean over evaluation groups of score / published reference's",
            direction="max",
            transform="linear",
            source="proxy",
        ),
        Metric(
            RECALL_METRIC,
            "recall",
            "",
            "the same mean, over the groups of recall alone",
            direction="max",
            transform="linear",
            source="proxy",
        ),
        Metric("latency", "latency", "ms", "TTFT + gen x `decode_p50`", compared=True),
        Metric("prefill_tps", "prefill", "tok/s", "prompt tokens per second", direction="max", recorded=True),
        Metric(
            "decode_tps",
            "decode",
            "tok/s",
            "decoded tokens per second, over all tokens",
            direction="max",
            inverse_of="decode_mean",
            recorded=True,
        ),
        Metric("ttft", "TTFT", "ms", "time to first token", recorded=True, compared=True),
        Metric(
            "decode_p50",
            "time per token",
            "ms",
            "median time per decoded token when nothing disturbs the device; the median as experienced is its "
            "`typical`",
            compared=True,
        ),
        Metric(
            "decode_p95",
            "95th percentile",
            "ms",
            "95th percentile of the time per decoded token when nothing disturbs the device",
            compared=True,
        ),
        Metric(
            "peak_rss",
            "peak memory",
            "MB",
            "peak resident memory of the runner, load included",
            recorded=True,
            compared=True,
        ),
        Metric("prefill_rss", "memory, prompt", "MB", "peak resident memory during the prompt"),
        Metric("decode_rss", "memory, decoding", "MB", "peak resident memory while decoding"),
        Metric(
            "energy_mj_per_token",
            "energy per token",
            "mJ",
            "energy of a whole run, loading and prompt included, per decoded token; needs an energy counter",
            needs="energy_counter",
            compared=True,
        ),
        Metric(
            "encoding",
            "encoding",
            "ms",
            "time until all tokens of a text have their vectors",
            compared=True,
            of_vectors=True,
        ),
        Metric(
            "documents_per_s",
            "documents",
            "docs/s",
            "documents of the workload's length that are encoded in a second, one at a time",
            direction="max",
            compared=True,
            of_vectors=True,
        ),
        Metric(
            "index_bytes",
            "index",
            "B",
            "bytes of an exact index for each document of the workload's length, two for each number of a vector",
            source="artifact",
            compared=True,
            of_vectors=True,
            counted=True,
        ),
        Metric(
            "image_encoding",
            "images",
            "ms",
            "part of TTFT until all images of a request have their tokens: scaling, encoder and connector",
            compared=True,
            of_media="images",
        ),
        Metric(
            "image_tokens",
            "image tokens",
            "",
            "tokens that the language model sees of all images of a request",
            compared=True,
            of_media="images",
            counted=True,
        ),
        Metric(
            "sound_encoding",
            "sounds",
            "ms",
            "part of TTFT until all sounds of a request have their tokens: features, encoder and connector",
            compared=True,
            of_media="sounds",
        ),
        Metric(
            "sound_tokens",
            "sound tokens",
            "",
            "tokens that the language model sees of all sounds of a request",
            compared=True,
            of_media="sounds",
            counted=True,
        ),
        Metric(
            "sound_factor",
            "real-time factor",
            "",
            "`sound_encoding` divided by the seconds of all sounds of a request",
            compared=True,
            of_media="sounds",
        ),
        Metric("file_size", "file", "MB", "bytes of the exported file", source="artifact", compared=True, counted=True),
    )
}


def metric(name: str) -> Metric:
    """Returns the metric called `name`, which budgets and objectives can name; raises `UnknownName`."""
    if name not in searchable():
        raise UnknownName("metric", name, searchable())
    return METRICS[name]


def measured_by(name: str, *, encodes: bool, media: Media | None) -> bool:
    """Returns whether workloads that encode a text, have images or sounds, or neither have a metric."""
    row = METRICS[name]
    return (row.of_vectors == encodes or name in _OF_BOTH) and row.of_media in (None, media)


_OF_BOTH = ("prefill_tps", "peak_rss", "prefill_rss", "file_size")


def searchable() -> list[str]:
    """Returns the names that budgets and objectives can use."""
    return [metric.name for metric in METRICS.values() if metric.inverse_of is None]


def recorded() -> Iterator[Metric]:
    """Yields the metrics that are in the records of families."""
    return (metric for metric in METRICS.values() if metric.recorded)
