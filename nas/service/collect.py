"""What `nas gc` removes, oldest use first: artifacts, the agent's copies of them, checkpoints, lowered programs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from nas.core import paths
from nas.devices.content import ContentFolder
from nas.devices.places import agent_cache
from nas.runtimes.executorch.templates import trim_templates
from nas.store import artifact_gc, leases, studies
from nas.store.store import Store


@dataclass(frozen=True, slots=True)
class Freed:
    """Bytes removed, by kind; and the bytes of artifacts that stay, which may exceed the limit by what is needed."""

    artifacts: int
    agent_cache: int
    checkpoints: int
    programs: int
    artifacts_kept: int


def collect(store: Store, limit_bytes: int) -> Freed:
    """Brings each kind down to `limit_bytes`. Files of running jobs, of fronts and of references stay.

    Checkpoints are only touched while no study runs: a training without one begins anew, to the same result. A program
    that ExecuTorch lowered is lowered again when it is wanted again.

    Raises:
        InfrastructureFailed: a file cannot be removed.
    """
    done = artifact_gc.collect(store, limit_bytes)
    cache = ContentFolder(agent_cache()).trim(limit_bytes)
    programs = trim_templates(limit_bytes)
    return Freed(done.freed_bytes, cache, _checkpoints(store, limit_bytes), programs, done.kept_bytes)


def _checkpoints(store: Store, limit_bytes: int) -> int:
    held = (leases.current(store, study.id) for study in studies.all(store))
    if any(lease is not None and lease.expires > store.now() for lease in held):
        return 0
    folders = [path for path in (paths.home() / "work" / "checkpoints").glob("*") if path.is_dir()]
    sizes = {folder: sum(file.stat().st_size for file in folder.iterdir()) for folder in folders}
    excess = sum(sizes.values()) - limit_bytes
    removed = 0
    for folder in sorted(folders, key=lambda each: each.stat().st_mtime):
        if removed >= excess:
            break
        shutil.rmtree(folder)
        removed += sizes[folder]
    return removed
