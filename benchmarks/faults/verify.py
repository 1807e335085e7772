"""Checks every job when it ends, and the database and logs at the end of the campaign."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from benchmarks.faults.disturbances import Disturbances, cause
from benchmarks.faults.kinds import DAMAGED, KINDS
from benchmarks.faults.scene import Scene
from benchmarks.faults.stage import Stage
from benchmarks.faults.work import ENDS, KILLED, Order, fingerprint, judged, patiently
from nas.core.wire import OWN_FILE
from nas.infra.store import devices, jobs, outcomes
from nas.infra.store.rows import Attempt, Blame, CheckOutcome, DeviceEventKind, Health, JobRow, JobState
from nas.infra.store.store import Store

_TROUBLE = re.compile(
    r"^\s*Traceback|^[A-Za-z_.]*(Error|Exception): |Exception in ASGI| status=50[0-24-9] |result lost|in memory only"
)
_UNAVAILABLE = re.compile(r"(?m)^(\S+) WARNING .* status=503 .*")
_ACCEPTED = re.compile(r"job (\S+), epoch (\d+): accepted")
_WHILE_IT_RAN = "infrastructure"
_INFRASTRUCTURE = (_WHILE_IT_RAN, "interrupted")
_MANY = 5


def job_problems(store: Store, order: Order, kind: str, disturbances: Disturbances) -> Iterator[str]:
    """Yields problems with the end of a job."""
    row = jobs.get(store, order.job)
    assert row is not None, order
    tries = [attempt for attempt in outcomes.attempts_of_key(store, order.key) if attempt.job == order.job]
    for attempt in tries:
        named_cause = cause(attempt.message)
        if attempt.kind not in _INFRASTRUCTURE:
            yield f"a try ended as {attempt.kind}: {attempt.message[:200]}"
        elif named_cause is None or not disturbances.excuses(named_cause, order.device, attempt.at):
            yield f"a failure without a cause ({named_cause}): {attempt.message[:200]}"
    checks = devices.history(store, order.device, kind=DeviceEventKind.CHECK)
    passed = [check.at for check in checks if check.what == CheckOutcome.PASSED]
    yield from _end_problems(row, order, kind, tries, passed)


def _end_problems(row: JobRow, order: Order, kind: str, tries: list[Attempt], passed: list[float]) -> Iterator[str]:
    if row.state is JobState.DONE:
        truth = {ENDS[order.conduct]} | ({KILLED} if KINDS[kind].kills else set())
        if (verdict := judged(row, order)) not in truth:
            yield f"done, and judged {verdict!r} instead of {' or '.join(sorted(truth))}"
    elif row.state is not JobState.FAILED:
        yield f"not ended: {row.state.value}, {len(tries)} failed tries"
    elif row.blame is Blame.CANDIDATE:
        running = [attempt.at for attempt in tries if attempt.kind == _WHILE_IT_RAN]
        if not any(first < check < running[-1] for first in running for check in passed):
            yield f"the candidate was blamed ({row.reason}) without a passed check between two failures: {row.message}"
    elif kind == DAMAGED and (row.message or "").startswith(OWN_FILE) and row.blame is Blame.INFRASTRUCTURE:
        return  # no other try could succeed
    elif row.blame is not Blame.INFRASTRUCTURE or len(tries) < _MANY:
        yield f"given up after {len(tries)} failed tries, blame {row.blame}: {row.message}"


def end_problems(
    stage: Stage, done: Mapping[str, str], logs: Mapping[str, str], disturbances: Disturbances, folder: Path
) -> Iterator[str]:
    """Yields problems at the end."""
    yield from changed(stage.store, done)
    for row in jobs.live(stage.store):
        yield f"job {row.id[:16]} ({row.kind.value}) is {row.state.value} at the end"
    for post in stage.posts:
        device = devices.get(stage.store, post.id)
        if device.health in (Health.BAD, Health.MAINTENANCE, Health.RETIRED):
            yield f"{post.id} is {device.health.value} at the end: {device.health_reason}"
    for name, log in logs.items():
        yield from (f"{name}.log: {line}" for line in trouble(log))
    for match in _UNAVAILABLE.finditer(logs["coordinator"]):
        if not disturbances.answers(datetime.fromisoformat(match[1]).timestamp()):
            yield f"coordinator.log: without a cause: {match[0][:300]}"
    yield from _acceptances(stage.store, (folder / "agent.log").read_text(errors="replace"))
    waiting = [path.name for path in (folder / "agent" / "agent" / "outbox").glob("*.json")]
    if waiting:
        yield f"results that were never handed in: {waiting}"


def unavailable(log: str) -> int:
    """Returns how often a coordinator with this log answered 503."""
    return len(_UNAVAILABLE.findall(log))


def changed(store: Store, done: Mapping[str, str]) -> Iterator[str]:
    """Yields results that changed after their jobs ended."""
    for id, before in done.items():
        row = jobs.get(store, id)
        if row is None or row.state is not JobState.DONE:
            yield f"the result of job {id[:16]} is lost"
        elif fingerprint(row) != before:
            yield f"job {id[:16]} was counted again after its end"


def _acceptances(store: Store, log: str) -> Iterator[str]:
    """Yields problems with the order of accepted epochs in the coordinator's replies."""
    epochs: dict[str, list[int]] = {}
    for job, epoch in _ACCEPTED.findall(log):
        epochs.setdefault(job, []).append(int(epoch))
    for job, accepted in epochs.items():
        row = jobs.get(store, job)
        ends = [row.epoch] if row is not None and row.state is JobState.DONE and row.epoch is not None else []
        if sorted(accepted) != accepted or any(accepted[-1] > end for end in ends):
            yield f"job {job[:16]} was accepted under the epochs {accepted}, and is done under {ends}"


def trouble(log: str) -> list[str]:
    """Yields log lines that no fault explains."""
    return sorted({line[:300] for line in log.splitlines() if _TROUBLE.search(line)})


def scene_problems(scene: Scene, disturbances: Disturbances) -> list[str]:
    """Returns all problems of one fault."""
    order, kind = scene.order, scene.draw.kind
    problems = patiently(lambda: list(job_problems(scene.stage.store, order, kind, disturbances)))
    return [*scene.problems, *problems, *scene.watch.take_late()]
