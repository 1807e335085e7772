"""A backup of a coordinator: one compressed tar archive of its database and of the files in `$NAS_HOME`.

The database is copied by SQLite's own backup, so the coordinator may run meanwhile. Files are copied as they are at
that moment, after the database: what it names is there, unless it was removed since. A database on a server is left to
the server's own tools.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sqlite3
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import URL

from nas.core.clock import Clock
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.infra.store.engine import sqlite_file
from nas.infra.store.migrate import REVISION

MANIFEST, DATABASE = "backup.json", "hilnas.db"
_FORMAT = 1
_LOST = "lost+found"
"""Folder of the file system itself, at the root of a volume."""
_NOT_SAVED = ("artifacts", "work", "library", _LOST)
"""Folders of `$NAS_HOME`; ours are computed again when they are needed."""
_OF_PROCESSES = (".lock", ".log", ".log.1", ".turn", ".sock", ".partial")
"""Endings of files that belong to running processes."""
_MANIFEST_BYTES = 1 << 16


class Backup(NamedTuple):
    """What is in an archive.

    Args:
        files: number of files, without the database.
        has_database: whether the database is among them.
        hilnas: version that wrote it.
        revision: of its database's schema.
    """

    files: int
    has_database: bool
    hilnas: str
    revision: str


def write_backup(url: URL, home: Path, destination: Path, clock: Clock) -> Backup:
    """Writes the archive, which only this user may read: it has the keys.

    Args:
        url: of the database.
        home: `$NAS_HOME`.
        destination: of the archive, not in `home`.
        clock: tells when.

    Raises:
        InvalidInput: there is nothing to back up, or a file of that name already.
        InfrastructureFailed: the database cannot be read, or the archive not written.
    """
    database = sqlite_file(url)
    if not (database or home).exists():
        raise InvalidInput("there is nothing to back up", where=str(database or home))
    try:
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as scratch:
            partial = Path(scratch) / destination.name
            partial.touch(mode=0o600)
            backup = _pack(database, home, partial, clock)
            _name(partial, destination)
    except FileExistsError:
        raise InvalidInput("exists already: name a new file", where=str(destination)) from None
    except OSError as error:
        at = f" ({error.filename})" if error.filename else ""
        raise InfrastructureFailed(f"cannot write {destination}: {error.strerror or error}{at}") from error
    return backup


def _name(partial: Path, destination: Path) -> None:
    """Gives a file its name; raises `FileExistsError` if another file has it."""
    try:
        os.link(partial, destination)
    except FileExistsError:
        raise
    except OSError:  # memory cards and shared folders may have no links
        if destination.exists():
            raise FileExistsError(destination) from None
        partial.rename(destination)


def _pack(database: Path | None, home: Path, destination: Path, clock: Clock) -> Backup:
    count = 0
    # `dereference`: of a file with several names, each is saved with its content.
    with tarfile.open(destination, "w:gz", dereference=True) as archive:
        if database:
            copy = destination.with_name(DATABASE)
            _copy_database(database, copy)
            archive.add(copy, DATABASE, filter=_anonymous)
        for path in _files(home, database):
            try:
                archive.add(path, str(Path("home") / path.relative_to(home)), recursive=False, filter=_anonymous)
            except FileNotFoundError:
                continue  # removed since it was listed
            count += 1
        backup = Backup(count, database is not None, version("hilnas"), REVISION)
        content = json.dumps({"v": _FORMAT, "at": clock.now(), **backup._asdict()}).encode()
        entry = tarfile.TarInfo(MANIFEST)
        entry.size, entry.mode = len(content), 0o600
        archive.addfile(entry, io.BytesIO(content))
    return backup


def restore_backup(source: Path, home: Path) -> Backup:
    """Unpacks an archive as a new `$NAS_HOME`, all or nothing.

    Raises:
        InvalidInput: `home` is not empty, or the archive is damaged, incomplete, or of a newer hilnas.
        InfrastructureFailed: it cannot be written.
    """
    present = home.exists()
    if present and (not home.is_dir() or any(path.name != _LOST for path in home.iterdir())):
        raise InvalidInput(f"{home} is not empty: restore into a new folder, and set NAS_HOME to it", where="NAS_HOME")
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        # A folder that is there is filled, not replaced: it may be a volume, or in a folder of another user.
        folder = home if present else home.parent
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{home.name}.restoring.") as scratch:
            new, database = Path(scratch) / "home", Path(scratch) / DATABASE
            backup = _unpack(source, Path(scratch))
            new.mkdir(exist_ok=True)
            if backup.has_database:
                database.rename(new / DATABASE)
            new.chmod(0o700)
            if not present:
                new.rename(home)
                return backup
            with suppress(PermissionError):
                home.chmod(0o700)
            for path in sorted(new.iterdir()):
                path.rename(home / path.name)
    except OSError as error:
        raise InfrastructureFailed(f"cannot restore to {home}: {error.strerror or error}") from error
    return backup


def _unpack(source: Path, folder: Path) -> Backup:
    try:
        with tarfile.open(source, "r:gz") as archive:
            for entry in archive:
                if not (entry.isreg() and (entry.name in (MANIFEST, DATABASE) or entry.name.startswith("home/"))):
                    raise InvalidInput(f"is no backup of hilnas: it holds {entry.name!r}", where=str(source))
                archive.extract(entry, folder, filter="data")
    except FileNotFoundError:
        raise InvalidInput("no such file", where=str(source)) from None
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidInput(f"is no backup of hilnas, or damaged: {error}", where=str(source)) from error
    return _manifest(source, folder)


def _manifest(source: Path, folder: Path) -> Backup:
    path = folder / MANIFEST
    if not path.is_file() or path.stat().st_size > _MANIFEST_BYTES:
        raise InvalidInput("is incomplete: it lacks its last file", where=str(source))
    try:
        content = json.loads(path.read_bytes())
        is_newer, writer = content["v"] > _FORMAT, content["hilnas"]
        backup = Backup(0, False, writer, "") if is_newer else Backup(*(content[name] for name in Backup._fields))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"is damaged: {MANIFEST} cannot be read", where=str(source)) from error
    if is_newer:
        raise InvalidInput(f"was written by a newer hilnas ({writer})", where=str(source))
    count = sum(path.is_file() for path in (folder / "home").rglob("*"))
    if count != backup.files or (folder / DATABASE).is_file() != backup.has_database:
        raise InvalidInput(f"is damaged: it holds {count} of {backup.files} files", where=str(source))
    return backup


def _copy_database(source: Path, target: Path) -> None:
    try:
        uri = f"{source.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as database, closing(sqlite3.connect(target)) as copy:
            database.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.Error as error:
        raise InfrastructureFailed(f"cannot read {source}: {error}") from error


def _files(home: Path, database: Path | None) -> Iterator[Path]:
    """Yields the regular files of a home, without what is rebuilt and what belongs to processes."""
    databases = {home / DATABASE, database and database.resolve()}
    for folder, names, files in os.walk(home, onerror=_refuse):
        if Path(folder) == home:
            names[:] = sorted(name for name in names if name not in _NOT_SAVED)
        for name in sorted(files):
            path = Path(folder) / name
            belongs = {path.with_name(name.removesuffix(suffix)) for suffix in ("", "-wal", "-shm", "-journal")}
            if not (name.endswith(_OF_PROCESSES) or belongs & databases or path.is_symlink()) and path.is_file():
                yield path


def _refuse(error: OSError) -> None:
    """Raises an error of listing a folder, unless it was removed since."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
