"""What stands after each repetition, as the record of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nas.core.cores import show_cores
from nas.core.family import ComparedModel, Comparison, Figure, Measured, Metric
from nas.core.measurement import Figure as Statistic
from nas.core.measurement import Measurement
from nas.family.contender import Contender
from nas.family.contest import Standing, Standings, Task
from nas.family.ratios import ratios
from nas.runtimes.llama_cpp.stock_model import QUANTISATION
from nas.service.stage_work import Bench

_SOURCES: dict[Metric, str] = {
    "prefill_tps": "prefill_tps", "decode_tps": "decode_mean", "ttft_ms": "ttft", "peak_rss_mb": "peak_rss",
}  # fmt: skip
"""Metric -> figure of a measurement. Tokens per second of decoding are tokens over time, hence the mean."""

_PENDING = "not measured yet"


@dataclass(frozen=True)
class Setting:
    """What a comparison is said of.

    Args:
        family: name; None: of none.
        bench: device and runtime.
        threads: of computation.
        flash_attn: whether attention is fused, where a graph can.
        tasks: workloads.
        made: when, in ISO 8601.
    """

    family: str | None
    bench: Bench
    threads: int
    flash_attn: bool
    tasks: tuple[Task, ...]
    made: str


def comparison(setting: Setting, contenders: Sequence[Contender], standings: Standings) -> Comparison:
    """The record."""
    models = tuple(_model(setting, each, standings) for each in contenders)
    return Comparison(
        family=setting.family,
        device=setting.bench.device.id,
        conditions=_conditions(setting, standings),
        made=setting.made,
        models=models,
        ratios=tuple(ratios(models)),
        notes=tuple(_notes(setting, contenders)),
    )


def _model(setting: Setting, contender: Contender, standings: Standings) -> ComparedModel:
    figures: list[Figure] = []
    noisy = False
    for task in setting.tasks:
        standing = standings[contender.name, task.at]
        summary = standing.summary()
        noisy = noisy or bool(summary and summary.noisy)
        figures += (_figure(metric, task.at, summary, standing) for metric in task.metrics)
    return ComparedModel(
        name=contender.name,
        member=contender.member,
        parameters=contender.parameters,
        architecture=contender.architecture,
        source=contender.source,
        measured=Measured(
            device=setting.bench.device.id,
            runtime=setting.bench.runtime.name,
            quantisation=QUANTISATION,
            threads=setting.threads,
            figures=tuple(figures),
            searched=contender.searched,
            noisy=noisy,
        ),
    )


def _figure(metric: Metric, at: int, summary: Measurement | None, standing: Standing) -> Figure:
    if standing.failed or summary is None:
        return Figure(metric=metric, prompt=at, value=None, ci95=None, reason=standing.failed or _PENDING)
    statistic = summary.figures[_SOURCES[metric]]
    value, low, high = _per_second(statistic) if metric == "decode_tps" else _values(statistic)
    ends = None if low is None or high is None else (low, high)
    return Figure(metric=metric, prompt=at, value=value, ci95=ends, reason=statistic.reason or "")


def _values(statistic: Statistic) -> tuple[float | None, float | None, float | None]:
    return statistic.value, statistic.low, statistic.high


def _per_second(statistic: Statistic) -> tuple[float | None, float | None, float | None]:
    """Tokens per second from ms per token; the ends of the interval change places."""
    value, low, high = (1e3 / end if end else None for end in (statistic.value, statistic.high, statistic.low))
    return value, low, high


def _conditions(setting: Setting, standings: Standings) -> dict[str, str]:
    device, runner = setting.bench.device, setting.bench.runner
    affinity = device.pinned(setting.tasks[0].workload).affinity
    return {
        "model": device.model,
        "cpu": device.cpu,
        "memory": f"{device.memory_mb} MB",
        "os": device.os,
        "threads": str(setting.threads),
        "cores": show_cores(affinity) if affinity else "not pinned",
        "runtime": f"{runner.runtime}, {'patched' if runner.patched else 'stock'} build {runner.build[:12]}",
        "instructions": _instructions(standings),
        "quantisation": QUANTISATION,
        "flash attention": "on" if setting.flash_attn else "off",
        "key-value cache": setting.tasks[0].workload.kv_type,
        "repetitions": "; ".join(f"{task.repetitions} at {task.at} tokens" for task in setting.tasks),
        "calibration": f"{setting.bench.reference.calibration_ms:.1f} ms of the reference run",
    }


def _instructions(standings: Standings) -> str:
    """What the runtime says that it uses of the processor."""
    for standing in standings.values():
        for taken in standing.taken:
            for rep in taken.repetitions:
                if rep.sample and (told := rep.sample.info.get("system_info")):
                    uses = [part.split("=")[0].strip() for part in str(told).split("|") if part.strip().endswith("= 1")]
                    return ", ".join(use.removeprefix("CPU :").strip() for use in uses)
    return "not told"


def _notes(setting: Setting, contenders: Sequence[Contender]) -> Iterator[str]:
    """What explains differences from the report."""
    yield (
        f"Threads: {setting.threads} here; the report does not tell its own. With more of them prefill gains more than "
        "decoding, which memory limits sooner."
    )
    yield (
        "Instructions: those above here; the report's phone and laptop have others. Matrix products profit from them "
        "more than attention over a long cache and state-space scans do, so ratios between kinds of models move."
    )
    attention = "on" if setting.flash_attn else "off"
    yield (
        f"Flash attention is {attention} here and not told in the report; llama.cpp's versions differ, too. It changes "
        "models with much attention most, at 4K more than at 1K."
    )
    unfused = [each.name for each in contenders if not each.flash_attn]
    if unfused and setting.flash_attn:
        yield f"Without flash attention, which its stock graph does not stand: {', '.join(unfused)}."
    yield "Sliding windows cache the window and one batch here (llama.cpp's own default is the whole context)."
    yield (
        "Weights of reference models are random, of the types that llama.cpp's quantiser gives: as far as was seen, "
        "speed does not depend on values. A trained router may favour some experts more than a random one does."
    )
    yield "Decoding is 100 tokens over their time; times are corrected by the reference run beside each repetition."
    if any(each.member and not each.searched for each in contenders):
        yield "The family's search did not use this device."
