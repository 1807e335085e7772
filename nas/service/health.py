"""Health checks of devices: the reference model alone, queued when a device is due, and judged when it has run.

One keeper per coordinator process. Everything that it remembers is in the database, under keys that follow from the
device's own row, so that several keepers over one database queue and judge each check once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nas.core.canonical import result_key
from nas.core.errors import InfrastructureFailed, NasError, Unsupported
from nas.core.plan import Plan, Round, Runner
from nas.core.protocol import on_the_way
from nas.core.space import Protocol
from nas.runtimes import RUNTIMES
from nas.runtimes.base import Artifact, Runtime
from nas.service.admissions import Admissions
from nas.service.check_verdict import Verdict, judge_check
from nas.service.references import (
    CALIBRATION_RUNS,
    CHECK_RUNS,
    calibration_name,
    reference_model,
    reference_plan,
)
from nas.store import calibrations, checks, jobs
from nas.store.jobs import CHECK_PRIORITY
from nas.store.rows import Blame, Calibration, CheckOutcome, DeviceRow, JobKind, JobRow, JobState
from nas.store.store import Store

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_AT_A_LOOK = 25
"""Devices whose check goes on at one look: where a thousand are due at once, agents need not wait for all of them."""

_STOP_S = 5.0
_REMEMBERED_S = 10.0
"""So long `AnyDevice` goes by what it found for devices of a kind, before it looks through the builds again."""

_PROTOCOL = Protocol()
"""Of no space: a device is checked alike whoever uses it."""

PlanOf = Callable[[DeviceRow], Plan]
"""A device's reference run. Raises `NasError` where nobody can check it now."""


class HealthKeeper:
    """Checks devices that are due, in a thread, while the context is open.

    Args:
        store: where devices and jobs are.
        ring: called after a job was queued.
        plan_of: gives the reference run of a device.
        among: ids of the devices that this process checks; None: whatever comes.
    """

    def __init__(
        self, store: Store, ring: Callable[[], None], plan_of: PlanOf, among: Collection[str] | None = None
    ) -> None:
        self._store, self._ring, self._plan_of, self._among = store, ring, plan_of, among
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            try:
                self.look()
            except NasError as error:
                log.warning("devices cannot be checked now: %s", error)

    def look(self) -> None:
        """Brings checks that are due one step further, those that waited longest first.

        Raises:
            InfrastructureFailed: the database cannot be used.
        """
        for device in checks.due(self._store, among=self._among, most=_AT_A_LOOK):
            rounds = jobs.of_key(self._store, check_key(device))
            if not rounds:
                self._begin(device)
            elif rounds[-1].state not in jobs.LIVE:
                self._go_on(device, rounds)

    def _begin(self, device: DeviceRow) -> None:
        try:
            plan = self._plan_of(device)
        except NasError as error:
            self._end(device, Verdict(CheckOutcome.UNSURE, f"it cannot be checked: {error}"), None)
            return
        self._queue(device, plan, 0, CHECK_RUNS if self._known(device, plan) else CALIBRATION_RUNS)

    def _go_on(self, device: DeviceRow, rounds: list[JobRow]) -> None:
        last = rounds[-1]
        verdict = _not_run(last) or self._judge(device, rounds)
        if verdict is not None:
            self._end(device, verdict, last)
        elif len(rounds) <= _PROTOCOL.max_attempts:
            cool_down_s = _PROTOCOL.cool_down_s * 2 ** (len(rounds) - 1)
            self._queue(device, last.payload.candidate, len(rounds), last.payload.repetitions, cool_down_s)

    def _judge(self, device: DeviceRow, rounds: list[JobRow]) -> Verdict | None:
        plan = rounds[-1].payload.candidate
        known = self._known(device, plan)
        results = [row.result for row in rounds if row.result is not None]
        final = len(rounds) > _PROTOCOL.max_attempts
        return judge_check(results, RUNTIMES[plan.runner.runtime], known, _PROTOCOL, final=final)

    def _queue(self, device: DeviceRow, plan: Plan, number: int, runs: int, cool_down_s: float = 0.0) -> None:
        round_ = Round(candidate=plan, repetitions=runs, cool_down_s=cool_down_s)
        jobs.enqueue(
            self._store, check_key(device), round_, device=device.id, number=number, kind=JobKind.CHECK,
            priority=CHECK_PRIORITY,
        )  # fmt: skip
        self._ring()

    def _end(self, device: DeviceRow, verdict: Verdict, last: JobRow | None) -> None:
        at = last.updated if last else self._store.now()
        number = device.check_number
        with self._store.write():
            if checks.conclude(self._store, device.id, number, verdict.outcome, verdict.reason, at) and last:
                self._keep(device, verdict, last)
        if verdict.outcome is not CheckOutcome.PASSED and verdict.reason != device.health_reason:
            log.warning("%s: health check: %s", device.id, verdict.reason)
        self._ring()

    def _keep(self, device: DeviceRow, verdict: Verdict, last: JobRow) -> None:
        plan = last.payload.candidate
        place = (device.id, plan.runner.runtime, calibration_name(plan))
        if verdict.calibration_ms is not None:
            calibrations.put(self._store, *place, verdict.calibration_ms, {"ms": list(verdict.times_ms)})
        known = self._known(device, plan)
        if known is not None and verdict.runs:
            calibrations.note_runs(self._store, place, last.id, verdict.runs, known.reference_ms)

    def _known(self, device: DeviceRow, plan: Plan) -> Calibration | None:
        return calibrations.get(self._store, device.id, plan.runner.runtime, calibration_name(plan))


