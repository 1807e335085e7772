"""The measurement protocol: which repetitions are valid, and the figures computed from them.

Pure functions over what agents sent, so that a recorded measurement can be judged again.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence

from nas.core.errors import CandidateFailed, NasError
from nas.core.measurement import Figure, Measurement, Repetition, Sample
from nas.core.plan import Conditions, Pair, RawRun
from nas.core.space import MeasurementSettings
from nas.core.stats import p95_figure, repetition_figure
from nas.core.workload import Workload
from nas.store.calibrations import ReferenceRun

_ENERGY_STEP_SHARE = 0.05
"""Maximum step of an energy counter, as a share of a run's energy; above it the figure is null."""

_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
Parse = Callable[[RawRun], Sample]


def judge(
    pair: Pair, parse: Parse, calibration_ms: float | None, protocol: MeasurementSettings, attempt: int
) -> tuple[Repetition, CandidateFailed | None]:
    """Judges one repetition.

    Args:
        pair: the reference run and the candidate run after it.
        parse: the runtime's reading of a run.
        calibration_ms: the reference's time when the device was calibrated; None where no reference is run.
        protocol: the limits.
        attempt: which round this is, from 0.

    Returns:
        The repetition, and the candidate's failure if its run failed and the reference's did not.
    """
    conditions = pair.candidate.conditions
    reference, broken = read_run(pair.reference, parse) if pair.reference else (None, None)
    if broken is not None:
        return _refused(f"the reference run failed: {broken}", attempt, conditions), None
    sample, failed = read_run(pair.candidate, parse)
    if failed is not None:
        candidates_fault = failed if isinstance(failed, CandidateFailed) else None
        return _refused(f"the run failed: {failed}", attempt, conditions), candidates_fault
    drift = total_ms(reference) / calibration_ms - 1 if reference and calibration_ms else None
    runs = [run.conditions for run in (pair.reference, pair.candidate) if run is not None]
    reason = disturbance(runs, pair.foreign_cpu, protocol) or _objection(drift, protocol)
    return Repetition(
        valid=reason is None, reason=reason, attempt=attempt, sample=sample, reference=reference, drift=drift,
        conditions=conditions,
    ), None  # fmt: skip


def reference_runs(
    pairs: Sequence[Pair], repetitions: Sequence[Repetition], protocol: MeasurementSettings
) -> list[ReferenceRun]:
    """Returns the reference runs of pairs in which both runs worked, with their verdicts."""
    return [
        ReferenceRun(
            ratio=1 + rep.drift,
            temperature_c=pair.reference.conditions.temperature_c,
            calm=disturbance([pair.reference.conditions, pair.candidate.conditions], pair.foreign_cpu, protocol)
            is None,
        )
        for pair, rep in zip(pairs, repetitions, strict=True)
        if pair.reference is not None and rep.drift is not None
    ]


def measurement(
    repetitions: Sequence[Repetition], *, noisy: bool, artifact: str, runtime: str, build: str, patched: bool,
    device: str, workload: Workload, file_bytes: int, calibration_ms: float | None, wall_s: float,
) -> Measurement:  # fmt: skip
    """Builds the result of a measure stage; `noisy` keeps the refused repetitions in the figures."""
    counted = [rep for rep in repetitions if rep.valid or (noisy and rep.sample is not None)]
    drifts = [rep.drift for rep in counted if rep.drift is not None]
    return Measurement(
        artifact=artifact, runtime=runtime, build=build, patched=patched, device=device, workload=workload,
        figures=summarise(counted, workload, file_bytes), repetitions=list(repetitions), noisy=noisy,
        refused_share=sum(not rep.valid for rep in repetitions) / max(1, len(repetitions)),
        calibration_ms=calibration_ms, drift=statistics.median(drifts) if drifts else None, wall_s=wall_s,
    )  # fmt: skip


def summarise(repetitions: Sequence[Repetition], workload: Workload, file_bytes: int) -> dict[str, Figure]:
    """Computes the figures of the valid repetitions.

    Times are divided by (1 + drift): candidate / reference x the calibrated reference. Each repetition contributes its
    median; the interval is a t-interval on the logarithms of those.
    """
    kept = [(rep.sample, 1 + (rep.drift or 0.0)) for rep in repetitions if rep.sample is not None]
    ttft = [sample.ttft_ms / scale for sample, scale in kept]
    decode = [[ns / 1e6 / scale for ns in sample.decode_ns] for sample, scale in kept]
    p50 = [statistics.median(tokens) for tokens in decode]
    figures = {
        "ttft": repetition_figure(ttft, "ms"),
        "prefill_tps": repetition_figure([workload.prompt * 1e3 / ms for ms in ttft], "tok/s"),
        "decode_p50": repetition_figure(p50, "ms"),
        "decode_p95": p95_figure(decode, "ms"),
        "decode_mean": repetition_figure([statistics.fmean(tokens) for tokens in decode], "ms"),
        "latency": repetition_figure([a + workload.gen * b for a, b in zip(ttft, p50, strict=True)], "ms"),
        "load": repetition_figure([sample.load_ms for sample, _ in kept], "ms"),
        "energy_mj_per_token": energy_figure([rep for rep in repetitions if rep.sample is not None], workload.gen),
        "file_size": Figure(value=file_bytes / 1e6, n=1, unit="MB"),
    }
    for name in ("peak_rss_mb", "prefill_rss_mb", "decode_rss_mb"):
        read = [value for sample, _ in kept if (value := getattr(sample, name)) is not None]
        figures[name.removesuffix("_mb")] = repetition_figure(read, "MB", "the device does not report it")
    return figures


