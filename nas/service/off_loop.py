"""Calls that block, such as the database's, from an event loop."""

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
"""Apart from the threads that stream files, so that slow downloads hold up nobody. More would only wait for the
database's write lock, and for each other."""

_limiter: RunVar[CapacityLimiter] = RunVar("off_loop")


async def off_loop(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls it in a thread; once begun it is waited for, even when its caller is cancelled."""
    limiter = _limiter.get(None)
    if limiter is None:
        limiter = CapacityLimiter(_AT_ONCE)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(partial(call, *args, **kwargs), limiter=limiter)
