"""`nas launch`: starts all that a study needs on one machine, runs the study, and stops what it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nas.core import paths
from nas.core.block import BLOCKS
from nas.core.errors import InvalidInput, NasError, StudyBusy, StudyChanged
from nas.core.layout import Layout
from nas.core.measurement import ReferenceTimes
from nas.core.quality_config import CorpusFiles
from nas.core.scoring import require_sensors
from nas.core.space import SearchSpace
from nas.core.task import TASKS
from nas.infra.store import jobs, leases, studies
from nas.infra.store.rows import Study, StudyLease, StudyState
from nas.infra.store.store import Store
from nas.measure.devices.host_lock import host_lock_folder
from nas.measure.farm.farm import Farm, open_farm
from nas.measure.protocol.calibration import Calibrator, MeasurementTarget, SavedCalibration
from nas.measure.protocol.health import HealthKeeper
from nas.measure.protocol.repetitions import PROTOCOL_VERSION
from nas.model.text.corpus import CorpusRef, made_of, refer, refer_again, refer_scores
from nas.search.compute.ray import ClusterCompute, Compute, RayCompute
from nas.search.proxy.job import MIXES_VERSION, TRAINER_VERSION
from nas.search.proxy.tasks import SUITE_VERSION
from nas.search.spaces import space_difference
from nas.search.study.check import support_filter
from nas.search.study.events import Calibrated, CorpusUsed, Launched, all_events, notes, protocols, stored_space
from nas.search.study.ledger import Ledger
from nas.search.study.orchestrator import Orchestrator, Snapshot
from nas.search.study.proposals import ProposalDriver, require_studies, warm_start
from nas.search.study.stages import Stages, StageWork, Trainings

Log = Callable[[str], None]
_SHOWN_CHANGES = 10
_SCORES = "scores"
"""Key of the path of a library's file of scores, in `CorpusUsed`."""


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `nas launch`.

    Args:
        space: the search space.
        study: name; with `resume`, of a study that exists.
        trials: layouts to propose, references not counted; None: as last time, or as the space says.
        base: folder that relative corpus paths are taken from.
        db: URL, or None for the default database.
        ray_address: of a running cluster, or None.
        train_gpus: GPUs per training on that cluster; None: CPU slots of nodes with GPUs share them evenly.
        resume: continue the study.
        workers: parallel trainings on a local Ray.
        warm_start: earlier studies of the database to learn from; a resumed study keeps its own.
    """

    space: SearchSpace
    study: str
    trials: int | None
    base: Path
    db: str | None = None
    ray_address: str | None = None
    train_gpus: float | None = None
    resume: bool = False
    workers: int = len(os.sched_getaffinity(0))
    warm_start: tuple[str, ...] = ()


ComputeOf = Callable[[LaunchOptions, Log], AbstractContextManager[Compute]]


def launch(
    options: LaunchOptions, on_update: Callable[[Snapshot], None], on_event: Callable[[int | None, str, Any], None],
    log: Log, compute: ComputeOf | None = None,
) -> StudyState:  # fmt: skip
    """Runs a study to its end, or until it is interrupted or stopped.

    Args:
        options: what to run.
        on_update: called twice a second with a snapshot.
        on_event: called with each event: trial, what, payload.
        log: called with a line before something that takes time.
        compute: opens what stages run on; None: Ray.

    Raises:
        NasError: the space cannot be searched here, the study is taken, or a reference failed.
    """
    supported = support_filter(options.space)
    # Of a new study it is read before a database is made.
    fresh = None if options.resume else _referred(options)
    store = Store.open(options.db)
    try:
        require_studies(store, options.warm_start, options.study)
        if options.resume and _nothing_to_measure(store, options):
            log(f"{options.study} is complete")
            return StudyState.COMPLETE
        if fresh is None:
            study = _resumed(store, options)
            corpus = _corpus(store, study, options)
        else:
            study, corpus = _new(store, options), fresh
        lease = _lease(store, study, log)
        ledger = Ledger(store, study, lease, on_event)
        with _refused_without_trace(store, study, new=fresh is not None), ledger.keep(), _failure_shown(ledger):
            begun = _as_begun(options, ledger)
            ledger.note(None, CorpusUsed(corpus.hash, training_versions(options.space), _made_of(options, corpus)))
            return asyncio.run(_run(begun, ledger, corpus, supported, on_update, log, compute or _open_ray))
    finally:
        store.close()


async def _run(
    options: LaunchOptions, ledger: Ledger, corpus: CorpusRef, supported: Callable[[Layout], bool],
    on_update: Callable[[Snapshot], None], log: Log, open_compute: ComputeOf,
) -> StudyState:  # fmt: skip
    space = options.space
    proposals = ProposalDriver(space, supported, host_lock_folder())
    scratch = paths.home() / "work"
    with open_farm(ledger.store) as farm:
        targets = await _targets(options, ledger, farm, scratch, log)  # while nothing else runs here
        warm_start(ledger, space, supported, options.warm_start, log)
        plans = {target.device.id: target.reference.plan for target in targets.values()}
        health = HealthKeeper(ledger.store, farm.notifier.notify, lambda device: plans[device.id], among=plans)
        with health, open_compute(options, log) as compute:
            work = StageWork(
                space=space,
                targets=targets,
                corpus=corpus,
                stages=Stages(ledger),
                ledger=ledger,
                compute=compute,
                trainings=Trainings(compute, scratch, host_lock_folder()),
                jobs=farm.jobs(ledger.study.id),
                scratch=scratch,
                lock=host_lock_folder(),
            )
            assert options.trials is not None, "fixed by `_as_begun`"
            orchestrator = Orchestrator(work, ledger, proposals, options.trials, on_update, log)
            with _interrupts(orchestrator, log):
                return await orchestrator.run()


def _open_ray(options: LaunchOptions, log: Log) -> RayCompute | ClusterCompute:
    if options.ray_address is None:
        log("starting Ray")
        return RayCompute(options.workers)
    log(f"connecting to Ray at {options.ray_address}")
    return ClusterCompute(options.ray_address, options.train_gpus)


async def _targets(
    options: LaunchOptions, ledger: Ledger, farm: Farm, scratch: Path, log: Log
) -> dict[tuple[str, str], MeasurementTarget]:
    """Prepares every device with every runtime; a resumed study keeps the calibrations that it began with."""
    jobs_of_study = farm.jobs(ledger.study.id)
    space = options.space
    require_sensors(space, {name: farm.device(name) for name in space.devices})
    workloads = {name: space.workloads[name] for name in space.measured}
    calibrator = Calibrator(farm, jobs_of_study, space.protocol, scratch, log, workloads)
    logged = notes(ledger.events(), Calibrated)
    saved = {(note.device, note.runtime): _saved(note) for note in logged}
    prepared = [calibrator.prepare(device, runtime) for device in space.devices for runtime in space.runtimes]
    for each in prepared:  # all of them before the first run
        if (before := saved.get((each.name, each.runtime.name))) is not None:
            each.require_unchanged(before.conditions)
    ledger.set_state(StudyState.RUNNING)
    targets = {}
    for each in prepared:
        name = (each.name, each.runtime.name)
        targets[name] = target = await calibrator.calibrated(each, saved.get(name))
        if name not in saved:
            times = {str(threads): one.calibration.model_dump() for threads, one in target.references.items()}
            ms = target.reference.calibration.run_ms
            ledger.note(
                None,
                Calibrated(*name, each.device.id, each.runner.build, ms, PROTOCOL_VERSION, each.conditions, times),
            )
    return targets


def _saved(note: Calibrated) -> SavedCalibration:
    assert note.times is not None, "checked by `_nothing_to_measure`"
    times = {int(threads): ReferenceTimes.model_validate(each) for threads, each in note.times.items()}
    return SavedCalibration(note.build, times, note.known_conditions)


def _as_begun(options: LaunchOptions, ledger: Ledger) -> LaunchOptions:
    """Completes the options with those of the study's earlier launches."""
    before = notes(ledger.events(), Launched)
    trials = options.trials or (before[-1].trials if before else options.space.search.trials)
    earlier = before[-1].warm_start if before else options.warm_start
    if options.warm_start not in ((), earlier):
        names = ", ".join(earlier) or "no other study"
        raise InvalidInput(f"the study began with {names}; that cannot be changed", where="--warm-start")
    ledger.note(None, Launched(trials, earlier))
    return replace(options, trials=trials, warm_start=earlier)


