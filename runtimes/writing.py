"""Model files: written next to their destination, hashed on the way, renamed into place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nas.core.errors import InfrastructureFailed
from nas.core.plan import PlanFile
from nas.measure.runtimes.recipe import Recipe

Piece = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Written:
    """The result of an export.

    Args:
        file: the model file.
        recipe: what was written instead of it.
    """

    file: PlanFile
    recipe: PlanFile | None = None


@contextlib.contextmanager
def replacing(destination: Path) -> Iterator[Path]:
    """Yields a path to write; it replaces `destination` if the block succeeds, and is removed if it fails.

    Raises:
        InfrastructureFailed: it cannot be written.
    """
    partial = destination.with_name(f"{destination.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        partial.replace(destination)
    except OSError as error:
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise InfrastructureFailed(f"cannot write {destination}: {why}") from error
    finally:
        partial.unlink(missing_ok=True)


def write_drawn(drawn: Recipe, path: Path, *, recipe: bool) -> Written:
    """Writes the file that `drawn` describes, or the recipe itself."""
    if recipe:
        return Written(hashed(drawn.content()), hashed([drawn.to_bytes()], path))
    return Written(hashed(drawn.content(), path))


def hashed(pieces: Iterable[Piece], path: Path | None = None) -> PlanFile:
    """Returns hash and size of `pieces`, and writes them to `path` where one is given."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") if path else contextlib.nullcontext() as out:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            if out:
                out.write(piece)
    return PlanFile(sha256=digest.hexdigest(), size=size)
