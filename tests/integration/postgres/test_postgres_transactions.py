"""`test_store_transactions.py` over again; and what only a server can do: undo, vanish, come back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import update
from store_support import add_device, new_study, open_store, put, put_bytes, take
from test_store_transactions import *  # noqa: F403

from nas.core.clock import SystemClock
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.infra.store import artifacts, devices, jobs, studies
from nas.infra.store.models import study as study_table
from nas.infra.store.rows import JobState
from nas.infra.store.store import Store, retried
from tests.support.postgres import CARELESS, Server, server


@pytest.fixture(scope="module")
def fragile() -> Iterator[Server]:
    """A server that tests may stop."""
    with server(CARELESS | {"restart_after_crash": "on"}) as started:
        started.create_empty("fragile")
        yield started


@pytest.fixture
def exposed(fragile: Server, tmp_path: Path) -> Iterator[Store]:
    """A store on that server."""
    fragile.empty(fragile.url("fragile"))
    store = Store.open(fragile.url("fragile"), artifacts=tmp_path / "artifacts")
    yield store
    store.close()


def together(*calls: Callable[[], object]) -> list[BaseException]:
    """Runs the calls at the same time; returns what they raised."""
    raised: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_a_deadlock_undoes_one_side_which_is_done_again(tmp_path: Path) -> None:
    store = open_store(tmp_path, SystemClock())
    ids = [new_study(store, name).id for name in ("a", "b")]
    both_hold_one = threading.Barrier(2, timeout=30)
    attempts: list[int] = []

    @retried
    def count_up(store: Store, first: int, second: int) -> None:
        attempts.append(first)
        with store.write() as connection:
            for id in (first, second):
                more = {"seed": study_table.c.seed + 1}
                connection.execute(update(study_table).where(study_table.c.id == id).values(more))
                if len(attempts) <= 2 and id == first:
                    both_hold_one.wait()

    raised = together(lambda: count_up(store, *ids), lambda: count_up(store, *reversed(ids)))
    assert raised == []
    assert len(attempts) == 3
    assert [study.seed for study in studies.all(store)] == [7 + 2, 7 + 2]


def test_writers_of_different_devices_do_not_wait_for_each_other(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for box in ("box", "phone"):
        add_device(store, box, agent=f"agent-{box}")
        put(store, box, device=box)
    with store.write() as connection:
        devices.read(connection, "box")
        assert together(lambda: take(store, "phone", "agent-phone")) == []
        states = {job.device: job.state for job in jobs.live(store)}
        assert states == {"box": JobState.QUEUED, "phone": JobState.LEASED}


def test_a_lock_that_is_never_freed_is_given_up(exposed: Store, fragile: Server) -> None:
    study = new_study(exposed).id
    with psycopg.connect(fragile.url("fragile")) as other:
        other.execute("SELECT 1 FROM study FOR UPDATE")
        with pytest.raises(InfrastructureFailed, match="lock timeout"), exposed.write() as connection:
            connection.exec_driver_sql("SET LOCAL lock_timeout = '50ms'")
            studies.set_desired_state(exposed, study, "stop")
    studies.set_desired_state(exposed, study, "stop")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["shut down", "crashed"])
def test_a_server_that_went_away_is_found_again(exposed: Store, fragile: Server, how: signal.Signals) -> None:
    new_study(exposed, "before")
    fragile.stop(how)
    with pytest.raises(InfrastructureFailed, match="database postgresql"):
        studies.all(exposed)
    with pytest.raises(InfrastructureFailed):
        new_study(exposed, "meanwhile")
    fragile.start()
    new_study(exposed, "after")
    assert [study.name for study in studies.all(exposed)] == ["before", "after"]


def test_a_crash_in_the_middle_of_a_transaction_undoes_all_of_it(exposed: Store, fragile: Server) -> None:
    with pytest.raises(InfrastructureFailed), exposed.write():
        new_study(exposed, "a")
        fragile.stop(signal.SIGQUIT)
        fragile.start()
        new_study(exposed, "b")
    assert studies.all(exposed) == []
    new_study(exposed, "c")


def test_a_connection_that_was_ended_by_an_administrator_is_replaced(exposed: Store, fragile: Server) -> None:
    new_study(exposed)
    with psycopg.connect(fragile.url("fragile"), autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'hilnas'")
    assert [study.name for study in studies.all(exposed)] == ["first"]


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_what_the_database_cannot_hold_is_refused(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path)
    with pytest.raises(InvalidInput, match="cannot store"):
        studies.create(store, "a", {}, seed=0, version=name)
    assert studies.all(store) == []


def test_collection_waits_for_whoever_pins(tmp_path: Path) -> None:
    store = open_store(tmp_path, SystemClock())
    sha256 = put_bytes(store, b"kept").sha256
    with store.write():
        artifacts.pin(store, sha256, "me")
        collected: list[artifacts.Collected] = []
        collector = threading.Thread(target=lambda: collected.append(artifacts.collect(store, 0)))
        collector.start()
        collector.join(0.3)
        assert collector.is_alive()
    collector.join(30)
    assert [done.files for done in collected] == [0]
    assert artifacts.verify(store, sha256)


def test_the_password_is_not_shown(fragile: Server) -> None:
    url = f"postgresql://hilnas:geheim@/missing?host={fragile.folder}"
    with pytest.raises(InfrastructureFailed, match="does not exist") as refused:
        Store.open(url)
    assert "geheim" not in str(refused.value)
