"""Helpers for tests of the store: a clock that only tests advance, and small valid records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nas.core.canonical import content_hash
from nas.core.clock import Clock
from nas.core.device import Device
from nas.core.layout import Layout
from nas.core.plan import InputFile, Plan, PlanFile, Round, RoundResult, Runner
from nas.core.wire import Failure
from nas.infra.store import agents, artifacts, devices, jobs, outcomes, studies
from nas.infra.store.rows import JobRow, JobState, NewTrial, StoredFile, Study
from nas.infra.store.store import Store

SPACE = {"name": "tiny", "depth": [2, 4]}


@dataclass
class StillClock:
    """Time passes by sleeping, or when a test says so."""

    time: float = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@cache
def _empty_database() -> bytes:
    with TemporaryDirectory() as folder:
        Store.open(f"sqlite:///{folder}/nas.db").close()
        return Path(folder, "nas.db").read_bytes()


def sqlite_store(folder: Path, clock: Clock) -> Store:
    """Opens the store in `folder`; a new one is copied from an empty one, which is faster than building it."""
    if not (folder / "nas.db").exists():
        (folder / "nas.db").write_bytes(_empty_database())
    return Store.open(f"sqlite:///{folder / 'nas.db'}", clock=clock, artifacts=folder / "artifacts")


opener: Callable[[Path, Clock], Store] = sqlite_store
"""Replaced where the tests run on another database."""


def open_store(folder: Path, clock: Clock | None = None) -> Store:
    """Opens the store of `folder`; it is empty at first."""
    return opener(folder, clock or StillClock())


def new_study(store: Store, name: str = "first") -> Study:
    """A study without trials."""
    return studies.create(store, name, SPACE, seed=7, version="0.2.0")


def proposal(width: int, **more: Any) -> NewTrial:
    """A proposal; each `width` gives another layout."""
    layout = Layout.parse(f"d64 v256 ffn=swiglu:{width} [C3 A2/1]")
    return NewTrial(layout.to_json(), layout.id, **more)


def put_bytes(store: Store, content: bytes) -> StoredFile:
    """Stores `content` as a file."""
    with TemporaryDirectory() as folder:
        Path(folder, "content").write_bytes(content)
        return artifacts.put_file(store, Path(folder, "content"))


def key(*inputs: object) -> str:
    """A result key."""
    return content_hash(list(inputs))


def device(name: str = "box", **more: Any) -> Device:
    """A device's description."""
    values = {"model": "Box", "cpu": "cpu", "target": "x86_64-linux", "cores": 2, "memory_mb": 1024, "os": "Linux"}
    return Device(id=name, **values | more)


def add_device(store: Store, name: str = "box", agent: str = "local") -> str:
    """Registers one device under a local agent and returns its id."""
    agents.register_local(store, agent)
    devices.register(store, agent, [device(name)], boot_id="boot")
    return name


def round_of(model: str = "model") -> Round:
    """A round whose files are named after `model`."""
    runner = Runner(
        runtime="fake",
        build="b1",
        target="x86_64-linux",
        files={"run": PlanFile(sha256=key("runner"), size=1)},
        main="run",
    )
    inputs = {"model": InputFile(sha256=key(model), size=1)}
    return Round(candidate=Plan(runner=runner, inputs=inputs, args=(), deadline_s=1), repetitions=1)


RESULT = RoundResult(pairs=[], wall_s=0.5)


BROKEN = Failure(kind="infrastructure", message="cable fell out")


def put(store: Store, name: str = "a", **options: object) -> JobRow:
    return jobs.enqueue(store, key(name), round_of(), **{"device": "box"} | options)


def take(store: Store, box: str = "box", agent: str = "local") -> JobRow:
    claimed = jobs.claim(store, box, agent)
    assert claimed is not None
    return claimed


def state(store: Store, job: JobRow) -> JobState:
    now = jobs.get(store, job.id)
    assert now is not None
    return now.state


def break_down(store: Store, clock: StillClock, box: str = "box", agent: str = "local") -> JobRow:
    """Claims the next job of `box`, fails it by the infrastructure and returns it."""
    clock.time += 1000
    job = take(store, box, agent)
    assert outcomes.fail(store, job.id, box, agent, job.epoch or 0, BROKEN).accepted
    after = jobs.get(store, job.id)
    assert after is not None
    return after
