"""`nas bench`: measures one layout or model file on one device, by the same protocol as a study."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.errors import CandidateFailed, InvalidInput, NasError, Unsupported
from nas.core.layout import Layout
from nas.core.measurement import TTFT_PARTS, Figure, Measurement, Repetition, Sample
from nas.core.metrics import METRICS
from nas.core.plan import InputFile, Round
from nas.core.profile import summary
from nas.core.progress import Log
from nas.core.space import MeasurementSettings, RuntimeSpace
from nas.core.workload import Workload
from nas.infra.store import artifacts
from nas.infra.store.store import Store
from nas.measure.farm.farm import Farm, open_farm
from nas.measure.protocol.calibration import DEPLOY_SEED, Calibrator, MeasurementTarget, known_runtime
from nas.measure.protocol.estimator import rate
from nas.measure.protocol.reference import export_to_store
from nas.measure.protocol.rounds import Jobs, Subject, measure
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Artifact, FileInspector, Profiler, RandomWeights, Runtime

Json = dict[str, Any]

_PROFILE_DEADLINES = 8.0
"""A profiler runs the request several times, half of them more slowly: its deadline is that of so many repetitions."""


BUSY = 0.5
"""Cores of other processes beyond which the speed that was seen is shown first."""

FIELDS = ("typical", "log_sd", "shared_log_sd", "n", "unit", "reason")
"""Of a metric's figure in reports, besides its value."""


@dataclass(frozen=True)
class BenchOptions:
    """Options of `nas bench`.

    Args:
        subject: a layout, or a model file of the runtime.
        runtime: its name.
        quantisation: None: the runtime's first.
        device: as in spaces; "local" is this machine.
        workload: what is run.
        repetitions: that must count.
        protocol: deadline and attempts.
        db: URL, or None for the default database.
        profile: also time layers and operators, in one run of their own that is no part of the figures.
        projector: file of the tower beside a model file.
        image_tokens: of an image at most, with a `projector`.
    """

    subject: Layout | Path
    runtime: str
    quantisation: str | None
    device: str
    workload: Workload
    repetitions: int
    protocol: MeasurementSettings = field(default_factory=MeasurementSettings)
    db: str | None = None
    profile: bool = False
    projector: Path | None = None
    image_tokens: int = 256


def bench_all(benches: Sequence[BenchOptions], log: Log) -> Iterator[Json]:
    """Yields the report of each bench of one database; raises the first `NasError` of `bench_each`."""
    for report in bench_each(benches, log):
        if isinstance(report, NasError):
            raise report
        yield report


def bench_each(benches: Sequence[BenchOptions], log: Log) -> Iterator[Json | NasError]:
    """Yields the report of each bench as `bench_all` does, or the error of one that fails, and continues with the next.

    Raises:
        NasError: a runtime does not carry its layout, a file is none of its runtime, or nothing can be measured here.
    """
    specs = [_runtime_space(options) for options in benches]
    for options, spec in zip(benches, specs, strict=True):
        if isinstance(options.subject, Layout):
            runtime = known_runtime(spec)
            if not (support := runtime.supports(options.subject)):
                raise Unsupported(f"{runtime.name} does not carry this layout: {'; '.join(support.reasons)}")
        tower = options.subject.tower if isinstance(options.subject, Layout) else options.projector
        if options.workload.media and tower is None:
            raise InvalidInput("the model has no tower: a layout names one as `tower=`, a file goes with --mmproj")
        if options.profile:
            if options.workload.encodes:
                raise InvalidInput("a profile needs decoded tokens: give --gen 1 or more", where="--profile")
            _profiler(known_runtime(spec))
    store = Store.open(benches[0].db)
    try:
        with open_farm(store) as farm:
            for options, spec in zip(benches, specs, strict=True):
                try:
                    result: Json | NasError = asyncio.run(_bench(options, spec, farm, log))
                except (CandidateFailed, Unsupported) as error:
                    result = error
                yield result
    finally:
        store.close()


