"""The name of a database."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_support import open_store

from nas.infra.store import agents


@pytest.mark.sql
def test_a_database_keeps_its_name_and_another_has_another(tmp_path: Path) -> None:
    names = []
    for folder in ("a", "a", "b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        store = open_store(tmp_path / folder)
        names.append(agents.authority(store))
        store.close()
    assert names[0] == names[1] != names[2]
