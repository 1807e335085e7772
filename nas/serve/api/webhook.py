"""Notifications: a JSON message to a URL when a study ends or fails, and when a device becomes bad or good again."""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from nas.core.durable import write_durably
from nas.core.errors import InvalidInput, NasError
from nas.core.logs import visible
from nas.infra.store import devices
from nas.infra.store import listings as pages
from nas.infra.store.rows import Health, StudyState
from nas.infra.store.store import Store
from nas.infra.store.studies import INTERRUPTED

log = logging.getLogger(__name__)

STATE_FILE = "webhook.json"
EVERY_S, LONGEST_PAUSE_S = 5.0, 300.0
_TIMEOUT_S = 10.0
_LATEST = 200
"""Studies that are watched, newest first."""
_ENDED = (StudyState.COMPLETE.value, StudyState.STOPPED.value, StudyState.FAILED.value, INTERRUPTED)
_JUDGED = (Health.GOOD.value, Health.BAD.value)


class Message(BaseModel):
    """The body of a request.

    `state` is that of the study (complete, stopped, failed or interrupted) or the health of the device (bad or good).
    `text` says all in one line, under the name that Slack and Mattermost show.
    """

    event: Literal["study", "device"]
    name: str
    state: str
    reason: str | None
    at: float
    url: str
    text: str


class _Announced(BaseModel):
    """What the receiver knows: the state of every study by id, and the health of every device."""

    model_config = ConfigDict(extra="forbid")

    studies: dict[str, str]
    devices: dict[str, str]


def checked_url(url: str) -> str:
    """Returns the URL.

    Raises:
        InvalidInput: it is neither https nor http to this machine.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if host and (parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))):
        return url
    raise InvalidInput("is an https URL, or http to a loopback address", where="--webhook")


class Webhook:
    """Sends messages from a thread while the context is open.

    States are compared with those that the receiver was sent, which are in a file: changes while the coordinator was
    down are sent when it starts, a message that was not accepted is sent again after growing pauses, and the first
    start sends nothing. A message arrives twice if the coordinator is killed between the answer and the write.

    Args:
        store: the database.
        url: of the receiver; not logged, since it may be secret.
        folder: of the file.
        pages: URL of the coordinator's pages.
        every_s: seconds between two looks at the database.
    """

    def __init__(self, store: Store, url: str, folder: Path, pages: str, *, every_s: float = EVERY_S) -> None:
        self._store, self._url, self._pages, self._every_s = store, checked_url(url), pages, every_s
        self._file = folder / STATE_FILE
        self._stop = threading.Event()
        self._http = httpx.Client(timeout=_TIMEOUT_S, follow_redirects=False)
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(2 * _TIMEOUT_S)
        self._http.close()

    def send_changes(self) -> int:
        """Sends a message for each change; returns how many were accepted.

        Raises:
            httpx.HTTPError: the receiver cannot be reached, or refuses a message; it and later ones are sent again.
            NasError: the database or the file cannot be used.
        """
        known, sent = self._known(), 0
        first = known is None
        known = known or _Announced(studies={}, devices={})
        before = known.model_dump_json()
        try:
            for table, key, state, message in self._changes(known):
                if message is not None and not first:
                    self._post(message)
                    sent += 1
                table[key] = state
                if sent:
                    self._write(known)
        finally:
            if first or known.model_dump_json() != before:
                self._write(known)
        return sent

    def _changes(self, known: _Announced) -> Iterator[tuple[dict[str, str], str, str, Message | None]]:
        """Yields what changed: the table of the known states, its key, the new state, and the message, if any."""
        for row in reversed(pages.latest_studies(self._store, limit=_LATEST)):
            key, state = str(row.id), row.condition.state
            if known.studies.get(key) != state:
                ended = state in _ENDED
                yield (
                    known.studies,
                    key,
                    state,
                    self._message("study", row.name, state, row.condition.reason) if ended else None,
                )
        for device in devices.all(self._store):
            health, before = device.health.value, known.devices.get(device.id)
            if health in _JUDGED and health != before:
                wanted = health == Health.BAD.value or before is not None
                message = self._message("device", device.id, health, device.health_reason) if wanted else None
                yield known.devices, device.id, health, message

    def _message(self, event: Literal["study", "device"], name: str, state: str, reason: str | None) -> Message:
        text = f"{event} {name}: {state}{f': {reason}' if reason else ''}"
        folder = "studies" if event == "study" else "devices"
        return Message(
            event=event, name=name, state=state, reason=reason, at=self._store.now(),
            url=f"{self._pages}/{folder}/{quote(name, safe='')}", text=visible(text),
        )  # fmt: skip

    def _post(self, message: Message) -> None:
        with self._http.stream("POST", self._url, json=message.model_dump()) as response:  # its body is not read
            if not response.is_success:
                raise httpx.HTTPError(f"it answered {response.status_code}")

    def _known(self) -> _Announced | None:
        try:
            return _Announced.model_validate_json(self._file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def _write(self, known: _Announced) -> None:
        write_durably(self._file, known.model_dump_json().encode())

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            try:
                self.send_changes()
                pause_s = self._every_s
            except (httpx.HTTPError, NasError, OSError) as error:
                pause_s = min(max(2 * pause_s, self._every_s), LONGEST_PAUSE_S)
                # An error of the connection may name the URL, which may be secret.
                what = str(error) if type(error) is httpx.HTTPError else type(error).__name__
                log.warning("a webhook message is not delivered (%s); next try in %.0f s", what, pause_s)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
