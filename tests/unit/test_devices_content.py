"""Files by content."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from nas.core.errors import InfrastructureFailed
from nas.measure.devices.files import BUNDLES, ContentFolder


@pytest.fixture
def folder(tmp_path: Path) -> ContentFolder:
    return ContentFolder(tmp_path / "content")


def add(folder: ContentFolder, tmp_path: Path, data: bytes) -> Path:
    source = tmp_path / "source"
    source.unlink(missing_ok=True)
    source.write_bytes(data)
    return folder.add(source, hashlib.sha256(data).hexdigest())


def everything(folder: ContentFolder) -> list[Path]:
    return [path for path in folder.root.rglob("*") if path.is_file()]


def test_add_twice_and_from_itself(folder: ContentFolder, tmp_path: Path) -> None:
    path = add(folder, tmp_path, b"one")
    assert add(folder, tmp_path, b"one") == path
    assert folder.add(path, path.name) == path
    assert everything(folder) == [path]


def test_wrong_bytes_leave_nothing(folder: ContentFolder, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"one")
    with pytest.raises(InfrastructureFailed):
        folder.add(source, "0" * 64)
    assert everything(folder) == []
    assert source.read_bytes() == b"one"


def test_across_file_systems(folder: ContentFolder) -> None:
    source = Path("/proc/sys/kernel/ostype")
    assert folder.add(source, hashlib.sha256(b"Linux\n").hexdigest()).read_bytes() == b"Linux\n"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS])
def test_a_file_system_without_hard_links(
    folder: ContentFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """FUSE says ENOSYS where a file system does not implement them, and an SD card of Android EACCES."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    assert add(folder, tmp_path, b"one").read_bytes() == b"one"


def test_missing_source(folder: ContentFolder, tmp_path: Path) -> None:
    with pytest.raises(InfrastructureFailed, match="No such file"):
        folder.add(tmp_path / "nothing", "0" * 64)


def test_trim_removes_the_least_recently_used_and_keeps_the_named(folder: ContentFolder, tmp_path: Path) -> None:
    paths = [add(folder, tmp_path, bytes([i]) * 100) for i in range(4)]
    for age, path in enumerate(paths):
        os.utime(path, (age, age))
    folder.verify(paths[1].name)
    assert folder.trim(250, keep={paths[0].name}) == 200
    assert sorted(everything(folder)) == sorted([paths[0], paths[1]])


def test_trim_keeps_the_bundles_that_were_used_last(folder: ContentFolder) -> None:
    bundles = folder.root / "bundles"
    for age in range(BUNDLES + 2):
        (bundles / f"{age:02}").mkdir(parents=True)
        (bundles / f"{age:02}" / "runner").write_bytes(b"runner")
        os.utime(bundles / f"{age:02}", (age, age))
    os.utime(bundles / "00")
    folder.trim(1 << 30)
    assert {path.name for path in bundles.iterdir()} == {"00", *(f"{age:02}" for age in range(3, BUNDLES + 2))}


def test_trim_below_the_limit_removes_nothing(folder: ContentFolder, tmp_path: Path) -> None:
    add(folder, tmp_path, b"one")
    assert folder.trim(3) == 0


def test_a_file_that_others_move_while_the_folder_is_trimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that another thread completes."""
    folder = ContentFolder(tmp_path)
    part = folder.partial("a" * 64)
    part.write_bytes(b"x")
    look = Path.stat

    def moved(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        status = look(path, follow_symlinks=follow_symlinks)
        if path == part:
            part.rename(folder.path("a" * 64))
        return status

    monkeypatch.setattr(Path, "stat", moved)
    assert folder.trim(1) == 0
