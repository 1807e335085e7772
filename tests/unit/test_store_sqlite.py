"""SQLite only: locked, damaged and full files, and query plans."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from store_support import StillClock, add_device, new_study, open_store

from nas.core.errors import InfrastructureFailed
from nas.infra.store import agents, devices, jobs, studies
from nas.infra.store.engine import WRITE_DEADLINE_S, translated


def test_a_lock_that_is_never_freed_is_given_up_after_the_deadline(tmp_path: Path) -> None:
    clock = StillClock()
    store = open_store(tmp_path, clock)
    with closing(sqlite3.connect(tmp_path / "nas.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        clock.sleep = lambda seconds: setattr(clock, "time", clock.time + WRITE_DEADLINE_S)
        with pytest.raises(InfrastructureFailed, match="locked"):
            new_study(store)
        other.execute("ROLLBACK")
    new_study(store)


def test_a_new_database_that_another_process_is_making_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "nas.db"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        end = threading.Timer(0.2, other.execute, ["ROLLBACK"])
        end.start()
        store = open_store(tmp_path)
        end.join()
    new_study(store)


def test_a_full_disk_is_the_infrastructures_and_loses_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    new_study(store, "a")
    with store.read() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
    with pytest.raises(InfrastructureFailed, match="full"):
        studies.create(store, "b", {"ballast": "x" * (1 << 20)}, seed=0, version="0")
    assert [study.name for study in studies.all(store)] == ["a"]


@pytest.mark.parametrize(("free", "message"), [(0, "the disk is full at"), (1 << 30, "disk I/O error")])
def test_an_input_error_of_a_full_disk_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, message: str
) -> None:
    store = open_store(tmp_path)
    monkeypatch.setattr("nas.infra.store.engine.disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(InfrastructureFailed, match=message), translated(store.engine.url):
        raise OperationalError("INSERT", None, sqlite3.OperationalError("disk I/O error"))


def test_secrets_and_tokens_are_not_in_the_database(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    unspent = agents.issue_token(store)
    secret = agents.enrol(store, agents.issue_token(store), "host")
    store.close()
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("nas.db*"))
    assert b"host" in stored
    assert secret.encode() not in stored
    assert unspent.encode() not in stored


def test_the_next_job_is_found_without_sorting_the_queue(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    box = devices.get(store, add_device(store))
    statements: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        statements.append((statement, parameters))

    with store.read() as connection:
        event.listen(connection, "before_cursor_execute", note)
        assert jobs.next_job(connection, box, 0.0) is None
        statement, parameters = statements[-1]  # the one before it is for reservations
        plan = [row.detail for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
    assert len([step for step in plan if "ix_job_device_state_priority_created_id" in step]) == 2
    assert not [step for step in plan if "B-TREE" in step]
