"""Who has logged in: sessions in memory, each as good as the API token that it was opened with."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass

from nas.store import api_tokens
from nas.store.rows import ApiToken
from nas.store.store import Store

LASTS_S = 12 * 3600.0
"""A session ends so long after it was opened."""
MOST = 1000
"""Sessions at once; the oldest ends where there would be more."""


@dataclass(frozen=True, slots=True)
class _Session:
    token: str
    until: float


class Sessions:
    """Sessions of one process: who logged in does so again after a restart.

    Args:
        store: knows the tokens; asked at every request, so that a revoked one ends its sessions at once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._open: OrderedDict[bytes, _Session] = OrderedDict()

    def open(self, token: str) -> str | None:
        """A new session's secret, for its cookie; None where the API token is not good."""
        if api_tokens.authenticate(self._store, token) is None:
            return None
        secret = secrets.token_urlsafe(32)
        with self._lock:
            self._open[_hash(secret)] = _Session(token, self._store.now() + LASTS_S)
            while len(self._open) > MOST:
                self._open.popitem(last=False)
        return secret

    def who(self, secret: str) -> ApiToken | None:
        """The token behind a session; None where it has ended."""
        with self._lock:
            session = self._open.get(_hash(secret))
        if session is None:
            return None
        token = api_tokens.authenticate(self._store, session.token) if self._store.now() < session.until else None
        if token is None:
            self.close(secret)
        return token

    def close(self, secret: str) -> None:
        """Ends a session; one that has ended is fine."""
        with self._lock:
            self._open.pop(_hash(secret), None)

    def form_token(self, bound_to: str) -> str:
        """What a form must send back, to show that one of our pages made it: for nobody else is it the same."""
        return hmac.new(self._key, bound_to.encode(), "sha256").hexdigest()


def _hash(secret: str) -> bytes:
    # What is in memory opens nothing by itself.
    return hashlib.sha256(secret.encode(errors="replace")).digest()
