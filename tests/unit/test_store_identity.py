"""The name of a database."""

from __future__ import annotations

from pathlib import Path

from nas.store import identity
from nas.store.store import Store


def test_a_database_keeps_its_name_and_another_has_another(tmp_path: Path) -> None:
    names = []
    for file in ("a.db", "a.db", "b.db"):
        store = Store.open(f"sqlite:///{tmp_path / file}")
        names.append(identity.authority(store))
        store.close()
    assert names[0] == names[1] != names[2]
