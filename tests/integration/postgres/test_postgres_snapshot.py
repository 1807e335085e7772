"""Snapshots on PostgreSQL tell what they tell on SQLite."""

from __future__ import annotations

from pathlib import Path

import pytest
import store_support
from live_lab import LiveLab

from nas.search.analysis.snapshot import Snapshots
from nas.serve.views.study import Points, points


def test_both_databases_tell_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    postgresql = told_of(tmp_path / "postgresql")
    monkeypatch.setattr(store_support, "opener", store_support.sqlite_store)
    sqlite = told_of(tmp_path / "sqlite")
    assert postgresql.columns.values["latency"] == [1.0, 0.9, 0.8, 0.7]
    assert postgresql.model_dump_json() == sqlite.model_dump_json()


def told_of(folder: Path) -> Points:
    """A study that was looked at before and after its last trials came."""
    folder.mkdir()
    lab = LiveLab(folder)
    study, snapshots = lab.study(), Snapshots(lab.store)
    lab.complete(study, 1.0, 1.0, 1.0, origin="reference")
    first = lab.complete(study, 0.8, 0.9, 0.6)
    snapshots.get("study")
    lab.complete(study, 0.7, 0.8, 0.7)
    lab.complete(study, 0.6, 0.7, 0.5)
    lab.note_quality(study, first, 0.9)
    answer = points(snapshots.get("study"))
    lab.store.close()
    return answer
