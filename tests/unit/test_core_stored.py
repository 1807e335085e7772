"""What is made once for equal inputs."""

import os
import time
from pathlib import Path

import pytest

from nas.core import paths
from nas.core.stored import stored, stored_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_a_file_is_made_once_for_equal_inputs() -> None:
    calls: list[str] = []

    def make() -> bytes:
        calls.append("make")
        return b"content"

    first = stored("kind", 1, {"a": 1, "b": 2}, make, suffix=".json")
    assert first == stored("kind", 1, {"b": 2, "a": 1}, make, suffix=".json")
    assert first.read_bytes() == b"content" and first.suffix == ".json" and calls == ["make"]
    assert len({first, stored("kind", 2, {"a": 1, "b": 2}, make), stored("kind", 1, {"a": 1}, make)}) == 3


def test_what_failed_leaves_nothing_and_is_made_again(cache: Path) -> None:
    def fail(*_: object) -> bytes:
        raise OSError("disk full")

    def fail_half(folder: Path) -> None:
        (folder / "half").touch()
        fail()

    with pytest.raises(OSError, match="disk full"):
        stored("kind", 1, "x", fail)
    with pytest.raises(OSError, match="disk full"):
        stored_folder("kind", 1, "x", fail_half)
    assert not [path for path in cache.rglob("*") if path.is_file()] and not any((cache / "kind").iterdir())
    assert stored("kind", 1, "x", lambda: b"whole").read_bytes() == b"whole"


def test_files_of_a_folder_are_on_the_disk_before_it_appears(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()

    def sync(descriptor: int) -> None:
        assert not any(path.name[:1] != "." for path in (cache / "kind").iterdir())
        synced.add(os.fstat(descriptor).st_ino)

    def make(folder: Path) -> None:
        (folder / "part").mkdir()
        for file in (folder / "index", folder / "part" / "data"):
            file.write_text("mine")

    monkeypatch.setattr("nas.core.stored.os.fsync", sync)
    path = stored_folder("kind", 1, "x", make)
    assert synced == {file.stat().st_ino for file in path.rglob("*") if file.is_file()}


def test_a_folder_appears_whole_and_another_process_may_be_first() -> None:
    def make(folder: Path) -> None:
        (folder / "part").write_text("mine")

    def slower(folder: Path) -> None:
        make(folder)
        stored_folder("kind", 1, "y", make)  # another process makes it in the meantime

    path = stored_folder("kind", 1, "y", slower)
    assert [file.name for file in path.iterdir()] == ["part"]
    assert stored_folder("kind", 1, "y", lambda folder: pytest.fail("made twice")) == path


def test_folders_of_killed_processes_are_deleted_after_a_day(cache: Path) -> None:
    killed, running, fresh = (cache / "kind" / f".tmp-{name}" for name in ("killed", "running", "fresh"))
    for temporary in (killed, running, fresh):
        (temporary / "content").mkdir(parents=True)
        (temporary / "content" / "part").touch()
    long_ago = time.time() - 2 * 86400
    for path in (killed / "content" / "part", killed / "content", killed, running / "content", running):
        os.utime(path, (long_ago, long_ago))
    path = stored_folder("kind", 1, "z", lambda folder: None)
    assert set(path.parent.iterdir()) == {running, fresh, path}
