"""`nas family compare`: measures members and reference models under the same conditions on one device.

Models take turns: every model once, then every model again, so that all have the same conditions. Each repetition is a
separate result in the store, under the key of all its inputs: a comparison that was killed, or that is repeated with
more models, measures only missing repetitions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from nas.core import paths
from nas.core.canonical import content_hash, result_key
from nas.core.device import Device, show_cores
from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed, InvalidInput, Unsupported
from nas.core.family import (
    FILES,
    ComparedModel,
    Comparison,
    MeasuredModel,
    MemberFiles,
    RecordedFigure,
    family_folder,
    member_folder,
    read_family,
    read_record,
    write_record,
)
from nas.core.layout import Layout
from nas.core.measurement import Measurement
from nas.core.metrics import METRICS
from nas.core.progress import Log, Progress
from nas.core.published import MODELS, named_layout
from nas.core.space import MeasurementSettings, RuntimeSpace
from nas.core.units import show_duration
from nas.core.workload import Workload
from nas.infra.store import artifacts
from nas.infra.store.store import Store
from nas.measure.farm.farm import Farm, open_farm
from nas.measure.protocol.calibration import DEPLOY_SEED, Calibrator, MeasurementTarget, known_runtime
from nas.measure.protocol.reference import export_key, reference_layout
from nas.measure.protocol.repetitions import measurement
from nas.measure.protocol.rounds import Jobs, Subject, measure
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Artifact, RandomWeights, Runtime
from nas.measure.runtimes.llama_cpp.stock_model import QUANTISATION, StockModel, write_stock_model
from nas.search.compute.worker import Outcome
from nas.train.compare.lfm2_report import SIZE_CLASSES, known_class, ratios, size_class
from nas.train.compare.published import REFERENCES, ReferenceModel, find_reference
from nas.train.scaling.measure import export_once, recorded_figure, stored_outcome, subject_key

RUNTIME = "llama.cpp"
GENERATED = 100
"""Decoded tokens, as in the report."""
DEADLINE_S = 3600.0
"""Per process: 4K tokens through 4B weights take some minutes on one slow core."""

_LOCK_S = 5.0
"""Longest wait for another process that makes the same comparison."""
_WEIGHTS = RandomWeights(DEPLOY_SEED)
"""Weights of reference models and layouts."""
_REPLICATES = 1000
"""Offset of the repetition numbers of the next replicate: more than the maximum number of repetitions."""
_PENDING = "not measured yet"
"""Reason of a figure that is missing so far."""
_LOADED_PER_S = 3e8
"""Parameters that are drawn, read and repacked per second."""


@dataclass(frozen=True)
class BenchTask:
    """A workload that every model runs.

    Args:
        at: tokens of context of its figures.
        workload: to run.
        metrics: figures that it gives.
        repetitions: number of processes.
    """

    at: int
    workload: Workload
    metrics: tuple[str, ...]
    repetitions: int


@dataclass(frozen=True)
class ModelSelection:
    """Requested models of a comparison.

    Args:
        family: name of a built family.
        references: names of reference models; empty: those of the others' size classes.
        layouts: one-line strings or published names.
        classes: size classes: their reference models, and only their members.
        alone: no reference models besides `references`.
    """

    family: str | None = None
    references: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class CompareOptions:
    """Options of `nas family compare`.

    Args:
        models: to compare.
        device: as in spaces; "local" is this machine.
        threads: of computation.
        repetitions: per model and workload.
        flash_attn: fused attention.
        replicate: a higher number measures again.
        db: URL, or None for the default database.
        workloads: to run; empty: the report's.
    """

    models: ModelSelection
    device: str = "local"
    threads: int = 1
    repetitions: int = 3
    flash_attn: bool = True
    replicate: int = 0
    db: str | None = None
    workloads: tuple[BenchTask, ...] = ()


@dataclass(frozen=True)
class Contender:
    """A model of a comparison: a member, a reference model, a layout or a model file.

    Args:
        name: in tables.
        parameters: all of them.
        active: those that one token uses.
        architecture: the runtime's name.
        subject: the model to write, or its file.
        member: whether it is a member of the family.
        searched: whether the family's search used the device of the comparison.
        source: page of a published configuration.
        flash_attn: whether its graph works with fused attention.
        patched: whether it needs our build of the runtime.
    """

    name: str
    parameters: int
    active: int
    architecture: str
    subject: Layout | StockModel | Path
    member: bool = False
    searched: bool = False
    source: str = ""
    flash_attn: bool = True
    patched: bool = False


def compare(options: CompareOptions, log: Log) -> tuple[Comparison, Path]:
    """Measures missing repetitions; returns the comparison and the file that it was written to.

    The file is replaced after every repetition, so that a page can show progress. Each device, selection of models and
    set of conditions has its own file.

    Raises:
        InvalidInput: a requested model does not exist, or the runtime does not support it.
        InfrastructureFailed: the device is gone, or another process makes this comparison; the same call
            resumes it.
    """
    store = Store.open(options.db)
    try:
        with open_farm(store) as farm:
            device = farm.device(options.device)
            contenders = select_models(options.models, RUNTIMES[RUNTIME], device.id)
            destination = comparison_path(options, device.id)
            destination.parent.mkdir(parents=True, exist_ok=True)
            with locked(destination.with_suffix(".lock"), _LOCK_S):
                record = asyncio.run(_compare(options, contenders, device, farm, destination, log))
                return record, destination
    finally:
        store.close()


async def _compare(
    options: CompareOptions,
    contenders: Sequence[Contender],
    device: Device,
    farm: Farm,
    destination: Path,
    log: Log,
) -> Comparison:
    jobs = farm.jobs(None)
    tasks = options.workloads or report_tasks(options.threads, options.repetitions, flash_attn=options.flash_attn)
    protocol = MeasurementSettings(deadline_s=DEADLINE_S)
    workloads = {
        f"{task.at} tokens{'' if fused else ' without flash attention'}": task.workload.model_copy(
            update={"flash_attn": fused}
        )
        for task in tasks
        for fused in sorted({task.workload.flash_attn and contender.flash_attn for contender in contenders})
    }
    patched = any(contender.patched for contender in contenders)
    spec = RuntimeSpace(name=RUNTIME, quantisation=QUANTISATION, build="any" if patched else "stock")
    calibrator = partial(Calibrator, farm, jobs, protocol, paths.home() / "work", log, workloads)
    benches: dict[Layout, MeasurementTarget] = {}
    for contender in contenders:
        reference = reference_layout(known_runtime(spec), contender.active)
        if reference not in benches:
            benches[reference] = await calibrator(contender.active).target(options.device, spec)
    bench = next(iter(benches.values()))
    log(f"{len(contenders)} models on {device.id}: about {show_duration(expected_seconds(contenders, tasks, benches))}")
    entries = [(contender, artifact_of(contender, farm.store, bench.runtime)) for contender in contenders]
    interleaved = InterleavedBench(benches, jobs, farm.store, protocol, options.replicate)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    conditions = Conditions(options, bench, tasks, at)

    def write(partial: PartialResults, progress: Progress) -> None:
        log(progress)
        write_record(destination, comparison(conditions, contenders, partial))

    return comparison(conditions, contenders, await interleaved.run(entries, tasks, write))


def comparison_path(options: CompareOptions, device: str) -> Path:
    """Returns the file of a comparison, in the family's folder or in `comparisons`.

    Raises:
        UnknownName: no such family.
    """
    models = options.models
    folder = paths.home() / "comparisons"
    if models.family is not None:
        folder = family_folder(read_family(models.family).name)
    key = content_hash(
        {
            "references": sorted(models.references),
            "layouts": sorted(models.layouts),
            "classes": sorted(models.classes),
            "alone": models.alone,
            "threads": options.threads,
            "flash_attn": options.flash_attn,
            "replicate": options.replicate,
            "runtime": RUNTIME,
        }
    )
    return folder / f"comparison-{device}-{key[:8]}.json"


def report_tasks(threads: int, repetitions: int, *, flash_attn: bool = True) -> tuple[BenchTask, ...]:
    """Returns the report's workloads, the cheapest first.

    The peak at 32K is taken with the whole cache allocated and a short prompt; docs/how-to/family-comparison.md has the
    reason.
    """
    common = {"threads": threads, "flash_attn": flash_attn}
    speed = ("prefill_tps", "decode_tps", "ttft")
    return (
        BenchTask(32768, Workload(prompt=512, gen=16, context=32768, **common), ("peak_rss",), 1),
        BenchTask(1024, Workload(prompt=1024, gen=GENERATED, **common), speed, repetitions),
        BenchTask(4096, Workload(prompt=4096, gen=GENERATED, **common), (*speed, "peak_rss"), repetitions),
    )


def expected_seconds(
    contenders: Sequence[Contender], tasks: Sequence[BenchTask], benches: Mapping[Layout, MeasurementTarget]
) -> float:
    """Returns the expected time of all repetitions with their reference models, if none is stored.

    Time grows with active parameters, at the rate at which the reference model runs.
    """
    total = 0.0
    for contender in contenders:
        layout, bench = bench_of(benches, contender.active)
        for task in tasks:
            run_s = bench.references[_workload(bench, task, contender)].calibration.run_ms / 1e3
            both = run_s * (1 + contender.active / layout.params.active)
            loaded = (contender.parameters + layout.params.total) / _LOADED_PER_S
            total += task.repetitions * (both + loaded)
    return total


def bench_of(benches: Mapping[Layout, MeasurementTarget], weights: int) -> tuple[Layout, MeasurementTarget]:
    """Returns the reference model of like size and what was calibrated with it."""
    layout = reference_layout(next(iter(benches.values())).runtime, weights)
    return layout, benches[layout]


def _workload(bench: MeasurementTarget, task: BenchTask, contender: Contender) -> Workload:
    fused = task.workload.flash_attn and contender.flash_attn
    return bench.device.pinned(task.workload.model_copy(update={"flash_attn": fused}))


# Selection of models.


def select_models(models: ModelSelection, runtime: Runtime, device: str) -> list[Contender]:
    """Returns members, layouts and reference models, the latter by name or by size class.

    Raises:
        UnknownName: no such family, class or reference model.
        Unsupported: the runtime does not support a layout or a reference model.
        InvalidInput: no model was named, or a layout cannot be read.
    """
    classes = [known_class(name) for name in models.classes]
    contenders = [
        contender
        for contender in (*_members(models.family, runtime, device), *_layouts(models.layouts, runtime))
        if not classes or not contender.member or size_class(contender.parameters) in classes
    ]
    references = [find_reference(name) for name in models.references]
    if not references and not models.alone:
        compared = classes or [size_class(contender.parameters) for contender in contenders]
        # Those that need our build are compared when they are named.
        stock = (reference for reference in REFERENCES.values() if not reference.patched)
        references = [reference for reference in stock if size_class(reference.parameters) in compared]
    contenders += map(of_reference, references)
    if not contenders:
        raise InvalidInput(
            f"nothing to compare: name a --family, a --layout, a --reference ({', '.join(REFERENCES)}) or a --class "
            f"({', '.join(SIZE_CLASSES)})"
        )
    by_name: dict[str, Contender] = {}
    for contender in contenders:
        by_name.setdefault(contender.name, contender)
    return list(by_name.values())


def _layouts(texts: Sequence[str], runtime: Runtime) -> Iterator[Contender]:
    for text in texts:
        if text in MODELS and text in REFERENCES:
            yield of_reference(REFERENCES[text])
        else:
            layout = named_layout(text)
            yield of_layout(f"layout {layout.id[:12]}", layout, runtime)


def _members(family: str | None, runtime: Runtime, device: str) -> Iterator[Contender]:
    if family is None:
        return
    for member in read_family(family).members:
        contender = of_layout(f"{family}-{member.size}", Layout.parse(member.layout), runtime)
        yield replace(
            contender,
            subject=_member_file(member_folder(family, member.size)) or contender.subject,
            member=True,
            searched=any(measured.searched for measured in member.measured if measured.device == device),
        )


def _member_file(folder: Path) -> Path | None:
    """Returns the member's GGUF file, which may hold trained weights, if it exists."""
    record = read_record(folder / FILES, MemberFiles)
    written = (
        folder / file.path
        for file in (record.files if record else ())
        if file.kind == "gguf" and file.quantisation.casefold() == QUANTISATION
    )
    return next((path for path in written if path.is_file()), None)


