"""Notifications: a JSON message to a URL when a study ends or fails, and when a device becomes bad or good again."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx
from pydantic import TypeAdapter, ValidationError

from nas.core.durable import write_durably
from nas.core.errors import InvalidInput, NasError
from nas.core.logs import visible
from nas.core.trust import open_async_http, open_http
from nas.infra.store import devices, listings
from nas.infra.store.rows import Health, StudyState
from nas.infra.store.store import Store
from nas.infra.store.studies import INTERRUPTED

log = logging.getLogger(__name__)

STATE_FILE = "webhook.json"
EVERY_S = 5.0
LONGEST_PAUSE_S = 300.0
_TIMEOUT_S = 10.0
"""Longest time of a message until the head of its answer."""
REFUSALS = 5
"""Answers 4xx to one message after which it is given up: a receiver that does not take it now never will."""
LONGEST_REASON = 500
"""Characters of a reason that are sent: receivers refuse long messages."""
_TRY_AGAIN = (408, 425, 429)
"""Answers 4xx of a receiver that is busy."""
_LATEST = 200
"""Studies that are watched, newest first."""
_END_STATES = (StudyState.COMPLETE, StudyState.STOPPED, StudyState.FAILED, INTERRUPTED)

_SUCCESS = range(200, 300)

_States = TypeAdapter(dict[str, str])


def checked_url(url: str) -> str:
    """Returns the URL.

    Raises:
        InvalidInput: it is neither https nor http to this machine.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
        local = host == "localhost" or (parts.scheme == "http" and ipaddress.ip_address(host).is_loopback)
        httpx.URL(url)  # which has rules of its own
    except (ValueError, httpx.InvalidURL):
        host, local = "", False
    if host and (parts.scheme == "https" or (parts.scheme == "http" and local)):
        return url
    raise InvalidInput("is an https URL, or http to a loopback address", where="--webhook")


@dataclass(frozen=True)
class _Refusal:
    """What became of a message: how often it was sent, was refused for good, and when it is sent again."""

    tries: int = 0
    final_tries: int = 0
    next_try: float = 0.0


class Webhook:
    """Sends messages from a thread while the context is open.

    States are compared with those that the receiver was sent, which are in a file: changes while the coordinator was
    down are sent when it starts, a message that was not accepted is sent again after growing pauses of its own, so that
    it holds up no other, and the first start sends nothing. A message that is refused for good is given up. A message
    arrives twice if the coordinator is killed between the answer and the write.

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
        self._refusals: dict[tuple[str, str], _Refusal] = {}  # (study or device, state)
        self._stop = threading.Event()
        open_http(url).close()  # says now what is wrong with the environment's proxy
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(2 * _TIMEOUT_S)

    def send_changes(self) -> int:
        """Sends a message for each change whose time has come; returns how many were accepted.

        Raises:
            httpx.HTTPError: the receiver cannot be reached; all messages are sent again.
            TimeoutError: it does not answer in time; the same.
            NasError: the database or the file cannot be used.
        """
        try:
            states, first = _States.validate_json(self._file.read_bytes()), False
        except (FileNotFoundError, ValidationError):
            states, first = {}, True
        original, count = dict(states), 0
        try:
            for kind, id, name, state, reason in self._present():
                key = f"{kind} {id}"
                before = states.get(key)
                if state == before:
                    continue
                if not first and (state in (*_END_STATES, Health.BAD) or (state == Health.GOOD and before is not None)):
                    refusal = self._refusals.get((key, state), _Refusal())
                    if self._store.clock.monotonic() < refusal.next_try:
                        continue
                    status = self._post(kind, name, state, reason)
                    if not self._is_done((key, state), name, status):
                        continue
                    count += status in _SUCCESS
                states[key] = state
                if count:  # what was accepted is not sent again
                    self._write(states)
        finally:
            if first or states != original:
                self._write(states)
        return count

    def _is_done(self, message: tuple[str, str], name: str, status: int) -> bool:
        """Returns whether a message was accepted or is given up; else it is tried again after a pause."""
        refusal = self._refusals.pop(message, _Refusal())
        if status in _SUCCESS:
            return True
        final = 300 <= status < 500 and status not in _TRY_AGAIN
        tries, final_tries = refusal.tries + 1, refusal.final_tries + final
        what = f"the webhook's message that {name} is {message[1]}"
        if final_tries >= REFUSALS:
            log.warning("%s is given up: it was answered %d, %d times", what, status, final_tries)
            return True
        pause_s = min(self._every_s * 2 ** min(tries - 1, 16), LONGEST_PAUSE_S)
        log.warning("%s is not delivered (it answered %d); next try in %.0f s", what, status, pause_s)
        self._refusals[message] = _Refusal(tries, final_tries, self._store.clock.monotonic() + pause_s)
        return False

    def _present(self) -> Iterator[tuple[str, str, str, str, str | None]]:
        """Yields kind, id, name, state and its reason of studies, and of devices whose health is known."""
        for study in reversed(listings.latest_studies(self._store, limit=_LATEST)):
            yield "study", str(study.id), study.name, study.condition.state, study.condition.reason
        for device in devices.all(self._store):
            if device.health in (Health.GOOD, Health.BAD):
                yield "device", device.id, device.id, device.health.value, device.health_reason

    def _post(self, kind: str, name: str, state: str, reason: str | None) -> int:
        """Sends a message and returns the status of the answer."""
        if reason is not None and len(reason) > LONGEST_REASON:
            reason = reason[: LONGEST_REASON - 1] + "…"
        message: dict[str, Any] = {
            "event": kind,
            "name": name,
            "state": state,
            "reason": reason,
            "at": self._store.now(),
            "url": f"{self._pages}/{'studies' if kind == 'study' else 'devices'}/{quote(name, safe='')}",
            "text": visible(f"{kind} {name}: {state}{f': {reason}' if reason else ''}"),
        }
        return asyncio.run(self._answer(message))

    async def _answer(self, message: dict[str, Any]) -> int:
        async with (
            asyncio.timeout(_TIMEOUT_S),
            open_async_http(self._url, timeout=_TIMEOUT_S) as http,
            http.stream("POST", self._url, json=message) as response,
        ):
            return response.status_code  # its body is not read

    def _write(self, states: dict[str, str]) -> None:
        write_durably(self._file, _States.dump_json(states))

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            try:
                self.send_changes()
                pause_s = self._every_s
            except (httpx.HTTPError, NasError, OSError) as error:
                pause_s = min(max(2 * pause_s, self._every_s), LONGEST_PAUSE_S)
                # Only its name: an error of the connection may name the URL, which may be secret.
                log.warning("no webhook message is delivered (%s); next try in %.0f s", type(error).__name__, pause_s)
