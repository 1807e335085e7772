"""Keeps the certificate of a server that runs for months valid and up to date."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Self

from nas.core.errors import NasError
from nas.service.tls import Certificates

log = logging.getLogger(__name__)


class Renewal:
    """TLS settings whose certificate is looked at every hour, in a thread, while the context is open.

    Args:
        certificates: issue it.
        names: gives what it must be good for; asked each time, because a machine's addresses change.
        every_s: seconds between looks.
    """

    def __init__(
        self, certificates: Certificates, names: Callable[[], Sequence[str]], *, every_s: float = 3600.0
    ) -> None:
        self._certificates, self._names, self._every_s = certificates, names, every_s
        self._newest = certificates.context(names())
        self.context = self._newest
        """For the server. New connections get the newest certificate, those that are open keep theirs."""
        self.context.sni_callback = self._switch
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="certificate", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _switch(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._newest = self._certificates.context(self._names())
            except (NasError, OSError) as error:
                log.warning("the server's certificate cannot be renewed: %s", error)
