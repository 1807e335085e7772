"""The kinds of faults."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.replay import replay_after_end, second_self
from benchmarks.faults.runtime import MAIN
from benchmarks.faults.scene import Moment, Scene
from benchmarks.faults.stage import AGENT
from benchmarks.faults.work import Conduct, patiently
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError
from nas.core.wire import EnrolRequest
from nas.infra.store import agents, devices, outcomes, results, studies
from nas.search.analysis.archive import FORMAT, VERSION, import_study
from nas.search.spaces import load_space

WORKING: tuple[Moment, ...] = ("fetching", "pushing", "running")
ANY: tuple[Moment, ...] = ("queued", *WORKING, "ending")

MISBEHAVING: tuple[Conduct, ...] = ("crash", "hang", "garbage", "flood", "out_of_memory")
MIXED: tuple[Conduct, ...] = (*("right",) * 12, "hang", "hang", *MISBEHAVING)
RIGHT: tuple[Conduct, ...] = ("right",)
"""Where it matters that the runner answers from the bytes it should."""

SMALL_DISK_MB = 1
_LEASE_S = 30.0
_DAY_S = 86400.0
_COPY_STARTS_S = 5.0
_MANY = 5
_REFILL_S = _TRY_S = 0.2


_WRONG: tuple[dict[str, Any], ...] = (
    {"event": {"trial": 99, "kind": "progress", "payload": {}, "at": 1.0}},
    {"event": {"trial": None, "kind": "study", "payload": {"what": "calibrated", "device": 1, "id": []}, "at": 1.0}},
    {"event": {"trial": None, "kind": "study", "payload": {"what": "quality", "rung": -1}, "at": 1e300}},
    {"use": {"trial": 0, "result_key": "0" * 64, "first": True}},
    {"result": {"result_key": "x", "stage": "measure", "payload": {}, "seconds": 1.0, "created": 1.0}},
    {"result": {"result_key": "0" * 64, "stage": "measure", "payload": {"value": 1}, "seconds": 1.0, "created": 1.0}},
    {"attempt": {"kind": "infrastructure"}, "end": 1},
    {"trial": {"number": 0, "layout": {"blocks": [[]]}}},
    {"end": 1 << 60},
)
"""Lines that no archive may have."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Args:
        do: queues the job and injects the fault.
        weight: relative frequency.
        moments: states of the job in which it may happen.
        causes: of failures (`disturbances.CAUSES`) that it explains.
        everywhere: whether it affects all devices.
        kills: whether a killed runner is a right result.
        conducts: of the job's runner.
    """

    do: Callable[[Scene], None]
    weight: int
    moments: tuple[Moment, ...]
    causes: frozenset[str] = frozenset()
    everywhere: bool = False
    kills: bool = False
    conducts: tuple[Conduct, ...] = MIXED


def runner_killed(scene: Scene) -> None:
    scene.begin()
    scene.until_moment()
    with scene.act():
        scene.slay("/bin/sh", f"/{MAIN}")


def session_killed(scene: Scene) -> None:
    """Kills the process that serves the connection, or sometimes the whole daemon."""
    scene.begin()
    scene.until_moment()
    with scene.act():
        scene.slay(scene.post.kind.daemon if scene.draw.choice < 0.3 else scene.post.kind.session)


def supervisor_killed(scene: Scene) -> None:
    """Kills the shell on the device that supervises the runner."""
    scene.begin()
    scene.until_moment()
    with scene.act():
        scene.slay("sh", "/content/", "run")


def link_down(scene: Scene) -> None:
    scene.begin()
    scene.until_moment()
    with scene.act(), scene.post.machine.cut():
        time.sleep(scene.draw.seconds)


def coordinator_link_down(scene: Scene) -> None:
    with scene.stage.turn:
        scene.begin()
        scene.until_moment()
        with scene.act(), scene.stage.coordinator_link.cut():
            time.sleep(scene.draw.seconds)


def disk_full(scene: Scene) -> None:
    with scene.act(), scene.post.machine.small_disk(scene.post.kind.folder, SMALL_DISK_MB):
        scene.begin()
        scene.until_failed()


def coordinators_disk_full(scene: Scene) -> None:
    """Fills the disk of the coordinator's home and database, and empties it again."""
    with scene.stage.turn:
        scene.begin()
        scene.until_moment()
        with scene.act(), scene.stage.disk.full(scene.stage.store) as fill:
            end = time.monotonic() + scene.draw.seconds
            while time.monotonic() < end:
                fill()
                time.sleep(_REFILL_S)


def push_truncated(scene: Scene) -> None:
    """Truncates the file during its push to the device."""
    scene.begin()
    scene.until_moment()
    with scene.act():
        for file in (scene.post.files / "tmp").glob("*/file"):
            os.truncate(file, 1000)


def damaged_after_push(scene: Scene) -> None:
    """Damages the model on the device."""
    _bring(scene)
    model = scene.post.files / "content" / scene.order.model.sha256
    scene.late = not model.exists()  # other faults kept it away
    with scene.act():
        if not scene.late:
            model.write_bytes(b"rotten")
        scene.begin()
        scene.until_failed()