def of_reference(reference: ReferenceModel) -> Contender:
    """Returns a reference model as a contender."""
    shape = reference.shape
    return Contender(
        reference.name,
        reference.parameters,
        reference.active,
        reference.architecture,
        shape if isinstance(shape, Layout) else shape.model(),
        source=reference.source,
        patched=reference.patched,
        flash_attn=reference.flash_attn,
    )


def of_layout(name: str, layout: Layout, runtime: Runtime) -> Contender:
    """Returns a layout as a contender.

    Raises:
        Unsupported: the runtime does not support it.
    """
    support = runtime.supports(layout)
    if support.arch is None:
        raise Unsupported(f"{runtime.name} does not carry {name}: {'; '.join(support.reasons)}")
    params = layout.params
    return Contender(name, params.total, params.active, support.arch, layout, patched=support.verdict == "patched")


def artifact_of(contender: Contender, store: Store, runtime: Runtime) -> Artifact:
    """Returns the Q4_0 model of a contender in the store; random weights are a recipe that the device expands.

    Raises:
        InvalidInput: its file cannot be read.
        InfrastructureFailed: the disk is full.
    """
    subject = contender.subject
    if isinstance(subject, Path):
        stored = artifacts.put_file(store, subject)
        return Artifact(
            sha256=stored.sha256,
            size=stored.size,
            runtime=runtime.name,
            quantisation=QUANTISATION,
            layout_id="",
            arch=contender.architecture,
            patched=contender.patched,
            weights=f"file:{subject.name}",
        )
    if isinstance(subject, Layout):
        key = export_key(subject, runtime, QUANTISATION, _WEIGHTS.describe())
        return export_once(store, key, lambda to: runtime.export(subject, QUANTISATION, _WEIGHTS, to, recipe=True))
    key = result_key(
        "export",
        model=subject.id,
        runtime=runtime.name,
        quantisation=QUANTISATION,
        weights=_WEIGHTS.describe(),
        writer=runtime.writer_version,
    )
    return export_once(store, key, lambda to: _stock_artifact(subject, runtime, to))


