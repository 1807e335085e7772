"""`Store`: what a transaction promises, and how the database's troubles are told."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest
from store_support import StillClock, new_study, open_store

from nas.core.errors import InfrastructureFailed
from nas.store import studies
from nas.store.engine import WRITE_DEADLINE_S


def test_an_exception_undoes_all_of_a_transaction(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(KeyError), store.write():
        new_study(store, "a")
        new_study(store, "b")
        raise KeyError
    assert studies.all(store) == []
    assert new_study(store, "c").name == "c"


def test_a_failed_part_that_is_caught_undoes_only_itself(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with store.write():
        new_study(store, "a")
        with pytest.raises(KeyError), store.write():
            new_study(store, "b")
            raise KeyError
        new_study(store, "c")
    assert [study.name for study in studies.all(store)] == ["a", "c"]


def test_readers_see_one_moment_while_a_writer_goes_on(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    new_study(store, "a")
    with store.read():
        before = studies.all(store)
        writer = Thread(target=new_study, args=(store, "b"))
        writer.start()
        writer.join()
    assert [study.name for study in before] == ["a"]
    assert [study.name for study in studies.all(store)] == ["a", "b"]


def test_threads_share_a_store(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    threads = [Thread(target=new_study, args=(store, f"s{n}")) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {study.name for study in studies.all(store)} == {f"s{n}" for n in range(16)}


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


def test_a_full_disk_is_the_infrastructures_and_loses_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    new_study(store, "a")
    with store.read() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
    with pytest.raises(InfrastructureFailed, match="full"):
        studies.create(store, "b", {"ballast": "x" * (1 << 20)}, seed=0, version="0")
    assert [study.name for study in studies.all(store)] == ["a"]