def runner_replaced(scene: Scene) -> None:
    """Replaces the runner of an earlier job by another program."""
    _bring(scene)
    with scene.act():
        for runner in scene.works.runner_files(scene.post.files, everywhere=scene.draw.choice < 0.5):
            runner.write_bytes(b"#!/bin/sh\necho another program\n")
        scene.begin()
        scene.until_failed()


def damaged_in_store(scene: Scene) -> None:
    """Damages a file in the coordinator's store, and restores it after the first failure."""
    path = scene.works.path(scene.order)
    content = path.read_bytes()
    with scene.act():
        _replace(path, content[:-1] + bytes([content[-1] ^ 1]))
        scene.begin()
        scene.until_failed()
        _replace(path, content)


def agent_killed(scene: Scene) -> None:
    with scene.stage.turn:
        scene.begin()
        scene.until_moment()
        with scene.act():
            scene.stage.agent.kill(scene.draw.seconds * (scene.draw.choice < 0.5))


def coordinator_killed(scene: Scene) -> None:
    with scene.stage.turn:
        scene.begin()
        scene.until_moment()
        with scene.act():
            scene.stage.coordinator.kill(scene.draw.seconds * (scene.draw.choice < 0.5))
            scene.stage.until_serving()


def both_killed(scene: Scene) -> None:
    with scene.stage.turn:
        scene.begin()
        scene.until_moment()
        with scene.act():
            scene.stage.coordinator.kill()
            scene.stage.agent.kill()
            scene.stage.until_serving()


def agent_frozen(scene: Scene) -> None:
    """Stops the agent long enough for its leases to expire."""
    with scene.stage.turn:
        scene.begin()
        scene.until_moment()
        with scene.act(), scene.stage.agent.frozen():
            time.sleep(_LEASE_S + scene.draw.seconds)


def clock_jump(scene: Scene) -> None:
    with scene.stage.turn:
        scene.begin()
        scene.until_moment()
        with scene.act():
            rng = random.Random(f"{scene.draw}")
            scene.stage.set_clock(rng.choice([-1.0, 1.0]) * rng.choice([30.0, 3600.0, _DAY_S, 400 * _DAY_S]))
            time.sleep(scene.draw.seconds)
            scene.stage.set_clock(0.0)


def clock_ahead(scene: Scene) -> None:
    """Sets the agent's clock ahead by more than a lease; another host whose clock is as wrong takes back leases."""
    with scene.stage.turn:
        scene.begin()
        scene.until_moment()
        with scene.act(), scene.stage.other_host(_LEASE_S + 5) as other:
            scene.stage.set_clock(_LEASE_S + 5)
            scene.until(lambda: outcomes.expire(other) is None, scene.draw.seconds)
            scene.stage.set_clock(0.0)


def database_restored(scene: Scene) -> None:
    """Sets the device's epoch in the database back, as a restored backup does; the device knows newer ones."""
    _bring(scene)
    store, id = scene.stage.store, scene.post.id
    with scene.act():
        newest = 0
        while not newest:
            newest = patiently(lambda: _restored(scene)) or 0
            time.sleep(0 if newest else _TRY_S)
    scene.begin()
    scene.until(lambda: False)
    if patiently(lambda: devices.get(store, id)).epoch < newest:
        scene.problems.append(f"the device's epochs stay below {newest}, which it has seen")


def _restored(scene: Scene) -> int | None:
    """Sets the epoch of a device without a lease back; returns the one it had, or None if it has a lease."""
    with scene.stage.store.write() as connection:
        row = devices.read(connection, scene.post.id)
        if row.lease_until is not None:
            return None
        lower = random.Random(f"{scene.draw}").randrange(max(1, row.epoch - 1))
        devices.change(connection, scene.post.id, epoch=lower)
        return row.epoch


def archive_imported(scene: Scene) -> None:
    """Imports archives somebody forged; then the connection is lost while the job runs.

    The whole one reports failures and a result of this job: it becomes a study, and changes nothing else. The other,
    the same with one line that is wrong, is refused and leaves nothing.
    """
    scene.begin()
    scene.until_moment()
    name = f"hostile-{scene.order.tag}"
    whole = _forged(scene, name)
    wrong = random.Random(f"{scene.draw}").choice(_WRONG)
    with scene.act():
        patiently(lambda: import_study(scene.stage.store, _archive([*whole, {"end": len(whole)}])))
        if results.get(scene.stage.store, scene.order.key) is not None:
            scene.problems.append("a result of an archive is taken for one of this farm")
        broken = [whole[0] | {"name": f"{name}-broken"}, *whole[1:], wrong]
        try:
            patiently(lambda: import_study(scene.stage.store, _archive([*broken, {"end": len(broken)}])))
            scene.problems.append(f"an archive was imported with the line {json.dumps(wrong)[:80]}")
        except InvalidInput:
            pass
        names = {study.name for study in patiently(lambda: studies.all(scene.stage.store))}
        if name not in names or f"{name}-broken" in names:
            scene.problems.append(f"studies after the import: {sorted(names)}")
        scene.slay(scene.post.kind.session)


