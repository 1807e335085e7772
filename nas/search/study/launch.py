"""`nas launch`: starts all that a study needs on one machine, runs the study, and stops what it started."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from nas.core import paths
from nas.core.layout import Layout
from nas.core.progress import Log
from nas.infra.store.rows import StudyState
from nas.measure.devices.host_lock import host_lock_folder
from nas.measure.farm.farm import open_farm
from nas.measure.protocol.health import HealthKeeper
from nas.search.compute.ray import ClusterCompute, Compute, RayCompute
from nas.search.study.check import support_filter
from nas.search.study.opened import LaunchOptions, OnEvent, OpenedStudy
from nas.search.study.orchestrator import Orchestrator
from nas.search.study.proposals import ProposalDriver, warm_start
from nas.search.study.stages import Stages, StageWork, Trainings

OpenCompute = Callable[[LaunchOptions, Log], AbstractContextManager[Compute]]
"""Opens what stages run on."""


def launch(options: LaunchOptions, on_event: OnEvent, log: Log, compute: OpenCompute | None = None) -> StudyState:
    """Runs a study to its end, or until it is interrupted or stopped, on Ray if no other `compute` is given.

    Raises:
        NasError: the space cannot be searched here, the study is taken, or a reference failed.
    """
    supported = support_filter(options.space)
    if options.ray_address is None and compute is None:
        paths.require_short_sockets()
    with OpenedStudy.open(options, on_event, log) as study:
        return asyncio.run(_run(study, supported, lambda: (compute or _open_ray)(options, log), log))


async def _run(
    study: OpenedStudy,
    supported: Callable[[Layout], bool],
    open_compute: Callable[[], AbstractContextManager[Compute]],
    log: Log,
) -> StudyState:
    space, ledger = study.space, study.ledger
    proposals = ProposalDriver(space, supported, host_lock_folder())
    scratch = paths.home() / "work"
    with open_farm(ledger.store) as farm:
        targets = await study.targets(farm, scratch, log)  # while nothing else runs here
        warm_start(ledger, space, supported, study.warm_start, log)
        plans = {target.device.id: target.shortest.plan for target in targets.values()}
        health = HealthKeeper(ledger.store, farm.notifier.notify, lambda device: plans[device.id], among=plans)
        with health, open_compute() as compute:
            work = StageWork(
                space=space,
                targets=targets,
                corpus=study.corpus,
                stages=Stages(ledger),
                ledger=ledger,
                compute=compute,
                trainings=Trainings(compute, scratch, host_lock_folder()),
                jobs=farm.jobs(ledger.study.id),
                scratch=scratch,
                lock=host_lock_folder(),
            )
            orchestrator = Orchestrator(work, ledger, proposals, study.trials, log)
            with _interrupts(orchestrator, log):
                return await orchestrator.run()


def _open_ray(options: LaunchOptions, log: Log) -> RayCompute | ClusterCompute:
    if options.ray_address is None:
        log("starting Ray")
        return RayCompute(options.workers)
    log(f"connecting to Ray at {options.ray_address}")
    return ClusterCompute(options.ray_address, options.train_gpus)


@contextmanager
def _interrupts(orchestrator: Orchestrator, log: Log) -> Iterator[None]:
    """Handles signals: the first Ctrl-C, or the end of the terminal, stops the study cleanly, the second at once."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)

    def stop() -> None:
        log("stopping; once more to stop at once")
        orchestrator.stop()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