def _stock_artifact(model: StockModel, runtime: Runtime, destination: Path) -> Artifact:
    written = write_stock_model(model, _WEIGHTS, destination, recipe=True)
    return Artifact(
        sha256=written.file.sha256,
        size=written.file.size,
        runtime=runtime.name,
        quantisation=QUANTISATION,
        layout_id="",
        arch=model.architecture,
        weights=_WEIGHTS.describe(),
        recipe=written.recipe,
    )


# Interleaved measurement.


@dataclass
class PartialResult:
    """The repetitions of one contender in one task so far.

    Args:
        runs: of one process each.
        failed: why it is no longer measured; empty: it did not fail.
    """

    runs: list[Measurement] = field(default_factory=list)
    failed: str = ""

    def summary(self) -> Measurement | None:
        """Returns all repetitions as one measurement."""
        if not self.runs:
            return None
        first = self.runs[0]
        size_mb = first.figures["file_size"].value
        assert size_mb is not None
        return measurement(
            [rep for run in self.runs for rep in run.repetitions if rep.valid],
            artifact=first.artifact,
            runtime=first.runtime,
            build=first.build,
            patched=first.patched,
            device=first.device,
            workload=first.workload,
            file_bytes=round(size_mb * 1e6),
            calibration=first.calibration,
            wall_s=sum(run.wall_s for run in self.runs),
        )


