"""A content-addressed folder: `ab/ab12...` holds the bytes with that SHA-256, `bundles` copies under other names."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from nas.core.canonical import sha256_of
from nas.core.errors import InfrastructureFailed

BUNDLES = 16
"""Bundles of runners that are kept."""

_IN_USE_S = 3600.0
_ABANDONED_S = 86_400.0


class ContentFolder:
    """Files by content. Safe for several processes at once and for being killed at any moment.

    Args:
        root: created if missing.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path:
        """Returns where the content is stored, if it is."""
        return self.root / sha256[:2] / sha256

    def add(self, source: Path, sha256: str) -> Path:
        """Adds `source` by hard link (by copy across file systems) unless the content is present, and verifies it.

        Raises:
            InfrastructureFailed: the bytes are not `sha256`; what was stored is removed, so a retry starts over.
        """
        target = self.path(sha256)
        if source != target and not target.exists():
            with self.temporary(sha256) as temporary:
                _link_or_copy(source, temporary)
                self.settle(temporary, sha256)
            return target
        return self.verify(sha256)

    def verify(self, sha256: str) -> Path:
        """Returns the stored file after hashing it again.

        Raises:
            InfrastructureFailed: it is missing or damaged; damaged content is removed, so a retry fetches it again.
        """
        target = self.path(sha256)
        try:
            actual = sha256_of(target)
        except OSError as error:
            raise InfrastructureFailed(f"{target}: {error.strerror}") from error
        if actual != sha256:
            target.unlink(missing_ok=True)
            raise InfrastructureFailed(f"{target}: damaged, its SHA-256 is {actual}; removed")
        os.utime(target)
        return target

    @contextlib.contextmanager
    def temporary(self, sha256: str) -> Iterator[Path]:
        """Yields a free name next to the content's path; removed at the end."""
        folder = self.path(sha256).parent
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder) as temporary:
            yield Path(temporary) / "file"

    def partial(self, sha256: str) -> Path:
        """Returns the file into which a download is written; it outlives the process, so that a transfer can resume."""
        folder = self.path(sha256).parent
        folder.mkdir(exist_ok=True)
        return folder / f".{sha256}.part"

    def settle(self, temporary: Path, sha256: str) -> Path:
        """Moves a complete file to its path.

        Raises:
            InfrastructureFailed: its bytes are not `sha256`; it is removed.
        """
        actual = sha256_of(temporary)
        if actual != sha256:
            temporary.unlink()
            raise InfrastructureFailed(f"content of {sha256[:12]}: the bytes have SHA-256 {actual[:12]} instead")
        target = self.path(sha256)
        os.utime(temporary)
        temporary.replace(target)
        return target

    def trim(self, limit: int, keep: Collection[str] = ()) -> int:
        """Removes files, least recently used first, until at most `limit` bytes are left. Returns the bytes removed.

        Those of the last hour stay, as a job may be about to open them. What killed processes left goes after a day.
        Of the bundles of runners the last `BUNDLES` stay.

        Args:
            limit: bytes to keep.
            keep: hashes that are never removed.
        """
        now, files, bundles = time.time(), [], []
        for abandoned in (*self.root.glob("??/.tmp-*"), *self.root.glob("bundles/.tmp-*")):
            with contextlib.suppress(FileNotFoundError):
                if abandoned.stat().st_mtime < now - _ABANDONED_S:
                    shutil.rmtree(abandoned, ignore_errors=True)
        for path in self.root.glob("bundles/[!.]*"):
            with contextlib.suppress(FileNotFoundError):
                bundles.append((path.stat().st_mtime, path))
        for used, path in sorted(bundles)[:-BUNDLES]:
            if used < now - _IN_USE_S:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.root.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):  # others move and remove files meanwhile
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        removed = 0
        for used, size, path in sorted(files):
            if total - removed <= limit or used > now - _IN_USE_S:
                break
            if path.name not in keep:
                path.unlink(missing_ok=True)
                removed += size
        return removed


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except FileNotFoundError as error:
        raise InfrastructureFailed(f"{source}: {error.strerror}") from error
    except OSError:  # file systems say in many ways that they have no hard links, or not to this one
        shutil.copyfile(source, target)
