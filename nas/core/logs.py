"""Logs of long-running processes: lines for people, or JSON lines with `--log-json`; never a secret.

Text from outside is escaped in them, and by `visible` in terminals and other line-based output.

The subject of a line is in fields (request, agent, device, job, epoch ...), not only in its text:

    with log_fields(job="1f0c.0", epoch=3):
        log.info("leased")
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

from nas.core.durable import write_durably

LOG_BYTES = 2 << 20
"""Length at which `bound_log` cuts a log."""
_FIELDS: ContextVar[Mapping[str, object]] = ContextVar("log fields")
_HIDDEN = "[hidden]"
_IN_URLS = (re.compile(r"(?<=://)[^/@\s:]*:[^@\s'\"]+(?=@)"), re.compile(r"(?<=[?&]password=)[^&#\s'\"]+"))
"""Passwords in URLs, mainly of databases, with their user."""

_SECRETS = (
    *_IN_URLS,
    re.compile(r"(?i)(?<=\bbearer )\S{16,}|(?<=authorization: basic )\S+"),
    re.compile(r"(?<=\bhilnas-enrol\.)[\w-]+"),
    re.compile(r"(?<=\bhilnas\.)[\w.-]+\.[\w-]{43}\b"),
)
"""Texts that contain a secret: an Authorization header, an enrolment line, an API token, a password in a URL."""


@contextmanager
def log_fields(**fields: object) -> Iterator[None]:
    """Adds fields to every line that this thread or task logs in the context."""
    token = _FIELDS.set({**_FIELDS.get({}), **fields})
    try:
        yield
    finally:
        _FIELDS.reset(token)


def configure_logs(*, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Sends the process's logs to `stream` (default: stderr), in place of any earlier configuration."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if as_json else Lines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # httpx: each request would be logged twice, by the library and by its caller. The others report their own start.
    for library in ("httpx", "alembic", "gguf", "uvicorn"):
        logging.getLogger(library).setLevel(logging.WARNING)


def bound_log(path: Path) -> None:
    """Cuts a log that processes append to and that is too long: its newer half is kept as `NAME.1`.

    Lines that are written meanwhile may be lost. Where it cannot be cut, it stays.
    """
    with suppress(OSError):
        if path.stat().st_size > LOG_BYTES:
            with suppress(OSError):  # a log that fills the disk has to be cut, too
                write_durably(path.with_name(f"{path.name}.1"), end_of(path, LOG_BYTES // 2))
            os.truncate(path, 0)


def end_of(path: Path, size: int) -> bytes:
    """Returns the last `size` bytes of a file."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read()


def visible(text: str, keep: str = "") -> str:
    """Escapes characters that would start a line, move the cursor or change the reading direction.

    Args:
        text: anything.
        keep: characters that are not escaped.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )


def without_secrets(text: str) -> str:
    """Returns `text` with everything that looks like a secret replaced."""
    return _without(_SECRETS, text)


def without_passwords(text: str) -> str:
    """Returns `text` with the passwords in its URLs replaced; tokens and enrolment lines stay."""
    return _without(_IN_URLS, text)


def _without(secrets: Iterable[re.Pattern[str]], text: str) -> str:
    for secret in secrets:
        text = secret.sub(_HIDDEN, text)
    return text


class Lines(logging.Formatter):
    """`2026-11-21T10:00:00Z INFO nas.measure.devices.agent.agent: leased  job=1f0c.0 epoch=3`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        text = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}{' ' * bool(fields)}{fields}"
        # A record is one line, and those of a traceback are indented, so text from outside cannot fake a record.
        trouble = "".join(f"\n    {visible(line)}" for line in _traceback(self, record).splitlines())
        return without_secrets(visible(text) + trouble)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the fields, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": _time(record), "level": record.levelname, "logger": record.name}
        entry |= {"message": without_secrets(record.getMessage())}
        for name, value in _fields(record).items():
            plain = value if isinstance(value, int | float | bool | None) else without_secrets(str(value))
            entry.setdefault(name, plain)  # type: ignore[arg-type]
        if trouble := _traceback(self, record):
            entry["traceback"] = without_secrets(trouble)
        return json.dumps(entry)


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    return _FIELDS.get({}) | getattr(record, "fields", {})  # type: ignore[operator, no-any-return]


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""
