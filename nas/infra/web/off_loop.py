"""Runs blocking calls, such as the database's, in threads of an event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

P = ParamSpec("P")
T = TypeVar("T")

_AT_ONCE = 8
"""Separate from the threads that stream files, so that slow downloads block no request. More threads would only wait
for the database's write lock."""

_limiter: RunVar[CapacityLimiter] = RunVar("off_loop")


async def off_loop(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a call in a thread and returns its result; a started call is awaited even if its caller is cancelled."""
    limiter = _limiter.get(None)
    if limiter is None:
        limiter = CapacityLimiter(_AT_ONCE)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(partial(call, *args, **kwargs), limiter=limiter)
