"""This machine as a device."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from nas.core.canonical import content_hash, sha256_of
from nas.core.durable import locked, write_durably
from nas.core.errors import InfrastructureFailed
from nas.measure.devices.files import ContentFolder
from nas.measure.devices.transports.base import TEXT_LIMIT, CommandResult, Lease, StaleLease, never
from nas.measure.devices.transports.process import run_supervised


class Fence:
    """Refuses epochs older than the last one that ran on this machine, across processes: one small file per authority.

    Args:
        folder: created when first used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def admit(self, lease: Lease) -> None:
        """Records the epoch.

        Raises:
            StaleLease: a newer one was here.
            InfrastructureFailed: the disk failed, or others kept the lock.
        """
        path = self._folder / lease.authority
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / ".lock"):
                text = path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""
                last = int(text) if text.isdecimal() else 0
                if lease.epoch < last:
                    raise StaleLease(str(self._folder), lease, last)
                if lease.epoch > last:
                    write_durably(path, str(lease.epoch).encode())
        except OSError as error:
            raise InfrastructureFailed(f"{self._folder}: {error.strerror}") from error


_KEPT_BYTES = 8 << 30
_COMMAND_S = 10.0
_BASE_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


def connect(address: str, cache: Path) -> LocalTransport:
    """Returns the transport of this machine; `address` must be empty."""
    assert not address, address
    return LocalTransport(cache)


class LocalTransport:
    """Runs processes on this machine. Pushed files are hard links where the file system allows it.

    Args:
        cache: folder for content and runners; sharing the folder of the agent's downloads saves even the link.
        root: the folder that `read_text` and `names` take for "/".
    """

    def __init__(self, cache: Path, root: Path = Path("/")) -> None:
        self._content = ContentFolder(cache)
        self._root = root
        self._fence = Fence(cache / "fences")
        self._lease: Lease | None = None

    def connect(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""

    def claim(self, lease: Lease) -> None:
        """Checks the lease; no run of an earlier one can be left, because a runner dies with its agent."""
        self._lease = lease
        self._fence.admit(lease)

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        deadline_s: float,
        output_limit: int,
        cpu_affinity: Sequence[int] = (),
        cancelled: Callable[[], bool] = never,
    ) -> CommandResult:
        """Runs a program as `run_supervised` does."""
        if self._lease:
            self._fence.admit(self._lease)
        return run_supervised(
            argv,
            env=_BASE_ENV | dict(env),
            affinity=cpu_affinity,
            deadline_s=deadline_s,
            output_limit=output_limit,
            cancelled=cancelled,
        )

    def push(self, local: Path, sha256: str) -> str:
        """Copies a file into the cache; one that is in the cache is only verified."""
        return str(self._content.add(local, sha256))

    def make(self, sha256: str, produce: Callable[[str], None]) -> str:
        """Makes a file in the cache, and removes the least recently used ones to bound its size."""
        if self._content.path(sha256).exists():
            return str(self._content.verify(sha256))
        with self._content.temporary(sha256) as temporary:
            produce(str(temporary))
            try:
                path = self._content.settle(temporary, sha256)
            except OSError as error:
                raise InfrastructureFailed(f"{temporary}: {error.strerror}") from error
            except InfrastructureFailed as error:  # this machine wrote it: it was not lost on the way
                raise InfrastructureFailed(f"made here: {error}") from error
        self._content.trim(_KEPT_BYTES, keep=[sha256])
        return str(path)

    def bundle(self, files: Mapping[str, str]) -> str:
        """Copies the files, so that the mode of the pushed ones stays unchanged."""
        assert all(name == os.path.basename(name) and name not in ("", ".", "..") for name in files), files  # noqa: PTH119
        folder = self._content.root / "bundles" / content_hash(dict(files))
        if not folder.exists():
            self._make_bundle(folder, files)
        for name, sha256 in files.items():
            if _hash(folder / name) != sha256:
                shutil.rmtree(folder, ignore_errors=True)
                raise InfrastructureFailed(f"{folder / name}: damaged; removed")
        os.utime(folder)
        return str(folder)

    def _make_bundle(self, folder: Path, files: Mapping[str, str]) -> None:
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder.parent) as temporary:
            build = Path(temporary) / "bundle"
            build.mkdir()
            for name, sha256 in files.items():
                try:
                    shutil.copyfile(self._content.path(sha256), build / name)
                except OSError as error:
                    raise InfrastructureFailed(f"{name}: {error}") from error
                (build / name).chmod(0o555)
            try:
                build.rename(folder)
            except OSError as error:
                # Another process may have made the same bundle meanwhile; its content is verified like ours.
                if not folder.exists():
                    raise InfrastructureFailed(f"{folder}: {error.strerror}") from error

    def read_text(self, path: str) -> str:
        with self._under_root(path).open("rb") as file:
            return file.read(TEXT_LIMIT).decode(errors="replace")

    def names(self, folder: str) -> list[str]:
        return sorted(path.name for path in self._under_root(folder).iterdir())

    def read_many(self, paths: Sequence[str], commands: Sequence[str] = ()) -> dict[str, str | OSError]:
        contents: dict[str, str | OSError] = {}
        for path in self._expanded(paths):
            try:
                contents[path] = self.read_text(path)
            except OSError as error:
                contents[path] = error
        return contents | {command: self._output(command) for command in commands}

    def _expanded(self, paths: Sequence[str]) -> Iterator[str]:
        for path in paths:
            if "*" in path or "?" in path:
                matches = sorted(self._root.glob(path[1:]))
                yield from (f"/{match.relative_to(self._root)}" for match in matches)
            else:
                yield path

    def _output(self, command: str) -> str | OSError:
        program = command.split()[0]
        if shutil.which(program, path=_BASE_ENV["PATH"]) is None:
            return FileNotFoundError(errno.ENOENT, "No such command", program)
        self._content.root.mkdir(parents=True, exist_ok=True)
        try:
            done = subprocess.run(
                ["sh", "-c", command],
                env=_BASE_ENV,
                cwd=self._content.root,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_COMMAND_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return error if isinstance(error, OSError) else TimeoutError(errno.ETIMEDOUT, f"no end of {command!r}")
        return done.stdout[:TEXT_LIMIT].decode(errors="replace")

    def _under_root(self, path: str) -> Path:
        assert path.startswith("/"), path
        return self._root / path[1:]


def _hash(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise InfrastructureFailed(f"{path}: {error.strerror}") from error
