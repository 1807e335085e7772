"""One fault: the affected device and job, the moment, and the result."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.faults.disturbances import Disturbance
from benchmarks.faults.stage import Post, Stage
from benchmarks.faults.watch import Watch
from benchmarks.faults.work import Conduct, Order, Works, patiently
from nas.infra.store import jobs, outcomes
from nas.infra.store.rows import JobRow

Moment = Literal["queued", "fetching", "pushing", "running", "ending"]

_MOMENT_WITHIN_S = 120.0
_LOOK_S, _READ_S = 0.03, 0.2
"""Between looks at the machines, and at the database."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Parameters of a fault, reproducible from the seed and its number.

    Args:
        number: of the fault.
        kind: name.
        moment: state of the job in which it happens.
        delay_s: after that moment.
        seconds: its duration.
        conduct: of the job's runner.
        run_s: duration of the runner.
        size: of its model, bytes.
        choice: between variants of a kind.
    """

    number: int
    kind: str
    moment: Moment
    delay_s: float
    seconds: float
    conduct: Conduct
    run_s: float
    size: int
    choice: float


@dataclass
class Scene:
    """A fault with its job.

    Args:
        stage: the farm.
        post: the device.
        works: makes jobs.
        watch: observes runners.
        draw: parameters of the fault.
        order: the affected job.
        act: records the disturbance while its context is open.
    """

    stage: Stage
    post: Post
    works: Works
    watch: Watch
    draw: Draw
    order: Order
    act: Callable[[], AbstractContextManager[Disturbance]]
    problems: list[str] = field(default_factory=list)
    late: bool = False

    def begin(self) -> None:
        """Queues the job."""
        self.works.enqueue(self.order)

    def row(self) -> JobRow:
        """Returns the current row of the job."""
        row = patiently(lambda: jobs.get(self.stage.store, self.order.job))
        assert row is not None, self.order
        return row

    def until_moment(self) -> None:
        """Waits for the drawn moment; if the job ended before, the fault is late but still counts."""
        sha256 = self.order.model.sha256
        conditions: dict[Moment, Callable[[], bool]] = {
            "queued": lambda: True,
            "fetching": lambda: _filled(self.stage.agent_cache / sha256[:2] / f".{sha256}.part"),
            "pushing": lambda: any(_filled(file) for file in (self.post.files / "tmp").glob("*/file")),
            "running": lambda: self.watch.runs(self.order.tag),
            "ending": lambda: self.watch.run_count(self.order.tag) > 0 and not self.watch.runs(self.order.tag),
        }
        self.late = not self.until(conditions[self.draw.moment])
        time.sleep(self.draw.delay_s)
        self.late = self.late or self.has_ended()

    def until_failed(self) -> None:
        """Waits until the first attempt has failed."""

        def failed() -> bool:
            return bool(patiently(lambda: outcomes.attempts_of_key(self.stage.store, self.order.key)))

        self.until(failed, look_s=_READ_S)

    def until(self, condition: Callable[[], bool], seconds: float = _MOMENT_WITHIN_S, look_s: float = _LOOK_S) -> bool:
        """Waits for a condition; returns whether it became true before the job ended."""
        end, read = time.monotonic() + seconds, 0.0
        while (now := time.monotonic()) < end:
            if condition():
                return True
            if now >= read + _READ_S:
                if self.has_ended():
                    return False
                read = time.monotonic()
            time.sleep(look_s)
        return False

    def until_ended(self, seconds: float) -> bool:
        """Waits for the job's end; returns whether it ended in time."""
        end = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < end:
            time.sleep(_READ_S)
        return self.has_ended()

    def has_ended(self) -> bool:
        """Returns whether the job is done or failed."""
        return self.row().state not in jobs.LIVE

    def slay(self, *words: str) -> None:
        """Sends SIGKILL to the device's processes with such arguments; without any, the fault is late."""
        pids = self.post.machine.processes(*words)
        self.late = self.late or not pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def record(self) -> dict[str, Any]:
        """Returns the line for the state file."""
        return asdict(self.draw) | {"device": self.post.id, "job": self.order.job, "late": self.late}


def _filled(file: Path) -> bool:
    try:
        return bool(file.stat().st_size)
    except OSError:
        return False