PartialResults = dict[tuple[str, int], PartialResult]
"""(contender's name, the task's context) -> its repetitions so far."""


@dataclass(frozen=True)
class InterleavedBench:
    """Measures contenders in turns.

    Args:
        benches: reference model -> device and runtime, calibrated with it.
        jobs: runs rounds on the device.
        store: keeps repetitions.
        protocol: deadline and attempts.
        replicate: a higher number measures again.
    """

    benches: Mapping[Layout, MeasurementTarget]
    jobs: Jobs
    store: Store
    protocol: MeasurementSettings
    replicate: int = 0

    async def run(
        self,
        entries: Sequence[tuple[Contender, Artifact]],
        tasks: Sequence[BenchTask],
        after_each: Callable[[PartialResults, Progress], None],
    ) -> PartialResults:
        """Measures every entry in every task; `after_each` takes all results so far.

        Progress is in expected seconds: a repetition at 4K takes as long as several at 1K.

        Raises:
            InfrastructureFailed: the device is gone; finished repetitions are kept.
        """
        partial: PartialResults = {
            (contender.name, task.at): PartialResult() for task in tasks for contender, _ in entries
        }
        total, done = expected_seconds([contender for contender, _ in entries], tasks, self.benches), 0.0
        for task in tasks:
            for turn in range(task.repetitions):
                for contender, artifact in entries:
                    done += expected_seconds([contender], [task], self.benches) / task.repetitions
                    result = partial[contender.name, task.at]
                    if result.failed:
                        continue
                    _, bench = bench_of(self.benches, contender.active)
                    size_mb, memory_mb = artifact.size / 1e6, bench.device.memory_mb
                    if size_mb > memory_mb:
                        result.failed = (
                            f"too large: {size_mb:,.0f} MB of weights, {memory_mb:,} MB of memory on the device"
                        )
                    else:
                        await self._repeat(result, bench, artifact, _workload(bench, task, contender), turn)
                    what = f"{contender.name} at {task.at} tokens, {turn + 1} of {task.repetitions}"
                    after_each(partial, Progress("seconds of repetitions", round(done), round(total), what))
        return partial

    async def _repeat(
        self, result: PartialResult, bench: MeasurementTarget, artifact: Artifact, workload: Workload, turn: int
    ) -> None:
        outcome = await self._repetition(bench, artifact, workload, turn)
        if "failed" in outcome:
            failed = outcome["failed"]
            result.failed = f"{failed['reason']}: {failed['message'].splitlines()[0]}"
        else:
            result.runs.append(Measurement.model_validate(outcome["value"]))

    async def _repetition(self, bench: MeasurementTarget, artifact: Artifact, workload: Workload, turn: int) -> Outcome:
        reference = bench.references[workload]
        subject = Subject(artifact, bench.runtime, bench.runner, bench.device, workload)
        key = subject_key(subject, reference, 1, self.protocol, self.replicate * _REPLICATES + turn)

        async def run() -> Measurement:
            # A new key for the job: the device may still have jobs of an earlier attempt.
            job = content_hash({"compare": key, "at": time.time()})
            try:
                return await measure(subject, reference, self.jobs, job, None, 1, self.protocol)
            except InfrastructureFailed as error:
                raise InfrastructureFailed(f"{error}. What was measured is kept: the same command resumes") from error

        return await stored_outcome(self.store, key, run)


