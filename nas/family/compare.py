"""`nas family compare`: members and reference models under the same conditions on one device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.device import Device
from nas.core.durable import locked
from nas.core.family import Comparison, write_record
from nas.core.space import Protocol, RuntimeSpace
from nas.family.calibrated import calibrated_bench
from nas.family.comparison import Setting, comparison
from nas.family.contender import Contender, artifact_of
from nas.family.contest import DEADLINE_S, Contest, Standings, Task, tasks
from nas.family.expected import expected_seconds
from nas.family.lineup import Asked, line_up
from nas.runtimes import RUNTIMES
from nas.runtimes.llama_cpp.stock_model import QUANTISATION
from nas.service.benches import Preparer
from nas.service.families import family_folder, read_family
from nas.service.farm import Farm, open_farm
from nas.store.store import Store

Log = Callable[[str], None]
RUNTIME = "llama.cpp"
_LOCK_S = 5.0


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

    The file is written anew after every repetition, so that a page can follow. Another device, line-up or condition has
    another file.

    Raises:
        InvalidInput: what was asked for does not exist, or nothing here carries it.
        InfrastructureFailed: the device is gone or too noisy, or another process makes this comparison; asked again,
            it goes on from there.
    """
    store = Store.open(options.db)
    try:
        with open_farm(store) as farm:
            device = farm.device(options.device)
            contenders = line_up(options.asked, RUNTIMES[options.runtime], device.id)
            destination = comparison_path(options, device.id)
            destination.parent.mkdir(parents=True, exist_ok=True)
            with locked(destination.with_suffix(".lock"), _LOCK_S):
                made = _compare(options, contenders, device, farm, destination, log, progress)
                return asyncio.run(made), destination
    finally:
        store.close()


async def _compare(
    options: CompareOptions, contenders: Sequence[Contender], device: Device, farm: Farm, destination: Path, log: Log,
    progress: Log,
) -> Comparison:  # fmt: skip
    jobs = farm.jobs(None)
    asked = options.workloads or tasks(options.threads, options.repetitions, flash_attn=options.flash_attn)
    scratch = paths.home() / "work"
    protocol = Protocol(deadline_s=DEADLINE_S)
    workloads = {f"{task.at} tokens": task.workload for task in asked}
    preparer = Preparer(farm, jobs, protocol, scratch, log, options.accept_noise, workloads)
    patched = any(each.patched for each in contenders)
    spec = RuntimeSpace(name=options.runtime, quantisation=QUANTISATION, build="any" if patched else "stock")
    bench = await calibrated_bench(preparer, options.device, spec, "compare", replicate=options.replicate)
    log(f"{len(contenders)} models on {device.id}: about {_told(expected_seconds(contenders, asked, bench))}")
    entries = [(each, artifact_of(each, farm.store, bench.runtime, scratch)) for each in contenders]
    contest = Contest(bench, jobs, farm.store, protocol, options.accept_noise, options.replicate)
    setting = Setting(options.asked.family, bench, options.threads, options.flash_attn, tuple(asked), _now())

    def keep(standings: Standings, what: str) -> None:
        progress(what)
        write_record(destination, comparison(setting, contenders, standings))

    standings = await contest.hold(entries, asked, keep)
    return comparison(setting, contenders, standings)


def comparison_path(options: CompareOptions, device: str) -> Path:
    """Where a comparison is kept, in the family's folder or by itself: one file for each question.

    Raises:
        UnknownName: no such family.
    """
    asked = options.asked
    folder = paths.home() / "comparisons"
    if asked.family is not None:
        folder = family_folder(read_family(asked.family).name)
    key = content_hash(
        {
            "references": sorted(asked.references),
            "layouts": sorted(asked.layouts),
            "classes": sorted(asked.classes),
            "alone": asked.alone,
            "threads": options.threads,
            "flash_attn": options.flash_attn,
            "replicate": options.replicate,
            "runtime": options.runtime,
        }
    )
    return folder / f"comparison-{device}-{key[:8]}.json"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _told(seconds: float) -> str:
    if seconds < 60:
        return "a minute"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
