"""`nas family compare`: members and reference models under the same conditions on one device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from nas.core import paths
from nas.core.canonical import result_key
from nas.core.device import Device
from nas.core.family import Comparison, write_record
from nas.core.space import Protocol, RuntimeSpace
from nas.family.comparison import Setting, comparison
from nas.family.contender import Contender, artifact_of
from nas.family.contest import DEADLINE_S, Contest, Standings, Task, tasks
from nas.family.expected import expected_seconds
from nas.family.lineup import Asked, family_folder, line_up
from nas.runtimes import RUNTIMES
from nas.runtimes.llama_cpp.stock_model import QUANTISATION
from nas.service.benches import Kept, Preparer
from nas.service.farm import Farm, open_farm
from nas.service.measuring import Jobs
from nas.service.stage_work import Bench
from nas.store import results
from nas.store.store import Store

Log = Callable[[str], None]
RUNTIME = "llama.cpp"


@dataclass(frozen=True)
class CompareOptions:
    """What `nas family compare` was asked for.

    Args:
        asked: who takes part.
        device: as in spaces; "local" is this machine.
        threads: of computation.
        repetitions: per model and workload.
        flash_attn: fused attention.
        accept_noise: keep refused repetitions, marked.
        replicate: a higher number measures anew.
        db: URL, or None for the default database.
        runtime: that runs the models.
        workloads: what they do; empty: the report's workloads.
    """

    asked: Asked
    device: str = "local"
    threads: int = 1
    repetitions: int = 3
    flash_attn: bool = True
    accept_noise: bool = False
    replicate: int = 0
    db: str | None = None
    runtime: str = RUNTIME
    workloads: tuple[Task, ...] = field(default=())


def compare(options: CompareOptions, log: Log, progress: Log) -> tuple[Comparison, Path]:
    """Measures what is missing, and gives the comparison and the file that it was written to.

    The file is written anew after every repetition, so that a page can follow.

    Raises:
        InvalidInput: what was asked for does not exist, or nothing here carries it.
        InfrastructureFailed: the device is gone or too noisy; asked again, the comparison goes on from there.
    """
    store = Store.open(options.db)
    try:
        with open_farm(store) as farm:
            device = farm.device(options.device)
            contenders = line_up(options.asked, RUNTIMES[options.runtime], device.id)
            return asyncio.run(_compare(options, contenders, device, farm, farm.jobs(None), log, progress))
    finally:
        store.close()


async def _compare(
    options: CompareOptions, contenders: Sequence[Contender], device: Device, farm: Farm, jobs: Jobs, log: Log,
    progress: Log,
) -> tuple[Comparison, Path]:  # fmt: skip
    asked = options.workloads or tasks(options.threads, options.repetitions, flash_attn=options.flash_attn)
    scratch = paths.home() / "work"
    protocol = Protocol(deadline_s=DEADLINE_S)
    workloads = {f"{task.at} tokens": task.workload for task in asked}
    preparer = Preparer(farm, jobs, protocol, scratch, log, options.accept_noise, workloads)
    bench = await _bench(options, preparer, contenders, device, farm.store)
    log(f"{len(contenders)} models on {device.id}: about {_told(expected_seconds(contenders, asked, bench))}")
    entries = [(each, artifact_of(each, farm.store, bench.runtime, scratch)) for each in contenders]
    contest = Contest(bench, jobs, farm.store, protocol, options.accept_noise, options.replicate)
    destination = comparison_path(options.asked.family, device.id)
    setting = Setting(options.asked.family, bench, options.threads, options.flash_attn, tuple(asked), _now())

    def keep(standings: Standings, what: str) -> None:
        progress(what)
        write_record(destination, comparison(setting, contenders, standings))

    standings = await contest.hold(entries, asked, keep)
    return comparison(setting, contenders, standings), destination


async def _bench(
    options: CompareOptions, preparer: Preparer, contenders: Sequence[Contender], device: Device, store: Store
) -> Bench:
    """On a noisy machine every calibration is another one: what a comparison began with, it goes on with."""
    patched = any(each.patched for each in contenders)
    spec = RuntimeSpace(name=options.runtime, quantisation=QUANTISATION, build="any" if patched else "stock")
    if not options.accept_noise:
        return await preparer.bench(options.device, spec)
    runner = RUNTIMES[spec.name].runner(device.target, device.cpu_features, patched=patched, libc=device.libc)
    key = result_key("compare", device=device.id, build=runner.build, replicate=options.replicate)
    row = results.get(store, key)
    bench = await preparer.bench(options.device, spec, Kept(runner.build, row.payload["ms"]) if row else None)
    results.put(store, key, "measure", {"ms": bench.reference.calibration_ms})
    return bench


def comparison_path(family: str | None, device: str) -> Path:
    """Where a comparison is kept: in the family's folder, or by itself."""
    folder = family_folder(family) if family else paths.home() / "comparisons"
    return folder / f"comparison-{device}.json"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _told(seconds: float) -> str:
    if seconds < 60:
        return "a minute"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