# Record of the comparison.


@dataclass(frozen=True)
class Conditions:
    """Conditions of a comparison.

    Args:
        options: of the command.
        bench: device and runtime.
        tasks: workloads.
        at: time in ISO 8601.
    """

    options: CompareOptions
    bench: MeasurementTarget
    tasks: tuple[BenchTask, ...]
    at: str


def comparison(conditions: Conditions, contenders: Sequence[Contender], partial: PartialResults) -> Comparison:
    """Returns the record of the results so far."""
    models = tuple(_model(conditions, contender, partial) for contender in contenders)
    return Comparison(
        family=conditions.options.models.family,
        device=conditions.bench.device.id,
        conditions=_described(conditions, partial),
        made=conditions.at,
        models=models,
        ratios=tuple(ratios(models)),
        notes=tuple(_notes(conditions, contenders)),
    )


def _model(conditions: Conditions, contender: Contender, partial: PartialResults) -> ComparedModel:
    figures: list[RecordedFigure] = []
    for task in conditions.tasks:
        result = partial[contender.name, task.at]
        summary = result.summary()
        for metric in task.metrics:
            if result.failed or summary is None:
                figures.append(RecordedFigure(metric=metric, prompt=task.at, reason=result.failed or _PENDING))
            else:
                figures.append(recorded_figure(METRICS[metric], task.at, summary))
    return ComparedModel(
        name=contender.name,
        member=contender.member,
        parameters=contender.parameters,
        architecture=contender.architecture,
        source=contender.source,
        measured=MeasuredModel(
            device=conditions.bench.device.id,
            runtime=conditions.bench.runtime.name,
            quantisation=QUANTISATION,
            threads=conditions.options.threads,
            figures=tuple(figures),
            searched=contender.searched,
        ),
    )


