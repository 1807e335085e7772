"""Files on disk: outputs of commands, atomic replacement, file locks, scratch folders, and private files."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nas.core.errors import InfrastructureFailed, InvalidInput

_DEADLINE_S = 30.0
_PAUSE_S = 0.01
_LOCK = ".lock"
_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def locked(
    path: Path,
    deadline_s: float = _DEADLINE_S,
    *,
    shared: bool = False,
    waiting: Callable[[], None] = lambda: None,
    meanwhile: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Holds a lock on a file, created if missing; the kernel releases it when the holder dies.

    `waiting` is called once if it has to wait, `meanwhile`, which may block, before each further try.

    Raises:
        InfrastructureFailed: others held the lock for `deadline_s`.
    """
    deadline, reported = time.monotonic() + deadline_s, False
    with path.open("a+b") as file:  # NFS shares a lock only on a file that can be read
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InfrastructureFailed(f"{path}: another process kept it locked for {deadline_s:g} s") from None
                if not reported:
                    waiting()
                reported = True
                meanwhile()
                time.sleep(_PAUSE_S)
        yield


def read_private(path: Path) -> bytes | None:
    """Returns the content of a file that holds a secret; None where there is no such file.

    Raises:
        InfrastructureFailed: it cannot be read, or others on this machine may read it.
    """
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InfrastructureFailed(f"{path}, {error.strerror}: let this user read it") from error
    if mode & _FOR_OTHERS:
        raise InfrastructureFailed(f"{path} is open to others, mode {stat.S_IMODE(mode):04o}: run `chmod 600 {path}`")
    return content


def write_durably(path: Path, content: bytes) -> None:
    """Replaces a file atomically: after a kill or a power cut it holds the old content or the new. Mode 0600."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def output_file(path: Path, *, reads: Iterable[Path] = (), flag: str = "--output") -> Iterator[Path]:
    """Yields a new, empty file to write; if the block succeeds, its content becomes that of `path`.

    A regular file, also one that a symbolic link names, is replaced atomically and has the mode of a new file. What is
    none (a device, a pipe, `/dev/stdout`) is opened and written through.

    Args:
        path: of the output.
        reads: files that the command reads, and folders whose files it reads: none of them is overwritten.
        flag: that carried the path, for messages.

    Raises:
        InvalidInput: there is no such folder, the path is a folder, it cannot be written, or the command reads it.
    """
    replaced = _replaced(path, reads, flag)
    folder = Path(tempfile.gettempdir()) if replaced is None else replaced.parent
    scratch = folder / f".hilnas-{secrets.token_hex(8)}.partial"
    scratch.touch(exist_ok=False)
    mode = stat.S_IMODE(scratch.stat().st_mode)
    try:
        yield scratch
        scratch.chmod(mode)
        if replaced is None or not _moved(scratch, replaced):
            with scratch.open("rb") as content, _opened(path) as destination:
                shutil.copyfileobj(content, destination)
    finally:
        scratch.unlink(missing_ok=True)


def require_output(path: Path, *, reads: Iterable[Path] = (), flag: str = "--output") -> None:
    """Checks before long work that its output can be written: see `output_file`."""
    _replaced(path, reads, flag)


def write_output(path: Path, content: bytes, *, flag: str = "--output") -> None:
    """Writes an output of a command: see `output_file`."""
    with output_file(path, flag=flag) as scratch:
        scratch.write_bytes(content)


@contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """Yields an empty folder for files meanwhile; removes it, and those that killed processes left of this name.

    A folder is locked while it is used, and the kernel releases the lock when its process dies.
    """
    prefix = f"hilnas-{name}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError), (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix=prefix) as text:
        folder = Path(text)
        with (folder / f"{_LOCK}.new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / f"{_LOCK}.new").rename(folder / _LOCK)  # only now another process may try it
            yield folder


def _replaced(path: Path, reads: Iterable[Path], flag: str) -> Path | None:
    """Returns the file that an output replaces; None where it is written through."""
    try:
        status = path.stat() if path.exists() else None
        target = path.resolve()
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise InvalidInput(f"{path} is a folder; name a file", where=flag)
        if status is None and not target.parent.is_dir():
            raise InvalidInput(f"there is no folder {target.parent}", where=flag)
        if status is not None and any(os.path.samestat(status, other.stat()) for other in _files(reads)):
            raise InvalidInput(f"{path} is a file that this command reads; name another one", where=flag)
        if status is not None and (_descriptor(path) is not None or not stat.S_ISREG(status.st_mode)):
            return None
        if os.access(target.parent, os.W_OK | os.X_OK):
            return target
        if status is None or not os.access(target, os.W_OK):
            raise InvalidInput(f"{path} cannot be written by this user", where=flag)
        return None
    except (OSError, RuntimeError) as error:  # a loop of links, a name that is too long
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidInput(f"{path}: {reason}", where=flag) from error


def _files(reads: Iterable[Path]) -> Iterator[Path]:
    for path in reads:
        if path.is_dir():
            yield from (file for file in path.iterdir() if file.is_file())
        elif path.exists():
            yield path


def _moved(scratch: Path, target: Path) -> bool:
    """Replaces the target; returns False where it can only be written, as a file that is mounted by itself."""
    try:
        scratch.replace(target)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def _opened(path: Path) -> BinaryIO:
    """Opens an output to be written through: a descriptor of this process, such as `/dev/stdout`, as it is."""
    descriptor = _descriptor(path)
    return path.open("wb") if descriptor is None else os.fdopen(os.dup(descriptor), "wb")


def _descriptor(path: Path) -> int | None:
    """Returns the number of this process's descriptor that a path names; None if it names none."""
    descriptors = Path("/proc/self/fd").resolve()
    while path.is_symlink():
        if path.parent.resolve() == descriptors:
            return int(path.name)
        path = path.parent / path.readlink()
    return None