async def _bench(options: BenchOptions, spec: RuntimeSpace, farm: Farm, log: Log) -> Json:
    jobs = farm.jobs(None)
    scratch = paths.home() / "work"
    workloads = {"bench": options.workload}
    calibrator = Calibrator(farm, jobs, options.protocol, scratch, log, workloads, weights_of(options.subject))
    target = await calibrator.target(options.device, spec, None)
    start = time.monotonic()
    artifact = _artifact(options, spec, target.runtime, farm.store, scratch)
    exported = time.monotonic() - start
    requested = options.workload
    what = f"{requested.prompt} tokens in, {requested.gen} out, {requested.threads} thread(s)"
    workload = target.device.pinned(options.workload)
    subject = Subject(artifact, target.runtime, target.runner, target.device, workload)
    # First, so that a profiler that cannot be made or run costs no measurement.
    profile = {"profile": await _profile(options, subject, farm, jobs, log)} if options.profile else {}
    log(f"measuring {options.repetitions} repetitions on {target.device.id}: {what}")
    # A key of its own: earlier results are never reused.
    key = content_hash({"bench": artifact.sha256, "at": time.time()})
    reference = target.references[workload]
    measurement = await measure(subject, reference, jobs, key, None, options.repetitions, options.protocol)
    seconds = {"export": exported, "measure": time.monotonic() - start - exported}
    return {**_report(options, target, artifact, measurement, seconds), **profile}


