"""The measurement protocol: which repetitions count, and the figures computed from them.

Noise is not refused: a repetition does not count only if it means nothing, because a run failed or the device
throttled. Pure functions over what agents sent, so that a recorded measurement can be judged again.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence

from nas.core.errors import CandidateFailed, NasError
from nas.core.measurement import MEDIA_STEPS, ClockName, Figure, Measurement, ReferenceTimes, Repetition, Sample
from nas.core.plan import Conditions, Pair, RawRun
from nas.core.stats import repetition_figure
from nas.core.units import show_share
from nas.core.workload import Workload
from nas.infra.store.calibrations import ReferenceRun
from nas.measure.protocol.estimator import clock_of, rate, run_times, time_figures

PROTOCOL_VERSION = 7
"""Version of the measurement protocol (warm-up, timing, interleaving). Raise it when figures change their meaning."""

UNDISTURBED_CPU = 0.05
"""CPU share of other processes, in cores, up to which a run is shown as undisturbed. It decides nothing."""

_ENERGY_STEP_SHARE = 0.05
"""Maximum step of an energy counter, as a share of a run's energy; above it the figure is null."""

BYTES_PER_NUMBER = 2
"""Of a vector in an index: float16, see `nas.train.retrieval.index`."""

_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
THROTTLED = "the device throttled (heat, power or a CPU quota)"
Parse = Callable[[RawRun], Sample]


def judge(
    pair: Pair,
    parse: Parse,
    calibration: ReferenceTimes | None,
    attempt: int,
    threads: int = 1,
    *,
    encodes: bool = False,
) -> tuple[Repetition, CandidateFailed | None]:
    """Judges one repetition: the candidate's run, and the reference model in it or before it.

    Returns the repetition, and the candidate's failure if its run failed and the reference's did not. `attempt` is the
    number of the round; `calibration` is None where no reference is run. Of a candidate that also ran alone, energy is
    that run's. `encodes` is the workload's: nothing is decoded.
    """
    conditions = pair.candidate.conditions
    reference, broken = read_run(pair.reference, parse, encodes=encodes) if pair.reference else (None, None)
    if broken is not None:
        return _refused(f"the reference run failed: {broken}", attempt, conditions), None
    runs = [run for run in (pair.alone, pair.candidate) if run is not None]
    sample: Sample | None = None
    for run in runs:
        sample, failed = read_run(run, parse, encodes=encodes)
        if failed is not None:
            candidates_fault = failed if isinstance(failed, CandidateFailed) else None
            return _refused(f"the run failed: {failed}", attempt, conditions), candidates_fault
    if sample is not None and sample.reference is not None:
        sample, reference = sample.model_copy(update={"reference": None}), sample.reference
    if pair.alone is not None:
        energy = {"energy": pair.alone.conditions.energy, "unread": pair.alone.conditions.unread}
        conditions = conditions.model_copy(update=energy)
    drift = None
    if reference is not None and calibration is not None:
        drift = run_times(reference, clock_of([reference], threads)).run_ms / calibration.run_ms - 1
    throttled = any(run.conditions.throttled for run in pair.runs)
    return Repetition(
        valid=not throttled,
        reason=THROTTLED if throttled else None,
        attempt=attempt,
        sample=sample,
        reference=reference,
        drift=drift,
        foreign_cpu=foreign_cpu([run.conditions for run in pair.runs], pair.foreign_cpu),
        conditions=conditions,
    ), None


def reference_runs(pairs: Sequence[Pair], repetitions: Sequence[Repetition]) -> list[ReferenceRun]:
    """Returns the reference's times in repetitions that worked, and whether anything disturbed them."""
    return [
        ReferenceRun(
            ratio=1 + rep.drift,
            temperature_c=pair.runs[0].conditions.temperature_c,
            calm=undisturbed([run.conditions for run in pair.runs], pair.foreign_cpu),
            battery_percent=pair.runs[0].conditions.battery_percent,
        )
        for pair, rep in zip(pairs, repetitions, strict=True)
        if rep.drift is not None
    ]


def measurement(
    repetitions: Sequence[Repetition],
    *,
    artifact: str,
    runtime: str,
    build: str,
    patched: bool,
    device: str,
    workload: Workload,
    file_bytes: int,
    calibration: ReferenceTimes | None,
    wall_s: float,
    vectors: int = 0,
) -> Measurement:
    """Builds the result of a measure stage; `vectors` is the width of the artifact's token vectors."""
    counted = [rep for rep in repetitions if rep.valid and rep.sample is not None]
    drifts = [rep.drift for rep in counted if rep.drift is not None]
    shares = [rep.foreign_cpu for rep in counted if rep.foreign_cpu is not None]
    samples = [rep.sample for rep in counted if rep.sample is not None]
    return Measurement(
        artifact=artifact,
        runtime=runtime,
        build=build,
        patched=patched,
        device=device,
        workload=workload,
        figures=summarise(counted, workload, file_bytes, calibration, vectors),
        repetitions=list(repetitions),
        protocol=PROTOCOL_VERSION,
        clock=clock_of(samples, workload.threads),
        refused_share=sum(not rep.valid for rep in repetitions) / max(1, len(repetitions)),
        foreign_cpu=statistics.median(shares) if shares else None,
        calibration=calibration,
        calibration_ms=calibration.run_ms if calibration else None,
        drift=statistics.median(drifts) if drifts else None,
        wall_s=wall_s,
    )


