"""Ends of jobs on their way to the coordinator: on disk before the first try, so that a killed agent loses none."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from nas.core.durable import write_durably
from nas.core.protocol import Authority, JobId, ResultRequest

log = logging.getLogger(__name__)


class Parcel(BaseModel):
    """What is to be said of a job, and to whom: an epoch means something to the authority that counted it only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    authority: Authority
    job: JobId
    request: ResultRequest

    @property
    def file_name(self) -> str:
        """One per lease, so that what is written twice is there once."""
        return f"{self.authority}.{self.request.device}.{self.request.epoch}.json"


class Outbox:
    """The parcels of one agent. Safe for several threads.

    Args:
        folder: outlives the agent; made if missing.
        agent: name; parcels of others, who keep theirs in the same folder, are left alone.
    """

    def __init__(self, folder: Path, agent: str) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        found = (_read(path) for path in sorted(folder.glob("*.json")))
        self._parcels = {parcel.file_name: parcel for parcel in found if parcel and parcel.request.agent == agent}

    def put(self, parcel: Parcel) -> None:
        """Keeps it until `drop`; on disk, if the disk lets us."""
        with self._lock:
            self._parcels[parcel.file_name] = parcel
        try:
            write_durably(self._folder / parcel.file_name, parcel.model_dump_json().encode())
        except OSError as error:
            log.warning("a result is kept in memory only, and lost with this process: %s", error)

    def of(self, authority: str, device: str) -> list[Parcel]:
        """What waits for an authority about a device, oldest epoch first."""
        waiting = [parcel for parcel in self._all() if (parcel.authority, parcel.request.device) == (authority, device)]
        return sorted(waiting, key=lambda parcel: parcel.request.epoch)

    def devices(self, authority: str) -> set[str]:
        """Ids of devices about which something waits for an authority."""
        return {parcel.request.device for parcel in self._all() if parcel.authority == authority}

    def drop(self, parcel: Parcel) -> None:
        """It was accepted or refused."""
        with self._lock:
            self._parcels.pop(parcel.file_name, None)
        (self._folder / parcel.file_name).unlink(missing_ok=True)

    def _all(self) -> list[Parcel]:
        with self._lock:
            return list(self._parcels.values())


def _read(path: Path) -> Parcel | None:
    try:
        return Parcel.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        log.error("%s is no result that can be handed in: %s", path, error)
        return None
