"""The kinds of faults."""

from __future__ import annotations

import io
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.replay import replay_after_end, second_self
from faults.runtime import MAIN
from faults.scene import Moment, Scene
from faults.work import Conduct
from nas.search_spaces import load_space
from nas.store import devices, outcomes
from nas.store.archive import import_study

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
        scene.slay(scene.post.daemon if scene.draw.choice < 0.3 else scene.post.session)


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
    with scene.act(), scene.post.machine.small_disk(scene.post.folder, SMALL_DISK_MB):
        scene.begin()
        scene.until_failed()


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
    with scene.act():
        (scene.post.files / "content" / scene.order.model.sha256).write_bytes(b"rotten")
    scene.begin()


def runner_replaced(scene: Scene) -> None:
    """Replaces the runner of an earlier job by another program."""
    _bring(scene)
    with scene.act():
        for runner in scene.works.runner_files(scene.post.files, everywhere=scene.draw.choice < 0.5):
            runner.write_bytes(b"#!/bin/sh\necho another program\n")
    scene.begin()


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
            with store.write() as connection:
                row = devices.read(connection, id)
                if row.lease_until is None:
                    newest = row.epoch
                    devices.change(connection, id, epoch=random.Random(f"{scene.draw}").randrange(max(1, newest - 1)))
    scene.begin()
    scene.until(lambda: False)
    if devices.get(store, id).epoch < newest:
        scene.problems.append(f"the device's epochs stay below {newest}, which it has seen")


def archive_imported(scene: Scene) -> None:
    """Imports a study whose archive reports failures of this job; then the connection is lost while the job runs."""
    scene.begin()
    scene.until_moment()
    forged = {"kind": "infrastructure", "message": "forged", "at": 1.0, "result_key": scene.order.key}
    forged |= {"stage": "measure", "trial": None, "job": scene.order.job, "device": scene.post.id, "payload": None}
    header = {"format": "hilnas-study", "v": 1, "name": f"hostile-{scene.order.tag}", "seed": 0, "version": "0"}
    header |= {"created": 1.0, "state": "complete", "scales": None, "reference_point": None, "proposer": None}
    header["space"] = load_space("lfm2").model_dump(mode="json")
    lines = [header, *[{"attempt": forged}] * _MANY, {"end": 1 + _MANY}]
    with scene.act():
        import_study(scene.stage.store, io.StringIO("".join(json.dumps(line) + "\n" for line in lines)))
        scene.slay(scene.post.session)


def agent_copied(scene: Scene) -> None:
    """Runs a second agent with the name, secret and devices of the first, as on a copy of its host's disk."""
    with scene.stage.turn:
        scene.begin()
        with scene.act(), scene.stage.copied_agent():
            time.sleep(_COPY_STARTS_S + scene.draw.seconds)


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
    known = scene.works.twin(scene.order)
    scene.works.enqueue(known)
    scene.works.await_end(known)


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.replace(path)


WIRE = frozenset({"wire", "lease"})
UPWARD = frozenset({"coordinator", "lease"})

KINDS: dict[str, Kind] = {
    "runner killed": Kind(runner_killed, 20, ("running",), kills=True, conducts=RIGHT),
    "session killed": Kind(session_killed, 24, ("queued", "pushing", "running", "ending"), WIRE),
    "supervisor killed": Kind(supervisor_killed, 10, ("running",), WIRE),
    "link down": Kind(link_down, 56, ("queued", "pushing", "running", "ending"), WIRE),
    "coordinator's link down": Kind(coordinator_link_down, 24, ANY, UPWARD, everywhere=True),
    "disk full": Kind(disk_full, 14, ("pushing",), WIRE | {"disk"}),
    "push truncated": Kind(push_truncated, 14, ("pushing",), frozenset({"damage", "wire"}), conducts=RIGHT),
    "damaged after the push": Kind(damaged_after_push, 12, ("queued",), frozenset({"damage"}), conducts=RIGHT),
    "runner replaced": Kind(runner_replaced, 14, ("queued",), frozenset({"damage"}), conducts=RIGHT),
    "damaged in the store": Kind(
        damaged_in_store, 12, ("fetching",), frozenset({"coordinator", "damage"}), conducts=RIGHT
    ),
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
