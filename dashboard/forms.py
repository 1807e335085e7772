"""Posted forms, as browsers send them: fields, and files that are text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qs

from fastapi import HTTPException
from starlette.requests import Request

_FIELDS, _PARTS = "application/x-www-form-urlencoded", "multipart/form-data"
_MAX_FORM = 1 << 20
_MAX_FIELDS = 64
_BOUNDARY = re.compile(r"""(?:^|;)\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))\s*(?:;|$)""", re.IGNORECASE)
_DISPOSITION = re.compile(rb'content-disposition:\s*form-data\s*;.*?(?<=[\s;])name="([^"]*)"', re.IGNORECASE)


async def read_form(request: Request, most: int = _MAX_FORM) -> dict[str, str]:
    """The fields of a posted form, files by their content; of fields that stand twice the first counts.

    Args:
        request: whose body was not read yet.
        most: bytes of it.

    Raises:
        HTTPException: 413, 415 or 422, it is none that our pages send.
    """
    sent_as = request.headers.get("Content-Type", "")
    kind = sent_as.partition(";")[0].strip().lower()
    if kind not in (_FIELDS, _PARTS):
        raise HTTPException(415, f"send a form ({_FIELDS} or {_PARTS})")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise HTTPException(413, f"more than {most} bytes")
    try:
        return _of_parts(bytes(body), sent_as) if kind == _PARTS else _of_fields(bytes(body))
    except ValueError:  # UnicodeDecodeError is one, too
        raise HTTPException(422, "this is no form of UTF-8 text") from None


def _of_fields(body: bytes) -> dict[str, str]:
    fields = parse_qs(
        body.decode(), keep_blank_values=True, strict_parsing=True, max_num_fields=_MAX_FIELDS, errors="strict"
    )
    return {name: values[0] for name, values in fields.items()}


def _of_parts(body: bytes, sent_as: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for name, content in _parts(body, sent_as):
        fields.setdefault(name.decode(), content.decode("utf-8-sig"))
    return fields


def _parts(body: bytes, sent_as: str) -> Iterator[tuple[bytes, bytes]]:
    """Name and content of every part (RFC 7578). Parts inside of parts, which browsers never send, are content."""
    found = _BOUNDARY.search(sent_as)
    if found is None:
        raise ValueError("no boundary")
    delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1")
    # The first delimiter may stand at the very beginning.
    before, *parts = (b"\r\n" + body).split(delimiter, _MAX_FIELDS + 1)
    if before or not parts or not parts[-1].startswith(b"--"):
        raise ValueError("not whole")
    for part in parts[:-1]:
        head, separator, content = part.partition(b"\r\n\r\n")
        named = next(filter(None, map(_DISPOSITION.match, head.split(b"\r\n"))), None)
        if not separator or named is None:
            raise ValueError("a part without a name")
        yield named[1], content
