"""`Store`: what a transaction promises."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
from store_support import new_study, open_store

from nas.infra.store import studies


@pytest.mark.sql
def test_an_exception_undoes_all_of_a_transaction(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(KeyError), store.write():
        new_study(store, "a")
        new_study(store, "b")
        raise KeyError
    assert studies.all(store) == []
    assert new_study(store, "c").name == "c"


@pytest.mark.sql
def test_a_failed_part_that_is_caught_undoes_only_itself(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with store.write():
        new_study(store, "a")
        with pytest.raises(KeyError), store.write():
            new_study(store, "b")
            raise KeyError
        new_study(store, "c")
    assert [study.name for study in studies.all(store)] == ["a", "c"]


@pytest.mark.sql
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


@pytest.mark.sql
def test_threads_share_a_store(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    threads = [Thread(target=new_study, args=(store, f"s{n}")) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {study.name for study in studies.all(store)} == {f"s{n}" for n in range(16)}