def weights_of(subject: Layout | Path) -> int:
    """Returns about how many weights a token passes through: of a file, as many as its bytes hold in 4.5 bits each."""
    if isinstance(subject, Layout):
        return subject.params.active
    return max(1, subject.stat().st_size * 2 * 8 // 9)


async def _profile(options: BenchOptions, subject: Subject, farm: Farm, jobs: Jobs, log: Log) -> Json:
    """Runs the profiler once on the device; what it reports is stored with the job alone."""
    runtime, device = _profiler(subject.runtime), subject.device
    layout = options.subject if isinstance(options.subject, Layout) else None
    runner = runtime.profiler(subject.runner, log)
    farm.admit(subject.runtime, runner)
    deadline_s = _PROFILE_DEADLINES * options.protocol.deadline_s
    plan = subject.runtime.plan(subject.artifact, runner, subject.workload, deadline_s)
    without = f", without its {subject.workload.media}" if subject.workload.media else ""
    log(f"profiling on {device.id}: one run, each operator timed by itself{without}")
    key = content_hash({"profile": subject.artifact.sha256, "at": time.time()})
    result = await jobs.run(key, 0, device.id, Round(candidate=plan, repetitions=1))
    (pair,) = result.pairs
    profile = runtime.read_profile(pair.candidate, layout)
    if (profile.prompt, profile.gen) != (subject.workload.prompt, subject.workload.gen):
        raise CandidateFailed("garbage_output", "the profile is of another request")
    return {**summary(profile, layout), "foreign_cpu": pair.foreign_cpu}


def _profiler(runtime: Runtime) -> Profiler:
    if not isinstance(runtime, Profiler):
        raise Unsupported(f"{runtime.name} has no profiler: its runner does not time layers", where="--profile")
    return runtime


def _runtime_space(options: BenchOptions) -> RuntimeSpace:
    runtime = RUNTIMES[options.runtime]
    named = options.subject.quantisation if isinstance(options.subject, Layout) else ""
    quantisation = options.quantisation or named or runtime.quantisations[0]
    patched = _needs_patched(runtime, options.subject)
    return RuntimeSpace(name=options.runtime, quantisation=quantisation, build="any" if patched else "stock")


def _needs_patched(runtime: Runtime, subject: Layout | Path) -> bool:
    if isinstance(subject, Layout):
        return runtime.supports(subject).verdict == "patched"
    if not subject.is_file():
        raise InvalidInput(f"{subject} is neither a layout nor a file")
    return isinstance(runtime, FileInspector) and runtime.needs_patched(subject)


def _artifact(options: BenchOptions, spec: RuntimeSpace, runtime: Runtime, store: Store, scratch: Path) -> Artifact:
    if isinstance(options.subject, Path):
        return _from_file(options, options.subject, spec, store)
    return export_to_store(
        store, scratch, runtime, options.subject.architecture, spec.quantisation, RandomWeights(DEPLOY_SEED)
    )


def _from_file(options: BenchOptions, path: Path, spec: RuntimeSpace, store: Store) -> Artifact:
    stored = artifacts.put_file(store, path)
    tower = {}
    if options.projector is not None:
        beside = artifacts.put_file(store, options.projector)
        file = InputFile(sha256=beside.sha256, size=beside.size)
        tower = {"projector": file, "image_tokens": options.image_tokens}
    return Artifact(
        **tower,
        sha256=stored.sha256,
        size=stored.size,
        runtime=spec.name,
        quantisation=spec.quantisation,
        layout_id="",
        arch="",
        patched=spec.build == "any",
        weights=f"file:{path.name}",
    )


def _report(
    options: BenchOptions, target: MeasurementTarget, artifact: Artifact, measurement: Measurement, seconds: Json
) -> Json:
    figures = measurement.figures
    layout = options.subject if isinstance(options.subject, Layout) else None
    named = {"layout_id": layout.id, "layout": layout.format()} if layout else {"file": str(options.subject)}
    runs = [rep.sample for rep in measurement.repetitions if rep.valid and rep.sample]
    prompt = measurement.workload.prompt
    reading = [_reading(run, prompt) for run in runs]
    tokens = sum(len(rep.sample.decode_ns) for rep in measurement.repetitions if rep.valid and rep.sample)
    return {
        **named,
        "artifact": artifact.sha256,
        "runtime": {"name": measurement.runtime, "build": measurement.build, "patched": measurement.patched},
        "device": {"id": target.device.id, "model": target.device.model, "cpu": target.device.cpu},
        "workload": measurement.workload.key(),
        "ttft_ms": {
            **figures["ttft"].report("typical", "n"),
            "median": figures["ttft"].typical,
            "min": figures["ttft"].minimum,
            "max": figures["ttft"].maximum,
        },
        "prefill_tps": figures["prefill_tps"].value,
        "tokens_per_s": {
            "prefill": _rate(figures["prefill_tps"], [tokens * 1e3 / ms for tokens, ms in reading]),
            "decode": _rate(
                rate(figures["decode_mean"], 1, "tokens/s"),
                [len(run.decode_ns) * 1e9 / sum(run.decode_ns) for run in runs if run.decode_ns],
            ),
        },
        "decode_ms": {
            "p50": figures["decode_p50"].value,
            "typical": figures["decode_p50"].typical,
            "p95": figures["decode_p95"].value,
            "p95_ci95": [figures["decode_p95"].low, figures["decode_p95"].high],
            "p95_reason": figures["decode_p95"].reason,
            "mean": figures["decode_mean"].value,
            "ci95": [figures["decode_p50"].low, figures["decode_p50"].high],
            "tokens": tokens,
        },
        "peak_rss_mb": {
            "total": figures["peak_rss"].value,
            "prefill": figures["prefill_rss"].value,
            "decode": figures["decode_rss"].value,
        },
        "gpu": {
            **(runs[0].gpu.model_dump() if runs and runs[0].gpu else {}),
            "memory_mb": figures["gpu_memory"].value,
            "reason": figures["gpu_memory"].reason,
        },
        "energy_mj_per_token": figures["energy_mj_per_token"].report("resolution", "reason"),
        "file_mb": figures["file_size"].value,
        "figures": {
            name: figure.report(*FIELDS)
            for name, figure in figures.items()
            if name in METRICS or name in TTFT_PARTS.get(measurement.workload.media or "images", ())
        },
        "load_ms": figures["load"].value,
        "reps": [_repetition(rep) for rep in measurement.repetitions],
        "refused_share": measurement.refused_share,
        "clock": measurement.clock,
        "foreign_cpu": measurement.foreign_cpu,
        "reference": {"calibrated": measurement.calibration_ms, "drift": measurement.drift},
        "seconds": seconds,
    }


def _reading(run: Sample, prompt: int) -> tuple[int, float]:
    """Returns how many tokens the language model read before it decoded, and in how many milliseconds."""
    if run.media is None:
        return prompt, run.ttft_ms
    return prompt + run.media.tokens, max(1e-3, run.ttft_ms - sum(run.media.wall_ns[0]) / 1e6)


def _rate(figure: Figure, experienced: Sequence[float]) -> Json:
    """Returns the protocol's figure with its interval, and mean and standard deviation as llama-bench has them."""
    return {
        **figure.report(),
        "mean": statistics.fmean(experienced) if experienced else None,
        "sd": statistics.stdev(experienced) if len(experienced) > 1 else None,
        "n": len(experienced),
    }


def _repetition(rep: Repetition) -> Json:
    sample = rep.sample
    return {
        "valid": rep.valid,
        "reason": rep.reason,
        "drift": rep.drift,
        "ttft_ms": sample.ttft_ms if sample else None,
        "decode_ns": sample.decode_ns if sample else [],
        "decode_p50_ms": statistics.median(sample.decode_ns) / 1e6 if sample and sample.decode_ns else None,
        "peak_rss_mb": sample.peak_rss_mb if sample else None,
        "load_ms": sample.load_ms if sample else None,
        "conditions": rep.conditions.model_dump(mode="json"),
    }
