"""Reading of what is large: beside the requests that want it, which are told how far it is."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Hashable
from typing import Self

from nas.core.errors import InfrastructureFailed, NasError

log = logging.getLogger(__name__)

PATIENCE_S = 0.5
"""A request waits so long before it is told to come again."""


_SWITCH_S = 0.0005
"""How long a reader runs before a request may. A page waits for its turn some fifty times: 5 ms each are 0.3 s."""


class BeingRead(InfrastructureFailed):
    """What was asked for is being read: it is there when one asks again.

    Args:
        what: such as "trials of study 'x'".
        done: how many have been read.
        total: how many there are.
    """

    def __init__(self, what: str, done: int, total: int) -> None:
        super().__init__(f"{what} are being read: {done} of {total}")
        self.what, self.done, self.total = what, done, total


class Readers:
    """Threads that read, one for each thing; at the end of the context all are abandoned, and waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._threads: dict[Hashable, threading.Thread] = {}
        self._usual_s = sys.getswitchinterval()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with self._lock:
            left = [*self._threads.values()]
        for thread in left:
            thread.join()

    def check(self) -> None:
        """To be called between pieces by who reads.

        Raises:
            InfrastructureFailed: the server ends; nobody needs the rest.
        """
        if self._ended.is_set():
            raise InfrastructureFailed("the server ends")

    def read(self, key: Hashable, read: Callable[[], None], patience_s: float | None) -> bool:
        """Whether what `key` names has been read, or could not be, within so many seconds; else it goes on.

        Without `patience_s`, however long that takes.

        What fails is written to the log only: who asks without a thread gets the error itself.
        """
        with self._lock:
            thread = self._threads.get(key)
            if thread is None:
                thread = threading.Thread(target=self._run, args=(key, read), name=f"reading {key}", daemon=True)
                self._threads[key] = thread
                sys.setswitchinterval(_SWITCH_S)
                thread.start()
        thread.join(patience_s)
        return not thread.is_alive()

    def _run(self, key: Hashable, read: Callable[[], None]) -> None:
        try:
            read()
        except NasError as error:
            if not self._ended.is_set():
                log.warning("%s cannot be read: %s", key, error)
        finally:
            with self._lock:
                del self._threads[key]
                if not self._threads:
                    sys.setswitchinterval(self._usual_s)
