"""Content-addressed files: whole or not there, never outside the folder, collected when unused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from store_support import StillClock, add_device, key, new_study, put_bytes, round_of

from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.infra.store import artifacts, jobs, studies
from nas.infra.store.agents import turn_file
from nas.infra.store.artifacts import ABANDONED_S, collect
from nas.infra.store.store import Store


def left_behind(store: Store) -> list[Path]:
    return [path for path in store.artifacts.rglob("*") if path.is_file()]


@pytest.mark.sql
def test_a_file_is_stored_under_its_hash_once(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights" * 500_000)
    first, second = artifacts.put_file(store, source), artifacts.put_file(store, source)
    assert first == second == artifacts.get(store, first.sha256)
    assert first.size == source.stat().st_size
    path = artifacts.path(store, first.sha256)
    assert path == store.artifacts / first.sha256[:2] / first.sha256[2:]
    assert path.read_bytes() == source.read_bytes()
    assert left_behind(store) == [path]


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "", "A" * 64, "a" * 63, "a" * 64 + "\n", f"..{'a' * 62}", "/" * 64]
)
def test_a_name_that_is_no_hash_leads_nowhere(store: Store, name: str) -> None:
    with pytest.raises(InvalidInput, match="no SHA-256"):
        artifacts.path(store, name)


def test_a_link_in_place_of_a_file_is_not_followed(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_text("secret")
    stored = put_bytes(store, b"x")
    path = artifacts.path(store, stored.sha256)
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(InfrastructureFailed, match="not in the store"):
        artifacts.path(store, stored.sha256)


def test_what_is_not_there_is_said(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InfrastructureFailed, match="not in the store"):
        artifacts.path(store, key("nothing"))
    with pytest.raises(InfrastructureFailed, match="cannot be pinned"):
        artifacts.pin(store, key("nothing"), "me")
    with pytest.raises(InvalidInput, match="cannot read"):
        artifacts.put_file(store, tmp_path / "missing")


def test_a_damaged_file_is_found_and_healed_by_putting_it_again(store: Store) -> None:
    stored = put_bytes(store, b"good")
    path = artifacts.verify(store, stored.sha256)
    path.write_bytes(b"baad")
    with pytest.raises(InfrastructureFailed, match="damaged"):
        artifacts.verify(store, stored.sha256)
    with pytest.raises(InfrastructureFailed, match="not in the store"):
        artifacts.path(store, stored.sha256)
    put_bytes(store, b"good")
    assert artifacts.verify(store, stored.sha256).read_bytes() == b"good"


def test_a_file_that_the_disk_does_not_read_is_not_intact(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = put_bytes(store, b"good")
    assert artifacts.intact(store, stored.sha256)

    def broken(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(artifacts, "sha256_of", broken)
    assert not artifacts.intact(store, stored.sha256)
    with pytest.raises(InfrastructureFailed, match="cannot be read: Input/output error"):
        artifacts.verify(store, stored.sha256)


@pytest.mark.parametrize(
    ("code", "message"), [(errno.ENOSPC, "disk is full.*nas gc"), (errno.EDQUOT, "disk is full"), (errno.EIO, "cannot")]
)
def test_trouble_with_the_disk_is_the_infrastructures_and_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken, pytest.raises(InfrastructureFailed, match=message):
        broken.setattr(os, "fsync", fail)
        put_bytes(store, b"content")
    assert left_behind(store) == []
    assert artifacts.all(store) == []
    put_bytes(store, b"content")


def put_three(store: Store, clock: StillClock) -> list[str]:
    """Three artifacts of 10 bytes, each used later than the one before."""
    names = []
    for n in range(3):
        clock.time += 1000
        names.append(put_bytes(store, bytes([n]) * 10).sha256)
    return names


@pytest.mark.sql
def test_the_least_recently_used_goes_first(store: Store, clock: StillClock) -> None:
    oldest, middle, newest = put_three(store, clock)
    clock.time += 1000
    artifacts.path(store, oldest)
    done = collect(store, 20)
    assert (done.files, done.freed_bytes, done.kept_bytes) == (1, 10, 20)
    assert [artifact.sha256 for artifact in artifacts.all(store)] == [newest, oldest]
    assert not (store.artifacts / middle[:2] / middle[2:]).exists()
    assert collect(store, 20).files == 0
    assert collect(store, 0).files == 2
    assert left_behind(store) == []


def test_artifacts_of_another_database_in_this_home_stay(store: Store, clock: StillClock) -> None:
    clock.time = 1e9
    turn_file(store).touch()
    other = store.artifacts / "ab" / ("c" * 62)
    other.parent.mkdir(parents=True)
    other.write_bytes(b"other")
    os.utime(other, (clock.time - ABANDONED_S - 1, clock.time - ABANDONED_S - 1))
    (store.artifacts.parent / "agent-0123456789xy.turn").touch()
    assert collect(store, 0).files == 0
    (store.artifacts.parent / "agent-0123456789xy.turn").unlink()
    assert collect(store, 0).files == 1
    assert not other.exists()


def test_files_are_removed_once_others_can_write_again(
    store: Store, clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = put_three(store, clock)
    at_once: list[bool] = []

    def remove(file: Path) -> None:
        at_once.append(store._outer() is None)
        assert not any((store.artifacts / name[:2] / name[2:]).exists() for name in names)
        file.unlink()

    monkeypatch.setattr(artifacts, "_remove", remove)
    assert collect(store, 0).freed_bytes == 30
    assert at_once == [True] * 3
    assert left_behind(store) == []


def test_what_is_pinned_stays_until_every_owner_lets_go(store: Store, clock: StillClock) -> None:
    first, second, _ = put_three(store, clock)
    artifacts.pin(store, first, "one")
    artifacts.pin(store, first, "two")
    artifacts.pin_only(store, "two", [second])
    assert collect(store, 0).kept_bytes == 20
    artifacts.pin_only(store, "one", [])
    assert [artifact.pinned for artifact in artifacts.all(store)] == [False, True]
    assert collect(store, 0).files == 1
    assert [artifact.sha256 for artifact in artifacts.all(store)] == [second]


def test_a_studys_pins_go_with_it(store: Store, clock: StillClock) -> None:
    study = new_study(store).id
    artifacts.pin_only(store, artifacts.study_owner(study), put_three(store, clock))
    assert collect(store, 0).files == 0
    studies.delete(store, study)
    assert collect(store, 0).files == 3


def test_the_files_of_unfinished_jobs_stay(store: Store) -> None:
    add_device(store)
    needed = put_bytes(store, b"model").sha256
    plan = round_of().candidate
    model = plan.inputs["model"].model_copy(update={"sha256": needed})
    round = round_of().model_copy(update={"candidate": plan.model_copy(update={"inputs": {"model": model}})})
    job = jobs.enqueue(store, key(1), round, device="box")
    assert collect(store, 0).files == 0
    jobs.cancel(store, [job.id])
    assert collect(store, 0).files == 1


@pytest.mark.parametrize("age", [ABANDONED_S - 1, ABANDONED_S + 1])
def test_what_a_killed_process_left_behind_is_swept_up_once_it_is_old(
    store: Store, clock: StillClock, age: float
) -> None:
    clock.time = 1e9
    digest = put_bytes(store, b"kept").sha256
    orphan = store.artifacts / "ab" / ("c" * 62)
    orphan.parent.mkdir()
    partial = store.artifacts / artifacts.INCOMING / "tmp123"
    for path in (orphan, partial, artifacts.path(store, digest)):
        path.write_bytes(b"kept")
        os.utime(path, (clock.time - age, clock.time - age))
    folder = store.artifacts / ".snapshot" / "hourly"
    folder.mkdir(parents=True)
    os.utime(folder, (clock.time - age, clock.time - age))
    done = collect(store, 1000)
    assert done.files == (2 if age > ABANDONED_S else 0)
    assert orphan.exists() == partial.exists() == (age < ABANDONED_S)
    assert folder.is_dir()
    assert artifacts.verify(store, digest)
