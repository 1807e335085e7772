"""The epochs that ran on this machine, one small file per authority."""

from __future__ import annotations

import fcntl
from pathlib import Path

from nas.core.errors import InfrastructureFailed
from nas.devices.transports.base import Lease, StaleLease


class Fence:
    """Refuses older epochs than the last one, across processes.

    Args:
        folder: made when first used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def admit(self, lease: Lease) -> None:
        """Notes the epoch.

        Raises:
            StaleLease: a newer one was here.
            InfrastructureFailed: the disk failed.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._admit_locked(lease)
        except OSError as error:
            raise InfrastructureFailed(f"{self._folder}: {error.strerror}") from error

    def _admit_locked(self, lease: Lease) -> None:
        path = self._folder / lease.authority
        last = int(path.read_text()) if path.exists() else 0
        if lease.epoch < last:
            raise StaleLease(f"epoch {lease.epoch} of {lease.authority} is over: {last} was here")
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(str(lease.epoch))
        temporary.replace(path)
