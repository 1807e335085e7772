"""Files of types in the cache: which are removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nas.core.durable import locked
from nas.train.adapt.made_types import trim


def test_unused_files_are_removed_least_recently_used_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path))
    assert trim(0) == 0, "there is no folder yet"
    files = [tmp_path / f"quantised/{name}/model-{name}.gguf" for name in ("oldest", "older", "newer", "newest")]
    for age, file in enumerate(files):
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(100))
        os.utime(file, (age, age))
    with locked(files[0].with_name("use"), shared=True):
        assert trim(400) == 0
        assert trim(250) == 200, "whole files"
        assert [file.is_file() for file in files] == [True, False, False, True]
        assert trim(0) == 100
    (files[1].parent / "model.gguf.partial").write_bytes(bytes(10))
    assert trim(0) == 110
    assert not any(tmp_path.glob("quantised/*/*.*"))


def test_importance_matrices_are_removed_and_divergences_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path))
    (tmp_path / "divergences").mkdir()
    for name in ("a.json", "b.imatrix.gguf", "c.imatrix.gguf.0123.partial"):
        (tmp_path / "divergences" / name).write_bytes(bytes(10))
    assert trim(20) == 0
    assert trim(0) == 20
    assert [path.name for path in tmp_path.glob("divergences/*.*")] == ["a.json"]
