"""One fault: whom it hits, when, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from faults.stage import Post, Stage
from faults.watch import Watch
from faults.weather import Disturbance
from faults.work import Conduct, Order, Works
from nas.store import attempts, jobs
from nas.store.rows import JobRow

Moment = Literal["queued", "fetching", "pushing", "running", "ending"]

_MOMENT_WITHIN_S = 120.0
_LOOK_S = 0.03


@dataclass(frozen=True, slots=True)
class Draw:
    """What chance decided about a fault; the seed and the number of the fault decide it again.

    Args:
        number: of the fault.
        kind: name.
        moment: of the job's life when it happens.
        delay_s: after that moment.
        seconds: that it lasts.
        conduct: of the job's runner.
        run_s: that the runner takes.
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
        watch: sees what runs.
        draw: what chance decided.
        order: the job that is hit.
        act: notes that the fault is at work while its context is open.
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
        """The job as it is now."""
        row = jobs.get(self.stage.store, self.order.job)
        assert row is not None, self.order
        return row

    def until_moment(self) -> None:
        """Waits for the moment that was drawn; a job that ended before makes the fault late, not void."""
        there: dict[Moment, Callable[[], bool]] = {
            "queued": lambda: True,
            "fetching": lambda: _filled(self._partial()),
            "pushing": lambda: any(_filled(file) for file in (self.post.files / "tmp").glob("*/file")),
            "running": lambda: self.watch.runs(self.order.tag),
            "ending": lambda: self.watch.seen(self.order.tag) > 0 and not self.watch.runs(self.order.tag),
        }
        self.late = not self.until(there[self.draw.moment])
        time.sleep(self.draw.delay_s)
        self.late = self.late or self.ended()

    def until_failed(self) -> None:
        """Waits until the first try has failed."""
        self.until(lambda: bool(attempts.of_key(self.stage.store, self.order.key)))

    def until(self, condition: Callable[[], bool], seconds: float = _MOMENT_WITHIN_S) -> bool:
        """Whether the condition comes true before the job ends."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            if self.ended():
                return False
            time.sleep(_LOOK_S)
        return False

    def until_ended(self, seconds: float) -> bool:
        """Whether the job ends in time."""
        end = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return self.ended()

    def ended(self) -> bool:
        """Whether the job is done or failed."""
        return self.row().state not in jobs.LIVE

    def slay(self, *words: str) -> None:
        """SIGKILL to the device's processes with such arguments; where there are none any more, the fault is late."""
        if not self.post.machine.processes(*words):
            self.late = True
            return
        self.post.machine.kill(*words)

    def record(self) -> dict[str, Any]:
        """What is kept of it."""
        return asdict(self.draw) | {"device": self.post.id, "job": self.order.job, "late": self.late}

    def _partial(self) -> Path:
        sha256 = self.order.model.sha256
        return self.stage.agent_cache / sha256[:2] / f".{sha256}.part"


def _filled(file: Path) -> bool:
    try:
        return bool(file.stat().st_size)
    except OSError:
        return False
