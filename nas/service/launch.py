"""`nas launch`: everything a study needs on one machine, put together, run, and taken down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from nas.core import paths
from nas.core.errors import InvalidInput, NasError, StudyBusy, Unsupported
from nas.core.layout import Layout
from nas.core.scoring import require_sensors
from nas.core.space import SearchSpace
from nas.devices.places import host_lock_folder
from nas.proxy.corpus import CorpusRef, refer
from nas.runtimes.base import Runtime
from nas.search_spaces import space_difference
from nas.service.asking import Asker
from nas.service.benches import Kept, Preparer, known_runtime
from nas.service.farm import Farm, open_farm
from nas.service.health import HealthKeeper
from nas.service.ledger import Ledger, all_events
from nas.service.orchestrator import Orchestrator
from nas.service.progress import Snapshot
from nas.service.record import CALIBRATED, CORPUS, LAUNCHED
from nas.service.stage_work import Bench, StageWork
from nas.service.stages import Stages
from nas.service.stored_space import stored_space
from nas.service.tune import ClusterCompute, RayCompute
from nas.service.turns import Turns
from nas.service.warm_start import require_studies, warm_start
from nas.store import jobs, leases, studies
from nas.store.rows import Study, StudyLease, StudyState
from nas.store.store import Store

Log = Callable[[str], None]
_SHOWN_CHANGES = 10


@dataclass(frozen=True)
class LaunchOptions:
    """What `nas launch` was asked for.

    Args:
        space: the search space.
        study: name; with `resume`, of a study that exists.
        trials: layouts to propose, references not counted; None: as last time, or as the space says.
        base: folder that relative corpus paths are taken from.
        db: URL, or None for the default database.
        ray_address: of a running cluster, or None.
        train_gpus: GPUs that a training takes on that cluster; None: CPU slots of nodes with GPUs share them evenly.
        resume: go on with the study.
        accept_noise: keep refused repetitions, marked, off the reported front; a study that did so once goes on so.
        workers: trainings side by side on a local Ray.
        warm_start: earlier studies of the database to learn from; a resumed study keeps those that it began with.
    """

    space: SearchSpace
    study: str
    trials: int | None
    base: Path
    db: str | None = None
    ray_address: str | None = None
    train_gpus: float | None = None
    resume: bool = False
    accept_noise: bool = False
    workers: int = os.cpu_count() or 1
    warm_start: tuple[str, ...] = ()


def launch(
    options: LaunchOptions, on_update: Callable[[Snapshot], None], on_event: Callable[[int | None, str, Any], None],
    log: Log,
) -> StudyState:  # fmt: skip
    """Runs a study to its end, or until it is interrupted or told to stop.

    Args:
        options: what to run.
        on_update: told twice a second how things stand.
        on_event: told of each event: trial, what, payload.
        log: told what takes time before the first trial.

    Raises:
        NasError: the space cannot be searched here, the study is taken, or a reference failed.
    """
    supported = support_filter(options.space)
    corpus = refer(options.space.quality.corpus, options.base)
    store = Store.open(options.db)
    try:
        require_studies(store, options.warm_start, options.study)
        study = _study(store, options)
        lease = _lease(store, study, log)
        ledger = Ledger(store, study, lease, on_event)
        with ledger.keep(), _failure_shown(ledger):
            begun = _as_begun(options, ledger)
            ledger.note(None, CORPUS, hash=corpus.hash)
            return asyncio.run(_run(begun, ledger, corpus, supported, on_update, log))
    finally:
        store.close()


async def _run(
    options: LaunchOptions, ledger: Ledger, corpus: CorpusRef, supported: Callable[[Layout], bool],
    on_update: Callable[[Snapshot], None], log: Log,
) -> StudyState:  # fmt: skip
    space = options.space
    asker = Asker(space, supported, host_lock_folder())
    scratch = paths.home() / "work"
    with open_farm(ledger.store) as farm:
        benches = await _benches(options, ledger, farm, scratch, log)  # while nothing else runs here
        warm_start(ledger, space, supported, options.warm_start, log)
        log("starting Ray" if options.ray_address is None else f"connecting to Ray at {options.ray_address}")
        plans = {bench.device.id: bench.reference.plan for bench in benches.values()}
        health = HealthKeeper(ledger.store, farm.doorbell.ring, lambda device: plans[device.id], among=plans)
        with health, _compute(options) as compute:
            work = StageWork(
                space=space,
                benches=benches,
                corpus=corpus,
                stages=Stages(ledger),
                ledger=ledger,
                compute=compute,
                turns=Turns(compute.workers),
                jobs=farm.jobs(ledger.study.id),
                scratch=scratch,
                lock=host_lock_folder(),
                accept_noise=options.accept_noise,
            )
            assert options.trials is not None, "fixed by `_as_begun`"
            orchestrator = Orchestrator(work, ledger, asker, options.trials, on_update)
            with _interrupts(orchestrator, log):
                return await orchestrator.run()


def _compute(options: LaunchOptions) -> RayCompute | ClusterCompute:
    if options.ray_address is None:
        return RayCompute(options.workers)
    return ClusterCompute(options.ray_address, options.train_gpus)


async def _benches(
    options: LaunchOptions, ledger: Ledger, farm: Farm, scratch: Path, log: Log
) -> dict[tuple[str, str], Bench]:
    """Every device with every runtime; a resumed study keeps the calibrations that it began with."""
    jobs_of_study = farm.jobs(ledger.study.id)
    space = options.space
    require_sensors(space, {name: farm.device(name) for name in space.devices})
    workloads = {name: space.workloads[name] for name in space.measured}
    preparer = Preparer(farm, jobs_of_study, space.protocol, scratch, log, options.accept_noise, workloads)
    kept = {
        (payload["device"], payload["runtime"]): Kept(payload["build"], payload["ms"])
        for payload in _notes(ledger, CALIBRATED)
    }
    benches = {}
    for device in space.devices:
        for runtime in space.runtimes:
            place = (device, runtime.name)
            benches[place] = bench = await preparer.bench(device, runtime, kept.get(place))
            if place not in kept:
                ledger.note(
                    None, CALIBRATED, device=device, runtime=runtime.name, id=bench.device.id,
                    build=bench.runner.build, ms=bench.reference.calibration_ms,
                )  # fmt: skip
    return benches


def _as_begun(options: LaunchOptions, ledger: Ledger) -> LaunchOptions:
    """The options, with what the study was launched with before where they leave it open."""
    before = _notes(ledger, LAUNCHED)
    trials = options.trials or (before[-1]["trials"] if before else options.space.search.trials)
    accept_noise = options.accept_noise or any(payload["accept_noise"] for payload in before)
    begun_with = tuple(before[-1].get("warm_start", ())) if before else options.warm_start
    if options.warm_start not in ((), begun_with):
        told = ", ".join(begun_with) or "no other study"
        raise InvalidInput(f"the study began with {told}; that cannot be changed", where="--warm-start")
    ledger.note(None, LAUNCHED, trials=trials, accept_noise=accept_noise, warm_start=list(begun_with))
    return replace(options, trials=trials, accept_noise=accept_noise, warm_start=begun_with)


def _notes(ledger: Ledger, what: str) -> list[Mapping[str, Any]]:
    log = all_events(ledger.store, ledger.study.id)
    return [event.payload for event in log if event.payload.get("what") == what]


@contextmanager
def _failure_shown(ledger: Ledger) -> Iterator[None]:
    """Leaves no study behind that seems to run."""
    try:
        yield
    except BaseException as error:
        state = StudyState.STOPPED if isinstance(error, KeyboardInterrupt) else StudyState.FAILED
        with contextlib.suppress(NasError):  # the study was lost, or the database is what failed
            ledger.set_state(state)
        raise


def support_filter(space: SearchSpace) -> Callable[[Layout], bool]:
    """Whether every runtime of the space carries a layout.

    Raises:
        UnknownName: no such runtime or quantisation.
        Unsupported: a reference layout is not carried, with the reasons.
    """
    runtimes = [(known_runtime(spec), spec.build) for spec in space.runtimes]
    for name, layout in space.references.layouts().items():
        for runtime, build in runtimes:
            if not _carries(runtime, layout, build):
                reasons = "; ".join(runtime.supports(layout).reasons)
                raise Unsupported(f"the {name} reference does not run on {runtime.name}: {reasons}", where="references")
    return lambda layout: all(_carries(runtime, layout, build) for runtime, build in runtimes)


def _carries(runtime: Runtime, layout: Layout, build: str) -> bool:
    verdict = runtime.supports(layout).verdict
    return verdict == "stock" or (verdict == "patched" and build == "any")


def _study(store: Store, options: LaunchOptions) -> Study:
    if options.resume:
        study = studies.get(store, options.study)
        _require_same_space(study, options.space)
        return study
    space = options.space.model_dump(mode="json")
    return studies.create(store, options.study, space, seed=options.space.search.seed, version=version("hilnas"))


def _require_same_space(study: Study, space: SearchSpace) -> None:
    if changes := space_difference(stored_space(study), space):
        shown = "\n  ".join(changes[:_SHOWN_CHANGES] + ["..."] * (len(changes) > _SHOWN_CHANGES))
        raise InvalidInput(
            f"study {study.name!r} began with another search space; it cannot be resumed:\n  {shown}", where="--resume"
        )


def _lease(store: Store, study: Study, log: Log) -> StudyLease:
    lease = _acquire(store, study, log)
    studies.set_desired_state(store, study.id, "run")
    # Left by a process that was killed: what is still wanted will be queued again.
    jobs.cancel_study(store, study.id)
    return lease


def _acquire(store: Store, study: Study, log: Log) -> StudyLease:
    holder = leases.new_holder()
    try:
        return leases.acquire(store, study.id, holder)
    except StudyBusy as busy:
        old = leases.current(store, study.id)
        if old is not None and _died_here(old):
            log(f"the process that ran {study.name} died without releasing it; taking over")
            leases.release(store, old)
            return leases.acquire(store, study.id, holder)
        if studies.get(store, study.id).desired_state != "pause":
            raise
        studies.set_desired_state(store, study.id, "run")
        raise StudyBusy(f"{busy}; it was paused, and has been told to go on") from None


def _died_here(lease: StudyLease) -> bool:
    """Whether the holder was a process of this machine that is gone."""
    host, pid, _ = lease.holder.rsplit(":", 2)
    if host != socket.gethostname():
        return False
    try:
        holder = psutil.Process(int(pid))
        # A younger process has been given its number; or nobody has asked yet how it ended.
        return holder.create_time() > lease.expires or holder.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def _interrupts(orchestrator: Orchestrator, log: Log) -> Iterator[None]:
    """The first Ctrl-C stops cleanly, the second at once."""
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
