"""Plan files from the coordinator, kept by content."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import httpx

from nas.core.errors import InfrastructureFailed
from nas.core.plan import PlanFile
from nas.core.protocol import LOCAL_PATH_HEADER
from nas.devices.client import JobClient
from nas.devices.content import ContentFolder

_PARTIAL = 206


class Downloads:
    """Files fetched once, resumed where a transfer broke off, and verified before they get their name.

    Args:
        client: where from.
        folder: where to; may be shared with a local device's cache.
    """

    def __init__(self, client: JobClient, folder: ContentFolder) -> None:
        self._client = client
        self._folder = folder

    def fetch(self, file: PlanFile) -> Path:
        """See `FileSource.fetch`. What is already there is not hashed again: pushing does that.

        Raises:
            InfrastructureFailed: the transfer broke off, the disk failed, or the bytes are wrong.
        """
        target = self._folder.path(file.sha256)
        if target.exists() and target.stat().st_size == file.size:
            return target
        try:
            return self._download(file)
        except OSError as error:
            raise InfrastructureFailed(f"download of {file.sha256[:12]}: {error}") from error

    def _download(self, file: PlanFile) -> Path:
        part = self._folder.partial(file.sha256)
        have = part.stat().st_size if part.exists() else 0
        with self._client.file(file.sha256, have if have < file.size else 0) as response:
            local = response.headers.get(LOCAL_PATH_HEADER)
            if local and self._client.local:
                return self._folder.add(Path(unquote(local)), file.sha256)
            _save(response, part, file.size)
        return self._folder.settle(part, file.sha256)


def _save(response: httpx.Response, part: Path, size: int) -> None:
    resumed = response.status_code == _PARTIAL
    with part.open("ab" if resumed else "wb") as out:
        for chunk in response.iter_bytes():
            out.write(chunk)
            if out.tell() > size:
                part.unlink()
                raise InfrastructureFailed(f"download: more than the {size} bytes that the plan names")
    if (have := part.stat().st_size) < size:
        raise InfrastructureFailed(f"download broke off after {have} of {size} bytes; the next try goes on from there")
