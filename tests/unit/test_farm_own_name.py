"""Machines that are copies of one disk image have the same names; their boot ids differ."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from store_support import StillClock, device, open_store

from nas.core.errors import InvalidInput
from nas.infra.store import agents, devices, jobs
from nas.infra.store.store import Store
from nas.measure.farm.farm import open_farm, require_own_name


@dataclass
class Meanwhile(StillClock):
    """A clock that calls `then` whenever somebody sleeps."""

    then: Callable[[], object] = field(default=lambda: None)

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.then()


@pytest.fixture
def clock() -> Meanwhile:
    return Meanwhile()


@pytest.fixture
def store(tmp_path: Path, clock: Meanwhile) -> Store:
    store = open_store(tmp_path, clock)
    agents.register_local(store, "local-box")
    devices.register(store, "local-box", [device()], boot_id="first")
    return store


def test_a_copy_of_a_machine_that_is_alive_is_refused(store: Store, clock: Meanwhile) -> None:
    clock.then = lambda: jobs.claim(store, "box", "local-box")
    with pytest.raises(InvalidInput, match="/etc/machine-id"):
        require_own_name(store, "local-box", "second")


def test_a_machine_that_was_restarted_waits_until_it_was_silent(store: Store, clock: Meanwhile) -> None:
    clock.time += 10
    require_own_name(store, "local-box", "second")
    assert clock.time == pytest.approx(1030.0, abs=1.0)


@pytest.mark.parametrize(("agent", "boot"), [("local-box", "first"), ("local-new", "second")])
def test_another_launch_of_the_same_machine_and_a_new_one_do_not_wait(
    store: Store, clock: Meanwhile, agent: str, boot: str
) -> None:
    require_own_name(store, agent, boot)
    assert clock.time == 1000.0


@pytest.mark.usefixtures("home")
def test_a_refusal_leaves_no_folder_behind(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(store: Store, agent: str, boot: str) -> None:
        raise InvalidInput("a copy of another machine")

    monkeypatch.setattr("nas.measure.farm.farm.require_own_name", refuse)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(InvalidInput, match="a copy"), open_farm(store):
        pass
    assert list(temporary.iterdir()) == []