def summarise(
    repetitions: Sequence[Repetition],
    workload: Workload,
    file_bytes: int,
    calibration: ReferenceTimes | None = None,
    vectors: int = 0,
) -> dict[str, Figure]:
    """Computes the figures of the repetitions that count.

    Times are estimates of a device that nothing disturbs (`nas.measure.protocol.estimator`); load, memory and energy
    are medians as experienced.
    """
    samples = [rep.sample for rep in repetitions if rep.sample is not None]
    beside = [rep.reference for rep in repetitions if rep.sample is not None and rep.reference is not None]
    paired = beside if len(beside) == len(samples) else []
    figures = time_figures(samples, paired, calibration, workload.threads, workload.gen)
    figures |= _encoding_figures(figures["encoding"], workload, vectors) if workload.encodes else {}
    figures |= media_figures(samples, figures["ttft"], workload)
    reading, tokens = figures["encoding" if workload.encodes else "ttft"], float(workload.prompt)
    media_tokens = [figures[name] for name in ("image_tokens", "sound_tokens") if name in figures]
    if media_tokens and (figure := media_tokens[0]).value is not None:
        reading, tokens = figures["prompt_reading"], tokens + figure.value
    figures |= {
        "prefill_tps": rate(reading, tokens, "tok/s"),
        "load": repetition_figure([sample.load_ms for sample in samples], "ms"),
        "energy_mj_per_token": energy_figure([rep for rep in repetitions if rep.sample is not None], workload.gen),
        "file_size": Figure(value=file_bytes / 1e6, n=1, unit="MB"),
    }
    on_gpu = [sample.gpu.memory_mb for sample in samples if sample.gpu is not None]
    figures["gpu_memory"] = repetition_figure(on_gpu, "MB", "the processor computes: no memory of a GPU is used")
    for name in ("peak_rss_mb", "prefill_rss_mb", "decode_rss_mb"):
        read = [value for sample in samples if (value := getattr(sample, name)) is not None]
        figures[name.removesuffix("_mb")] = repetition_figure(read, "MB", "the device does not report it")
    return figures


def _encoding_figures(encoding: Figure, workload: Workload, vectors: int) -> dict[str, Figure]:
    """Returns what follows from the time in which a document of the workload's length is encoded."""
    stored = Figure(value=None, unit="B", reason="the model gives no vectors to tokens: its layout has no `vectors=`")
    if vectors:
        stored = Figure(value=float(BYTES_PER_NUMBER * vectors * workload.prompt), n=1, unit="B")
    return {"documents_per_s": rate(encoding, 1, "docs/s"), "index_bytes": stored}


def media_figures(samples: Sequence[Sample], ttft: Figure, workload: Workload) -> dict[str, Figure]:
    """Returns the figures of a request's images or sounds.

    Times are shares of the passes over the prompt that they are parts of, on the clock of TTFT, times TTFT: what
    slowed a pass down slowed its parts down alike.
    """
    if workload.media is None:
        return {}
    kind = workload.media.removesuffix("s")
    names = (*MEDIA_STEPS[workload.media], f"{kind}_encoding", "prompt_reading")
    media_uses = [media for sample in samples if (media := sample.media) is not None]
    if len(media_uses) < len(samples) or not samples or ttft.value is None:
        none = "no valid repetition" if not samples else "the model reads text alone: its layout has no `tower=`"
        missing = dict.fromkeys(names, Figure(value=None, unit="ms", reason=none))
        others = (f"{kind}_tokens", *(["sound_factor"] if kind == "sound" else []))
        return missing | dict.fromkeys(others, Figure(value=None, unit="", reason=none))
    clock = clock_of(samples, workload.threads)
    passes: list[tuple[float, ...]] = []
    for sample, media in zip(samples, media_uses, strict=True):
        steps = media.cpu_ns if clock == "cpu" else media.wall_ns
        for parts, prompt in zip(steps, run_times(sample, clock).prompts, strict=False):
            steps_of_pass = [min(1.0, part / (1e6 * prompt)) for part in parts]
            encoding = min(1.0, sum(steps_of_pass))
            passes.append((*steps_of_pass, encoding, 1 - encoding))
    shares = {name: statistics.median(column) for name, column in zip(names, zip(*passes, strict=True), strict=True)}
    figures = {name: _share(ttft, share) for name, share in shares.items()}
    figures[f"{kind}_tokens"] = Figure(value=float(media_uses[0].tokens), n=1, unit="")
    if kind == "sound":
        factor = _share(figures["sound_encoding"], 1 / (1000 * workload.count * workload.seconds))
        figures["sound_factor"] = factor.model_copy(update={"unit": ""})
    return figures


