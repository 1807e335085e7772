"""`nas gc`: remove unused files."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption, open_store
from nas.cli.output import JsonFlag, print_json, say
from nas.core import paths
from nas.core.errors import InvalidInput
from nas.core.units import parse_size
from nas.infra.store import artifacts, leases, studies
from nas.infra.store.store import Store
from nas.measure.devices.attachments import agent_cache
from nas.measure.devices.files import ContentFolder
from nas.measure.runtimes import RUNTIMES

app = command_app()

_IN_USE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Freed:
    """Bytes removed per kind, and bytes of the artifacts kept (above the limit if all are needed)."""

    artifacts: int
    agent_cache: int
    checkpoints: int
    programs: int
    library: int
    types: int
    artifacts_kept: int


@app.command()
def gc(
    keep: Annotated[str, typer.Option("--keep", help="Size limit per kind of file, such as 500MB or 20GB.")] = "20GB",
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Remove unused model files, checkpoints, compiled programs, blocks of `nas adapt` and quantised files.

    The least recently used ones of each kind go first. Quantised files are those that `nas compare --types` made.

    Files of running measurements, reference models and Pareto fronts of finished studies are always kept, and so is
    the library in $NAS_HOME while `nas adapt` runs.
    """
    try:
        limit = parse_size(keep)
    except InvalidInput as error:
        raise InvalidInput(error.message, where="--keep") from None
    with open_store(db) as store:
        done = collect(store, limit)
    if json:
        print_json(dataclasses.asdict(done))
    else:
        for kind in ("artifacts", "agent_cache", "checkpoints", "programs", "library", "types"):
            say(f"{kind.replace('_', ' ')}: removed {getattr(done, kind) / 1e6:.1f} MB")
        say(f"{done.artifacts_kept / 1e6:.1f} MB of artifacts kept")


def collect(store: Store, limit_bytes: int) -> Freed:
    """Reduces each kind of file to `limit_bytes`, keeping files of running jobs, Pareto fronts and references.

    Checkpoints are only removed while no study of this database runs, those of the last hour never, as other databases
    may have studies here: training without one restarts, with the same result. Export caches of runtimes are rebuilt
    on demand.
    """
    done = artifacts.collect(store, limit_bytes)
    cache = ContentFolder(agent_cache()).trim(limit_bytes)
    programs = sum(runtime.trim(limit_bytes) for runtime in RUNTIMES.values())
    return Freed(
        artifacts=done.freed_bytes,
        agent_cache=cache,
        checkpoints=_checkpoints(store, limit_bytes),
        programs=programs,
        library=_library(limit_bytes),
        types=_types(limit_bytes),
        artifacts_kept=done.kept_bytes,
    )


def _library(limit_bytes: int) -> int:
    folder = paths.home() / "library"
    if not folder.is_dir():
        return 0
    from nas.train.adapt.library import trim  # loads PyTorch

    return trim(folder, limit_bytes)


def _types(limit_bytes: int) -> int:
    from nas.train.adapt.made_types import trim  # loads llama.cpp's formats

    return trim(limit_bytes)


def _checkpoints(store: Store, limit_bytes: int) -> int:
    if any(leases.holder(store, study.id) is not None for study in studies.all(store)):
        return 0
    written: dict[Path, float] = {}
    sizes: dict[Path, int] = {}
    for folder in filter(Path.is_dir, (paths.home() / "work" / "checkpoints").glob("*")):
        with contextlib.suppress(FileNotFoundError):  # a study of another database removes its own meanwhile
            size, at = sum(file.stat().st_size for file in folder.iterdir()), folder.stat().st_mtime
            sizes[folder], written[folder] = size, at
    excess = sum(sizes.values()) - limit_bytes
    removed = 0
    for folder in sorted(written, key=written.__getitem__):
        if removed >= excess or written[folder] > time.time() - _IN_USE_S:
            break
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        removed += sizes[folder]
    return removed