@contextmanager
def _refused_without_trace(store: Store, study: Study, *, new: bool) -> Iterator[None]:
    """Deletes a `new` study whose launch is refused for its input before it began: nothing of it takes the name."""
    try:
        yield
    except InvalidInput:
        begun = (StudyState.RUNNING.value, StudyState.PAUSED.value)
        states = {event.payload.get("state") for event in all_events(store, study.id)}
        if new and not states.intersection(begun):
            studies.delete(store, study.id)
        raise


@contextmanager
def _failure_shown(ledger: Ledger) -> Iterator[None]:
    """Sets the state of a study that ends by an exception, and why, so that it does not seem to run."""
    try:
        yield
    except StudyChanged:
        raise  # nothing was done
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        reason = None if stopped else str(error) if isinstance(error, NasError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(NasError):  # the study was lost, or the database is what failed
            ledger.set_state(StudyState.STOPPED if stopped else StudyState.FAILED, reason)
        raise


def _resumed(store: Store, options: LaunchOptions) -> Study:
    study = studies.get(store, options.study)
    _require_same_space(study, options.space)
    return study


def _corpus(store: Store, resumed: Study, options: LaunchOptions) -> CorpusRef:
    """Returns the corpus that a resumed study began with.

    Raises:
        StudyChanged: that corpus is gone, or this version or a plug-in trains otherwise.
    """
    log = all_events(store, resumed.id)
    # Earlier versions went on under other corpora until the references were complete.
    frozen = next((place for place, event in enumerate(log) if "scales" in event.payload), len(log))
    used = notes(log[:frozen], CorpusUsed)
    if not used:
        return _referred(options)
    now = training_versions(options.space)
    changes = [
        f"version {began} of {name}, which is {now[name]} now"
        for name, began in used[-1].known_versions.items()
        if name in now and now[name] != began
    ]
    if changes:
        raise StudyChanged(
            f"study {options.study!r} began with {'; '.join(changes)}. Its qualities would not compare, so install "
            "what it began with, or begin a new study",
            where="--resume",
        )
    if (library := options.space.quality.library) is None:
        return refer_again(options.space.quality.corpus, options.base, used[-1].hash)
    if not (options.base / library.path).is_file():  # resumed without the space's file
        library = library.model_copy(update={"path": (used[-1].made_of or {}).get(_SCORES, library.path)})
    scores = refer_scores(library, options.base)
    if scores.hash != used[-1].hash:
        raise StudyChanged(
            f"study {options.study!r} began with another content of {library.path}. Its qualities"
            " would not compare, so restore the file or begin a new study",
            where="quality.path",
        )
    return scores


def _made_of(options: LaunchOptions, corpus: CorpusRef) -> dict[str, str] | None:
    """Returns the versions of what a corpus was taken from, or the path of a library's scores; None: not known."""
    if options.space.quality.library is not None and isinstance(corpus.source, CorpusFiles):
        return {_SCORES: corpus.source.files[0]}
    return made_of(corpus) or None


def _referred(options: LaunchOptions) -> CorpusRef:
    """Returns the reference to what qualities are computed from: the corpus, or a library's file of scores."""
    quality = options.space.quality
    return (
        refer(quality.corpus, options.base) if quality.library is None else refer_scores(quality.library, options.base)
    )


def training_versions(space: SearchSpace) -> dict[str, Any]:
    """Returns the version of everything that trains proxies of a space: trainer, suite of tasks, plug-ins."""
    layouts = space.references.layouts().values()
    kinds = {block.kind for block in (*space.mixers, *space.ffn)}
    found = {kind: BLOCKS.version(kind) for kind in sorted(kinds)}
    for layout in layouts:
        found |= layout.plugin_versions
    tasks = {stage.task or name for rung in space.quality.rungs for name, stage in rung.tasks.items()}
    found |= {name: TASKS.version(name) for name in sorted(tasks)}
    plugins = {name: version for name, version in found.items() if version is not None}
    mixes = {} if space.quality.library is None else {"mixes": MIXES_VERSION}
    return {"trainer": TRAINER_VERSION, "suite": SUITE_VERSION} | mixes | plugins


def _new(store: Store, options: LaunchOptions) -> Study:
    space = options.space.model_dump(mode="json")
    return studies.create(store, options.study, space, seed=options.space.search.seed, version=version("hilnas"))


def _nothing_to_measure(store: Store, options: LaunchOptions) -> bool:
    """Returns whether a study of an earlier measurement protocol has ended.

    Raises:
        InvalidInput: it has not: figures of two protocols do not compare.
        UnknownName: no such study.
    """
    study = studies.get(store, options.study)
    log = all_events(store, study.id)
    began = protocols(log) - {PROTOCOL_VERSION}
    if not began:
        return False
    asked = max((launched.trials for launched in notes(log, Launched)), default=0)
    if study.state is StudyState.COMPLETE and (options.trials is None or options.trials <= asked):
        return True
    raise InvalidInput(
        f"study {study.name!r} began under version {min(began)} of the measurement protocol, and this version of "
        f"hilnas measures by version {PROTOCOL_VERSION}: their figures do not compare. Begin a new study with "
        f"--warm-start {study.name}",
        where="--resume",
    )


def _require_same_space(study: Study, space: SearchSpace) -> None:
    if changes := space_difference(stored_space(study), space):
        shown = "\n  ".join(changes[:_SHOWN_CHANGES] + ["..."] * (len(changes) > _SHOWN_CHANGES))
        raise InvalidInput(
            f"study {study.name!r} began with another search space; it cannot be resumed:\n  {shown}", where="--resume"
        )


def _lease(store: Store, study: Study, log: Log) -> StudyLease:
    lease = _acquire(store, study, log)
    studies.set_desired_state(store, study.id, "run")
    # Left by a process that was killed: jobs that are still needed will be queued again.
    jobs.cancel_study(store, study.id)
    return lease


def _acquire(store: Store, study: Study, log: Log) -> StudyLease:
    holder = leases.new_holder()
    try:
        return leases.acquire(store, study.id, holder)
    except StudyBusy as busy:
        old = leases.current(store, study.id)
        if old is not None and leases.has_died(old.holder):
            log(f"the process that ran {study.name} died without releasing it; taking over")
            leases.release(store, old)
            return leases.acquire(store, study.id, holder)
        if studies.get(store, study.id).desired_state != "pause":
            raise
        studies.set_desired_state(store, study.id, "run")
        raise StudyBusy(f"{busy}; it was paused, and now continues") from None


@contextmanager
def _interrupts(orchestrator: Orchestrator, log: Log) -> Iterator[None]:
    """Handles signals: the first Ctrl-C stops the study cleanly, the second at once."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        log("stopping; once more to stop at once")
        orchestrator.stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