@dataclass(frozen=True, slots=True)
class _Kind:
    target: str
    features: frozenset[str]
    libc: str | None


@dataclass(frozen=True, slots=True)
class _Reference:
    runtime: Runtime
    runner: Runner
    model: Artifact


class AnyDevice:
    """Reference runs for whatever device comes, with the first runtime that has a build for it.

    Which build that is depends on the kind of device: its target, processor features and C library. To find out means
    to go through all builds on the disk, so it is remembered for some seconds.

    Args:
        store: keeps the reference models.
        runners: where the runners are admitted.
        scratch: folder for files being written.
    """

    def __init__(self, store: Store, runners: Admissions, scratch: Path) -> None:
        self._store, self._runners, self._scratch = store, runners, scratch
        self._found: dict[_Kind, tuple[float, _Reference | str]] = {}

    def plan(self, device: DeviceRow) -> Plan:
        """The device's reference run.

        Raises:
            InfrastructureFailed: no runtime has a build for it.
        """
        about = device.device
        found = self._remembered(_Kind(about.target, frozenset(about.cpu_features), about.libc))
        if isinstance(found, str):
            raise InfrastructureFailed(found)
        return reference_plan(found.runtime, found.runner, found.model, about)

    def _remembered(self, kind: _Kind) -> _Reference | str:
        now = self._store.clock.monotonic()
        self._found = {each: known for each, known in self._found.items() if now < known[0] + _REMEMBERED_S}
        if kind not in self._found:
            self._found[kind] = now, self._find(kind)
        return self._found[kind][1]

    def _find(self, kind: _Kind) -> _Reference | str:
        """What a device of that kind runs, or why there is nothing."""
        reasons: list[str] = []
        for runtime in RUNTIMES.values():
            for patched in (False, True):
                try:
                    runner = runtime.runner(kind.target, kind.features, patched=patched, libc=kind.libc)
                    self._runners.admit(runner, runtime.runner_folder(runner))
                    model = reference_model(self._store, self._scratch, runtime, runtime.quantisations[0])
                    return _Reference(runtime, runner, model)
                except (InfrastructureFailed, Unsupported) as error:
                    reasons.append(str(error))
        return "; ".join(reasons)


def check_key(device: DeviceRow) -> str:
    """The result key of a device's present check."""
    return result_key("check", device=device.id, number=device.check_number)


def _not_run(last: JobRow) -> Verdict | None:
    """The end of a check whose job has no result."""
    if last.state is JobState.DONE:
        return None
    if last.state is JobState.FAILED and on_the_way(last.message or ""):
        return Verdict(CheckOutcome.UNSURE, f"the health check did not reach it: {last.message}")
    if last.state is JobState.FAILED and last.blame is not Blame.REFUSED:
        return Verdict(CheckOutcome.FAILED, f"the health check could not be run: {last.message}")
    return Verdict(CheckOutcome.UNSURE, f"the health check was {last.blame or last.state}: {last.message}")
