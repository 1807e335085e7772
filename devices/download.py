"""Plan files from the coordinator, kept by content."""

from __future__ import annotations

import os
import time
from pathlib import Path
from urllib.parse import unquote

import httpx

from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed
from nas.core.plan import PlanFile
from nas.core.protocol import LOCAL_PATH_HEADER
from nas.devices.client import JobClient
from nas.devices.content import ContentFolder

_PARTIAL = 206
_TRANSFER_S = 600.0
"""One try takes no longer. What it brought stays, so that the next one ends sooner."""

_KEPT_BYTES = 8 << 30


class Downloads:
    """Files fetched once, resumed where a transfer broke off, and verified before they get their name.

    Safe for several threads and processes: who wants what another one fetches, waits for it.

    Args:
        client: where from.
        folder: where to; may be shared with a local device's cache.
    """

    def __init__(self, client: JobClient, folder: ContentFolder) -> None:
        self._client = client
        self._folder = folder
        self._locks = folder.root / "locks"
        self._locks.mkdir(exist_ok=True)

    def fetch(self, file: PlanFile) -> Path:
        """See `FileSource.fetch`. What is already there is not hashed again: pushing does that.

        Raises:
            InfrastructureFailed: the transfer broke off, the disk failed, or the bytes are wrong.
        """
        try:
            with locked(self._locks / file.sha256[:2], deadline_s=_TRANSFER_S):
                return self._known(file) or self._download(file)
        except OSError as error:
            raise InfrastructureFailed(f"download of {file.sha256[:12]}: {error}") from error

    def _known(self, file: PlanFile) -> Path | None:
        target = self._folder.path(file.sha256)
        if not target.exists() or target.stat().st_size != file.size:
            return None
        os.utime(target)
        return target

    def _download(self, file: PlanFile) -> Path:
        part = self._folder.partial(file.sha256)
        have = part.stat().st_size if part.exists() else 0
        with self._client.file(file.sha256, have if have < file.size else 0) as response:
            local = response.headers.get(LOCAL_PATH_HEADER)
            if local and self._client.local:
                return self._folder.add(Path(unquote(local)), file.sha256)
            _save(response, part, file.size)
        target = self._folder.settle(part, file.sha256)
        self._folder.trim(_KEPT_BYTES, keep=[file.sha256])
        return target


def _save(response: httpx.Response, part: Path, size: int) -> None:
    resumed = response.status_code == _PARTIAL
    end = time.monotonic() + _TRANSFER_S
    with part.open("ab" if resumed else "wb") as out:
        for chunk in response.iter_bytes():
            out.write(chunk)
            if out.tell() > size:
                part.unlink()
                raise InfrastructureFailed(f"download: more than the {size} bytes that the plan names")
            if time.monotonic() > end:
                break
    if (have := part.stat().st_size) < size:
        raise InfrastructureFailed(f"download broke off after {have} of {size} bytes; the next try goes on from there")
