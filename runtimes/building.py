"""What every build of a runtime needs: one builder at a time, a product that is there whole or not at all.

A build is made in a temporary folder beside its final one and renamed into place when it is done, whenever the process
dies. A manifest in it makes it whole.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed
from nas.core.plan import PlanFile, Runner

Log = Callable[[str], None]

MANIFEST = "manifest.json"
LOCK_S = 7200.0


def build_once(final: Path, what: str, needed_bytes: int, make: Callable[[Path], Path], log: Log) -> None:
    """Makes `final` unless it is there.

    Args:
        final: the build's folder, named by its id.
        what: is built, for messages.
        needed_bytes: of free disk.
        make: builds in the temporary folder that it is handed; returns the product's folder in it.
        log: gets progress.

    Raises:
        InfrastructureFailed: the disk is full, another process never stops building, or what `make` raises.
    """
    folder = final.parent
    folder.mkdir(parents=True, exist_ok=True)
    if (final / MANIFEST).exists():
        return

    def waiting() -> None:
        log(f"another process is building {what}: waiting for it")

    with _full_disk_told(folder, what), locked(folder / ".lock", LOCK_S, waiting=waiting):
        if (final / MANIFEST).exists():  # the one who held the lock before may have made it
            return
        for dead in folder.glob(".building-*"):  # we hold the lock: whoever made these was killed
            shutil.rmtree(dead)
        _need_disk(folder, needed_bytes)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as work:
            product = make(Path(work))
            shutil.rmtree(final, ignore_errors=True)
            product.rename(final)


def write_runner(folder: Path, runner: Runner) -> None:
    """Writes the manifest, which comes last and makes a build whole."""
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(runner.model_dump_json(indent=1))
    partial.replace(folder / MANIFEST)


def is_whole(folder: Path, runner: Runner) -> bool:
    """Whether every file of `runner` lies in `folder` at its full size."""
    return all(_has_size(folder / name, file.size) for name, file in runner.files.items())


def plan_file(path: Path) -> PlanFile:
    """A file by content."""
    with path.open("rb") as file:
        return PlanFile(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=path.stat().st_size)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _need_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{free >> 20} MB free, a build needs {needed >> 20}")


@contextmanager
def _full_disk_told(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise InfrastructureFailed(
            f"building {what}: the disk of {folder} is full ({error.strerror}); free space or set NAS_CACHE"
        ) from error
