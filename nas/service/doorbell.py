"""Wakes who waits for the job table to change: threads for any change, lease requests for work of their own device."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Caller:
    """Who waits for work.

    Args:
        agent: that asks.
        loop: where it waits.
        called: set once there may be work, or it is to go.
    """

    agent: str
    loop: asyncio.AbstractEventLoop
    called: asyncio.Event
    _dismissed: bool = False

    def call(self) -> None:
        """From any thread."""
        self.loop.call_soon_threadsafe(self.called.set)

    def dismiss(self) -> None:
        """From any thread: the device is not served any more."""
        self._dismissed = True
        self.call()

    def dismissed(self) -> bool:
        """Whether nobody is there any more who could do the work."""
        return self._dismissed


class Doorbell:
    """Shared by the threads and event loops of a process."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._rung = 0
        self._callers: dict[str, set[Caller]] = {}
        self._closed = False

    def ring(self) -> None:
        """Something changed."""
        with self._condition:
            self._rung += 1
            self._condition.notify_all()

    def wait(self, seen: int, seconds: float) -> int:
        """Waits until it was rung more than `seen` times, or for `seconds`; how often it was rung."""
        with self._condition:
            self._condition.wait_for(lambda: self._rung != seen, seconds)
            return self._rung

    @property
    def count(self) -> int:
        """How often it was rung."""
        return self._rung

    @property
    def closed(self) -> bool:
        """Whether nobody shall wait any more."""
        return self._closed

    @contextmanager
    def waiting(self, device: str, agent: str) -> Iterator[Caller]:
        """Waits as `agent` until there may be work for `device`. Costs no thread.

        To be entered before a look at the table, so that what is queued right after that look is not missed.
        """
        caller = Caller(agent, asyncio.get_running_loop(), asyncio.Event())
        with self._condition:
            self._callers.setdefault(device, set()).add(caller)
            if self._closed:
                caller.called.set()
        try:
            yield caller
        finally:
            with self._condition:
                callers = self._callers[device]
                callers.remove(caller)
                if not callers:
                    del self._callers[device]

    def waited_for(self) -> frozenset[str]:
        """Devices for which somebody waits."""
        with self._condition:
            return frozenset(self._callers)

    def call(self, devices: Iterable[str]) -> None:
        """Wakes the lease requests for these devices."""
        with self._condition:
            for device in devices:
                for caller in self._callers.get(device, ()):
                    caller.call()

    def dismiss(self, agent: str, served: Collection[str]) -> None:
        """Wakes the agent's lease requests for other devices than it serves: nobody is there for them."""
        with self._condition:
            for device, callers in self._callers.items():
                for caller in callers:
                    if caller.agent == agent and device not in served:
                        caller.dismiss()

    def close(self) -> None:
        """Wakes all lease requests; from now on none waits."""
        with self._condition:
            self._closed = True
        self.call(self.waited_for())
        self.ring()
