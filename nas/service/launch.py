"""`nas launch`: everything a study needs on one machine, put together, run, and taken down."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from nas.core import paths
from nas.core.errors import StudyBusy, Unsupported
from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.proxy.corpus import CorpusRef, refer
from nas.runtimes.base import Runtime
from nas.service.asking import Asker
from nas.service.benches import Preparer, known_runtime
from nas.service.farm import Farm, host_lock_folder, open_farm
from nas.service.ledger import Ledger, all_events
from nas.service.orchestrator import Orchestrator
from nas.service.progress import Snapshot
from nas.service.stage_work import Bench, StageWork
from nas.service.stages import Stages
from nas.service.tune import RayCompute
from nas.store import leases, studies
from nas.store.rows import Study, StudyLease, StudyState
from nas.store.store import Store

Log = Callable[[str], None]
_CALIBRATED = "calibrated"


@dataclass(frozen=True)
class LaunchOptions:
    """What `nas launch` was asked for.

    Args:
        space: the search space.
        study: name; with `resume`, of a study that exists.
        trials: layouts to propose, references not counted.
        base: folder that relative corpus paths are taken from.
        db: URL, or None for the default database.
        ray_address: of a running cluster, or None.
        resume: go on with the study.
        accept_noise: keep refused repetitions, marked, off the reported front.
        workers: trainings side by side on a local Ray.
    """

    space: SearchSpace
    study: str
    trials: int
    base: Path
    db: str | None = None
    ray_address: str | None = None
    resume: bool = False
    accept_noise: bool = False
    workers: int = os.cpu_count() or 1


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
        study = _study(store, options)
        lease = _lease(store, study, log)
        ledger = Ledger(store, study, lease, on_event)
        try:
            return asyncio.run(_run(options, ledger, corpus, supported, on_update, log))
        finally:
            ledger.release()
    finally:
        store.close()


async def _run(
    options: LaunchOptions, ledger: Ledger, corpus: CorpusRef, supported: Callable[[Layout], bool],
    on_update: Callable[[Snapshot], None], log: Log,
) -> StudyState:  # fmt: skip
    space = options.space
    asker = Asker(space, supported, host_lock_folder())
    scratch = paths.home() / "work"
    # Leaves on SIGINT in a child process group of its own, so that workers end after us, not before.
    with open_farm(ledger.store) as farm:
        log("starting Ray" if options.ray_address is None else f"connecting to Ray at {options.ray_address}")
        with RayCompute(options.ray_address, options.workers) as compute:
            work = StageWork(
                space=space,
                benches=await _benches(options, ledger, farm, scratch, log),
                corpus=corpus,
                stages=Stages(ledger),
                ledger=ledger,
                compute=compute,
                jobs=farm.jobs(ledger.study.id),
                scratch=scratch,
                lock=host_lock_folder(),
                accept_noise=options.accept_noise,
            )
            orchestrator = Orchestrator(work, ledger, asker, options.trials, on_update)
            with _interrupts(orchestrator, log):
                return await orchestrator.run()


async def _benches(
    options: LaunchOptions, ledger: Ledger, farm: Farm, scratch: Path, log: Log
) -> dict[tuple[str, str], Bench]:
    """Every device with every runtime; a resumed study keeps the calibrations that it began with."""
    preparer = Preparer(farm, farm.jobs(None), options.space.protocol, scratch, log, options.accept_noise)
    kept = {
        (event.payload["device"], event.payload["runtime"]): event.payload["ms"]
        for event in all_events(ledger.store, ledger.study.id)
        if event.payload.get("what") == _CALIBRATED
    }
    benches = {}
    for device in options.space.devices:
        for runtime in options.space.runtimes:
            place = (device, runtime.name)
            benches[place] = bench = await preparer.bench(device, runtime, kept.get(place))
            if place not in kept:
                ms = bench.reference.calibration_ms
                ledger.note(None, _CALIBRATED, device=device, runtime=runtime.name, ms=ms, id=bench.device.id)
    return benches


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
    space = options.space.model_dump(mode="json")
    if options.resume:
        study = studies.get(store, options.study)
        studies.require_same_space(study, space)
        studies.set_desired_state(store, study.id, "run")
        return studies.get(store, options.study)
    return studies.create(store, options.study, space, seed=options.space.search.seed, version=version("hilnas"))


def _lease(store: Store, study: Study, log: Log) -> StudyLease:
    holder = leases.new_holder()
    try:
        return leases.acquire(store, study.id, holder)
    except StudyBusy:
        old = leases.current(store, study.id)
        if old is None or not _died_here(old):
            raise
        log(f"the process that ran {study.name} died without releasing it; taking over")
        leases.release(store, old)
        return leases.acquire(store, study.id, holder)


def _died_here(lease: StudyLease) -> bool:
    """Whether the holder was a process of this machine that is gone."""
    host, pid, _ = lease.holder.rsplit(":", 2)
    if host != socket.gethostname():
        return False
    try:
        # A younger process has been given its number.
        return psutil.Process(int(pid)).create_time() > lease.expires
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