def _forged(scene: Scene, name: str) -> list[dict[str, Any]]:
    """Returns the lines of an archive, but its end."""
    header = {"format": FORMAT, "v": VERSION, "name": name, "seed": 0, "version": "0"}
    header |= {"created": 1.0, "state": "complete", "scales": None, "reference_point": None, "proposer": None}
    header["space"] = load_space("lfm2").model_dump(mode="json")
    attempt = {"kind": "infrastructure", "message": "forged", "at": 1.0, "result_key": scene.order.key}
    attempt |= {"stage": "measure", "trial": None, "job": scene.order.job, "device": scene.post.id, "payload": None}
    result = {"result_key": scene.order.key, "stage": "measure", "seconds": 1.0, "created": 1.0}
    result["payload"] = {"failed": {"reason": "crash", "message": "forged"}}
    return [header, {"result": result}, *[{"attempt": attempt}] * _MANY]


def _archive(lines: list[dict[str, Any]]) -> io.BytesIO:
    return io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())


def agent_copied(scene: Scene) -> None:
    """Runs a second agent with the name, secret and devices of the first, as on a copy of its host's disk.

    A host that only has the same name, and a token for any new one, is not let in.
    """
    with scene.stage.turn:
        scene.begin()
        with scene.act(), scene.stage.copied_agent():
            time.sleep(_COPY_STARTS_S + scene.draw.seconds)
            token = patiently(lambda: agents.issue_token(scene.stage.store))
            with contextlib.closing(scene.stage.client()) as client:
                try:
                    patiently(lambda: client.enrol(EnrolRequest(token=token, agent=AGENT)))
                    scene.problems.append(f"a second host enrolled as {AGENT}")
                except InfrastructureFailed:
                    raise
                except NasError:
                    pass


def duplicate(scene: Scene) -> None:
    """Sends the result again, and other results under the same epoch."""
    scene.begin()
    scene.until(lambda: False)
    replay_after_end(scene)


def stale(scene: Scene) -> None:
    """Leases the job by a second instance of the agent, so that requests of the first have an old epoch."""
    scene.begin()
    scene.until_moment()
    with scene.act():
        second_self(scene)


def misbehaving(scene: Scene) -> None:
    """Runs a job that fails by itself, without a disturbance."""
    scene.begin()


def _bring(scene: Scene) -> None:
    """Runs an earlier job with the same runner and model."""
    twin = scene.works.twin(scene.order)
    scene.works.enqueue(twin)
    scene.works.await_end(twin)


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.replace(path)


WIRE = frozenset({"wire", "lease"})
UPWARD = frozenset({"coordinator", "lease"})

DAMAGED = "damaged in the store"

KINDS: dict[str, Kind] = {
    "runner killed": Kind(runner_killed, 20, ("running",), kills=True, conducts=RIGHT),
    "session killed": Kind(session_killed, 24, ("queued", "pushing", "running", "ending"), WIRE),
    "supervisor killed": Kind(supervisor_killed, 10, ("running",), WIRE),
    "link down": Kind(link_down, 56, ("queued", "pushing", "running", "ending"), WIRE),
    "coordinator's link down": Kind(coordinator_link_down, 24, ANY, UPWARD, everywhere=True),
    "disk full": Kind(disk_full, 14, ("pushing",), WIRE | {"disk"}),
    "coordinator's disk full": Kind(coordinators_disk_full, 14, ANY, UPWARD, everywhere=True),
    "push truncated": Kind(push_truncated, 14, ("pushing",), frozenset({"damage", "wire"}), conducts=RIGHT),
    "damaged after the push": Kind(damaged_after_push, 12, ("queued",), frozenset({"damage"}), conducts=RIGHT),
    "runner replaced": Kind(runner_replaced, 14, ("queued",), frozenset({"damage"}), conducts=RIGHT),
    DAMAGED: Kind(damaged_in_store, 12, ("fetching",), frozenset({"coordinator", "damage"}), conducts=RIGHT),
    "agent killed": Kind(agent_killed, 26, ANY, WIRE, everywhere=True),
    "coordinator killed": Kind(coordinator_killed, 26, ANY, UPWARD, everywhere=True),
    "both killed": Kind(both_killed, 8, ANY, UPWARD | WIRE, everywhere=True),
    "agent frozen": Kind(agent_frozen, 5, WORKING, UPWARD | WIRE, everywhere=True),
    "clock jump": Kind(clock_jump, 16, ANY, UPWARD, everywhere=True),
    "clock ahead": Kind(clock_ahead, 14, ANY, everywhere=True),
    "database restored": Kind(database_restored, 14, ("queued",)),
    "archive imported": Kind(archive_imported, 10, ("running",), WIRE),
    "agent copied": Kind(agent_copied, 8, ("queued",), UPWARD | WIRE, everywhere=True),
    "duplicate": Kind(duplicate, 14, ("queued",), conducts=RIGHT),
    "stale": Kind(stale, 16, ("fetching", "pushing", "running"), frozenset({"lease"})),
    "misbehaving runner": Kind(misbehaving, 24, ("queued",), conducts=MISBEHAVING),
}
