"""Requests to the coordinator that must have no effect, with the agent's name and secret."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import TypeVar

from benchmarks.faults.scene import Scene
from benchmarks.faults.stage import AGENT
from benchmarks.faults.work import fingerprint, patiently
from nas.core.plan import Pair, RawRun, RoundResult
from nas.core.wire import Failure, HeartbeatRequest, Job, LeaseRequest, ResultRequest
from nas.infra.store.rows import JobRow, JobState
from nas.measure.devices.agent.client import JobClient
from nas.measure.devices.transports.base import Lease

T = TypeVar("T")


def replay_after_end(scene: Scene) -> None:
    """Sends for a done job: its result, a false one, a failure, and the same under earlier epochs."""
    row = scene.row()
    if row.state is not JobState.DONE or row.epoch is None or row.result is None:
        return
    before = fingerprint(row)
    epoch = row.epoch
    again = [(_submit(scene, epoch, row.result), True), (_submit(scene, epoch, lie()), True)]
    for accepted, expected in again:
        if accepted is not expected:
            scene.problems.append(f"a duplicate under epoch {epoch} was {'not ' * expected}accepted")
    _refused(scene, epoch - 1)
    if _submit(scene, epoch, Failure(kind="infrastructure", message="a lie")):
        scene.problems.append("a failure of a job that is done was accepted")
    if not _cancelled(scene, epoch):
        scene.problems.append("the lease of a job that is done was renewed")
    if fingerprint(scene.row()) != before:
        scene.problems.append("a duplicate changed what was done")


def second_self(scene: Scene) -> None:
    """Leases the running job again, sometimes also uses the device, and sends requests under the earlier epoch."""
    row = scene.row()
    if row.state is not JobState.LEASED or row.epoch is None:
        scene.late = True
        return
    job = _lease(scene)
    if job is None or job.id != scene.order.job:
        scene.late = True
        return
    if job.epoch <= row.epoch:
        scene.problems.append(f"epoch {job.epoch} was granted after {row.epoch}")
    if scene.draw.choice < 0.5:
        with contextlib.closing(scene.post.transport()) as transport:
            transport.claim(Lease(scene.stage.enrolment.authority, job.epoch))
    _refused(scene, row.epoch)


def _refused(scene: Scene, epoch: int) -> None:
    """Asserts that requests under a past epoch are refused."""
    before: JobRow = scene.row()
    for what in (lie(), Failure(kind="infrastructure", message="a lie"), Failure(kind="refused", message="a lie")):
        if _submit(scene, epoch, what):
            scene.problems.append(f"accepted from the old epoch {epoch}: {what!r}"[:200])
    if not _cancelled(scene, epoch):
        scene.problems.append(f"a lease was renewed under the old epoch {epoch}")
    after = scene.row()
    if before.state is JobState.DONE and fingerprint(before) != fingerprint(after):
        scene.problems.append(f"epoch {epoch} changed what was done")


def lie() -> RoundResult:
    """Returns a false result."""
    report = {"v": 1, "load_ms": 1, "ttft_ms": 1, "decode_ns": [1], "info": {"answer": "a lie"}}
    raw = RawRun(exit_code=0, stdout=json.dumps(report), wall_s=1, started_at=0)
    return RoundResult(pairs=[Pair(reference=None, candidate=raw)])


def _submit(scene: Scene, epoch: int, what: RoundResult | Failure) -> bool:
    """Submits a result; returns whether it was accepted."""
    failure = what if isinstance(what, Failure) else None
    request = ResultRequest(
        agent=AGENT, device=scene.post.id, epoch=max(0, epoch), result=None if failure else what, failure=failure
    )
    return _patiently(scene, lambda client: client.submit(scene.order.job, request)).accepted


def _cancelled(scene: Scene, epoch: int) -> bool:
    request = HeartbeatRequest(agent=AGENT, device=scene.post.id, job=scene.order.job, epoch=max(0, epoch))
    return _patiently(scene, lambda client: client.heartbeat(request)).cancel


def _lease(scene: Scene) -> Job | None:
    request = LeaseRequest(agent=AGENT, device=scene.post.id, wait_s=0)
    return _patiently(scene, lambda client: client.lease(request)).job


def _patiently(scene: Scene, ask: Callable[[JobClient], T]) -> T:
    """Retries while another fault keeps the coordinator away."""
    with contextlib.closing(scene.stage.client()) as client:
        return patiently(lambda: ask(client))
