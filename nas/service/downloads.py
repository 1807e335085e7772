"""Files for agents, by content hash: what a job that the agent holds now needs, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import HTTPException
from fastapi.responses import FileResponse
from starlette.responses import Response

from nas.core.errors import InfrastructureFailed
from nas.core.protocol import LOCAL_PATH_HEADER
from nas.store import jobs
from nas.store.store import Store

FindFile = Callable[[str], Path | None]

_BYTES: dict[str, Any] = {"content": {"application/octet-stream": {}}}
ANSWERS: dict[int | str, dict[str, Any]] = {200: _BYTES, 206: _BYTES, 416: {"description": "No such range"}}
"""What a request for a file may be answered with, for OpenAPI."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


class _File(FileResponse):
    """Streams, whole or the range that is asked for; an `If-Range` of another content gets all of it."""

    media_type = "application/octet-stream"
    chunk_size = 256 << 10
    max_ranges = 1


def answer(store: Store, find_file: FindFile, sha256: str, caller: str | None) -> Response:
    """The file, for the agent `caller`; for one on this machine, which is None, only where it lies.

    Raises:
        HTTPException: 403, no job that the agent holds needs it; 404, there is no such file.
        InfrastructureFailed: a job needs it, and it is gone.
    """
    if caller is not None and not _may_have(store, caller, sha256):
        raise HTTPException(403, f"no job that agent {caller!r} holds needs {sha256[:12]!r}")
    path = find_file(sha256) if _SHA256.fullmatch(sha256) else None
    if path is None or not path.exists():
        if any(sha256 in jobs.files(job.payload) for job in jobs.live(store)):
            raise InfrastructureFailed(f"file {sha256[:12]}, which a job needs, is not here any more")
        raise HTTPException(404, f"no file {sha256[:12]!r} here")
    if caller is None:
        # The agent shares this machine: it takes the file by path and verifies its hash.
        return Response(headers={LOCAL_PATH_HEADER: quote(str(path))})
    return _File(path, headers={"ETag": f'"{sha256}"'}, stat_result=path.stat())


def _may_have(store: Store, agent: str, sha256: str) -> bool:
    return any(sha256 in jobs.files(job.payload) for job in jobs.held(store, agent))