def _share(whole: Figure, share: float) -> Figure:
    ends = ("value", "low", "high", "typical", "minimum", "maximum")
    values = {name: getattr(whole, name) for name in ends}
    return whole.model_copy(update={name: value and value * share for name, value in values.items()})


def energy_figure(repetitions: Sequence[Repetition], gen: int) -> Figure:
    """Computes the energy of a run per decoded token, in mJ; null with the reason if the counter is too coarse.

    The counter's true step is the greatest common divisor of its differences: a battery's gauge reports energy in units
    of 1 uWh, but many move by 10,000 of them at a time. A step has to be small relative to the smallest run.
    """
    missing = (rep.conditions.unread.get("energy", "not read") for rep in repetitions if rep.conditions.energy is None)
    if not gen:
        return Figure(value=None, unit="mJ", reason="the workload decodes nothing")
    used = [rep.conditions.energy for rep in repetitions if rep.conditions.energy is not None]
    reason = next(missing, "no valid repetition")
    if not used or len(used) < len(repetitions):
        return Figure(value=None, unit="mJ", reason=reason)
    mj = [energy.joules * 1e3 / gen for energy in used]
    steps = math.gcd(*(energy.steps for energy in used))
    if steps == 0:
        return Figure(value=None, unit="mJ", reason=f"{used[0].counter} did not move during the runs")
    resolution = max(mj) * steps / max(energy.steps for energy in used)
    if resolution > _ENERGY_STEP_SHARE * min(mj):
        return Figure(
            value=None,
            unit="mJ",
            n=len(used),
            resolution=resolution,
            reason=f"{used[0].counter} moves in steps of {resolution * gen / 1e3:.2g} J, and a run took "
            f"{min(mj) * gen / 1e3:.2g} J: a longer workload is needed to measure it within "
            f"{show_share(_ENERGY_STEP_SHARE)}",
        )
    return repetition_figure(mj, "mJ").model_copy(update={"resolution": resolution})


def read_run(run: RawRun, parse: Parse, *, encodes: bool | None = None) -> tuple[Sample | None, NasError | None]:
    """Returns what a run measured, or how it failed; implausible reports count as failures.

    `encodes` is the workload's, whose runs decode nothing; None: either will do.
    """
    try:
        sample = parse(run)
        for part in (sample, sample.reference):
            if part is not None:
                _require_sense(part, encodes)
    except NasError as error:
        return None, error
    return sample, None


def foreign_cpu(runs: Sequence[Conditions], over_all: float | None) -> float | None:
    """Returns the CPU share of other processes, in cores: over all runs if it was read, else the largest of one."""
    if over_all is not None:
        return over_all
    return max((run.foreign_cpu for run in runs if run.foreign_cpu is not None), default=None)


def undisturbed(runs: Sequence[Conditions], over_all: float | None) -> bool:
    """Returns whether the device did not throttle and other processes used next to nothing, as far as it tells."""
    return not any(run.throttled for run in runs) and (foreign_cpu(runs, over_all) or 0.0) <= UNDISTURBED_CPU


def commonest(reasons: Iterable[str]) -> str:
    """Returns the most frequent reason, with the numbers of its worst case."""
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        kinds.setdefault(_NUMBER.sub("", reason), []).append(reason)
    if not kinds:
        return "no reason given"
    alike = max(kinds, key=lambda kind: len(kinds[kind]))
    return max(kinds[alike], key=_magnitude)


def _refused(reason: str, attempt: int, conditions: Conditions) -> Repetition:
    return Repetition(valid=False, reason=reason, attempt=attempt, sample=None, conditions=conditions)


def _require_sense(sample: Sample, encodes: bool | None) -> None:
    sizes = (sample.peak_rss_mb, sample.prefill_rss_mb, sample.decode_rss_mb)
    clocks: tuple[ClockName, ...] = ("wall", clock_of([sample], 1))
    passes = (time for clock in clocks for time in run_times(sample, clock).prompts)
    figures = [
        sample.load_ms,
        sample.ttft_ms,
        *passes,
        *sample.decode_ns,
        *(size for size in sizes if size is not None),
    ]
    if bool(sample.decode_ns) is encodes or not all(0 < figure < math.inf for figure in figures):
        what = "decoded tokens" if encodes else "no decoded token"
        raise CandidateFailed("garbage_output", f"report: {what}, or a time or size that is not above zero")


def _magnitude(reason: str) -> float:
    number = _NUMBER.search(reason)
    return abs(float(number[0])) if number else 0.0