def energy_figure(repetitions: Sequence[Repetition], gen: int) -> Figure:
    """Computes the energy of a run per decoded token, in mJ; null with the reason if the counter is too coarse.

    The counter's true step is the greatest common divisor of its differences: a battery's gauge reports energy in units
    of 1 uWh, but many move by 10,000 of them at a time. A step has to be small relative to the smallest run.
    """
    missing = (rep.conditions.unread.get("energy", "not read") for rep in repetitions if rep.conditions.energy is None)
    used = [rep.conditions.energy for rep in repetitions if rep.conditions.energy is not None]
    reason = next(missing, "no valid repetition")
    if not used or len(used) < len(repetitions):
        return Figure(value=None, unit="mJ", reason=reason)
    mj = [each.joules * 1e3 / gen for each in used]
    steps = math.gcd(*(each.steps for each in used))
    if steps == 0:
        return Figure(value=None, unit="mJ", reason=f"{used[0].counter} did not move during the runs")
    resolution = max(mj) * steps / max(each.steps for each in used)
    if resolution > _ENERGY_STEP_SHARE * min(mj):
        return Figure(
            value=None, unit="mJ", n=len(used), resolution=resolution,
            reason=f"{used[0].counter} moves in steps of {resolution * gen / 1e3:.2g} J, and a run took "
            f"{min(mj) * gen / 1e3:.2g} J: a longer workload is needed to measure it within {_ENERGY_STEP_SHARE:.0%}",
        )  # fmt: skip
    return repetition_figure(mj, "mJ").model_copy(update={"resolution": resolution})


def read_run(run: RawRun, parse: Parse) -> tuple[Sample | None, NasError | None]:
    """Returns what a run measured, or how it failed; implausible reports count as failures."""
    try:
        sample = parse(run)
        _require_sense(sample)
    except NasError as error:
        return None, error
    return sample, None


def total_ms(sample: Sample) -> float:
    """Returns the timed work of one run, the prompt and all decoded tokens, in ms."""
    return sample.ttft_ms + sum(sample.decode_ns) / 1e6


def disturbance(runs: Sequence[Conditions], foreign_cpu: float | None, protocol: MeasurementSettings) -> str | None:
    """Returns what disturbed the device; None if nothing did.

    Args:
        runs: conditions of each process.
        foreign_cpu: share of other processes over all runs.
        protocol: the limits.
    """
    if any(run.throttled for run in runs):
        return "the device throttled"
    shares = [foreign_cpu, *(run.foreign_cpu for run in runs)]
    foreign = max((share for share in shares if share is not None), default=0.0)
    if foreign > protocol.foreign_cpu_limit:
        return f"other processes used {foreign:.2f} of a core (limit {protocol.foreign_cpu_limit:.2f})"
    return None


def commonest(reasons: Iterable[str]) -> str:
    """Returns the most frequent reason, with the numbers of its worst case."""
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        kinds.setdefault(_NUMBER.sub("", reason), []).append(reason)
    if not kinds:
        return "no reason given"
    alike = max(kinds, key=lambda kind: len(kinds[kind]))
    return max(kinds[alike], key=_magnitude)


def _objection(drift: float | None, protocol: MeasurementSettings) -> str | None:
    if drift is not None and abs(drift) > protocol.drift_limit:
        return f"the reference ran {drift:+.1%} off its calibration (limit {protocol.drift_limit:.0%})"
    return None


def _refused(reason: str, attempt: int, conditions: Conditions) -> Repetition:
    return Repetition(valid=False, reason=reason, attempt=attempt, sample=None, conditions=conditions)


def _require_sense(sample: Sample) -> None:
    sizes = (sample.peak_rss_mb, sample.prefill_rss_mb, sample.decode_rss_mb)
    figures = [sample.load_ms, sample.ttft_ms, *sample.decode_ns, *(size for size in sizes if size is not None)]
    if not sample.decode_ns or not all(0 < figure < math.inf for figure in figures):
        raise CandidateFailed("garbage_output", "report: no decoded token, or a time or size that is not above zero")


def _magnitude(reason: str) -> float:
    number = _NUMBER.search(reason)
    return abs(float(number[0])) if number else 0.0