def _described(conditions: Conditions, partial: PartialResults) -> dict[str, str]:
    device, runner = conditions.bench.device, conditions.bench.runner
    first = conditions.tasks[0].workload
    affinity = device.pinned(first).affinity
    return {
        "model": device.model,
        "cpu": device.cpu,
        "memory": f"{device.memory_mb} MB",
        "os": device.os,
        "threads": str(conditions.options.threads),
        "cores": show_cores(affinity) if affinity else "not pinned",
        "runtime": f"{runner.runtime}, {'patched' if runner.patched else 'stock'} build {runner.build[:12]}",
        "instructions": _instructions(partial),
        "quantisation": QUANTISATION,
        "flash attention": "on" if conditions.options.flash_attn else "off",
        "key-value cache": first.kv_type,
        "repetitions": "; ".join(f"{task.repetitions} at {task.at} tokens" for task in conditions.tasks),
        "calibration": ", ".join(
            f"{reference.calibration.run_ms:.1f} ms of the reference model on {workload.prompt} + {workload.gen} tokens"
            for workload, reference in conditions.bench.references.items()
        ),
    }


def _instructions(partial: PartialResults) -> str:
    """Returns the processor instructions that the runtime reports to use."""
    for result in partial.values():
        for run in result.runs:
            for rep in run.repetitions:
                if rep.sample and (info := rep.sample.info.get("system_info")):
                    uses = [part.split("=")[0].strip() for part in str(info).split("|") if part.strip().endswith("= 1")]
                    return ", ".join(use.removeprefix("CPU :").strip() for use in uses)
    return "not reported"


def _notes(conditions: Conditions, contenders: Sequence[Contender]) -> Iterator[str]:
    """Yields differences from the report."""
    yield (
        f"Threads: {conditions.options.threads} here; the report does not give its own. More threads speed up prefill "
        "more than decoding, which memory bandwidth limits sooner."
    )
    yield (
        "Instructions: those above here; the report's phone and laptop have others. They speed up matrix products more "
        "than attention over a long cache and state-space scans, so ratios between kinds of models change."
    )
    attention = "on" if conditions.options.flash_attn else "off"
    yield (
        f"Flash attention is {attention} here and not given in the report; llama.cpp's versions differ, too. It "
        "changes models with much attention most, and more at 4K than at 1K."
    )
    unfused = [contender.name for contender in contenders if not contender.flash_attn]
    if unfused and conditions.options.flash_attn:
        yield f"Without flash attention, which does not work with the stock graph: {', '.join(unfused)}."
    yield "Sliding windows cache the window and one batch here (llama.cpp's own default is the whole context)."
    yield (
        "Weights of reference models are random, with the types that llama.cpp's quantiser gives: as far as measured, "
        "speed does not depend on values. A trained router may favour some experts more than a random one does."
    )
    yield (
        "Decode speed is 100 tokens over their time; times are mean ratios to the reference model beside them, "
        "multiplied by what that takes on a device that nothing disturbs."
    )
    if any(contender.member and not contender.searched for contender in contenders):
        yield "The family's search did not use this device."
