"""`nas backup` and `nas restore`: what is saved, while others write, and what is refused."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_runner import nas
from store_support import add_device

from nas.infra.store import agents, backup, devices, migrate
from nas.infra.store.rows import Role
from nas.infra.store.store import Store


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("NAS_HOME", str(home))
    monkeypatch.delenv("NAS_DB", raising=False)
    store = Store.open(create=True)
    add_device(store)
    agents.create_api_token(store, "ann", Role.READ)
    store.close()
    for name in (
        "tls/ca.pem",
        "signing.key",
        "studies/one/submission.json",
        "work/big",
        "artifacts/ab/abc",
        "agent.log",
        "agent.log.1",
    ):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    (home / "signing.key").chmod(0o600)
    os.mkfifo(home / "pipe")
    (home / "outside").symlink_to("/etc/hostname")
    return home


def restored(archive: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    new = home.with_name("new")
    monkeypatch.setenv("NAS_HOME", str(new))
    done = nas("restore", str(archive))
    assert done.code == 0, done.err
    return new


def test_what_cannot_be_made_again_is_as_it_was(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "saved.tar.gz"
    done = nas("backup", str(archive), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) | {"hilnas": ""} == {
        "file": str(archive), "files": 3, "has_database": True, "hilnas": "", "revision": migrate.REVISION
    }  # fmt: skip
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    new = restored(archive, home, monkeypatch)
    files = {str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()}
    assert files - {"hilnas.db-wal", "hilnas.db-shm"} == {
        "hilnas.db", "tls/ca.pem", "signing.key", "studies/one/submission.json"
    }  # fmt: skip
    assert stat.S_IMODE((new / "signing.key").stat().st_mode) == 0o600
    store = Store.open(create=False)
    assert devices.get(store, "box").id == "box"
    assert [token.name for token in agents.api_tokens(store)] == ["ann"]
    store.close()


def test_it_is_consistent_while_others_write(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, committed, stop = Store.open(create=False), threading.Event(), threading.Event()

    def write() -> None:
        for number in range(10_000):
            if stop.is_set():
                return
            with store.write():  # both or none
                agents.create_api_token(store, f"first-{number}", Role.READ)
                agents.create_api_token(store, f"second-{number}", Role.READ)
            committed.set()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert committed.wait(60)
        for number in range(3):
            assert nas("backup", str(tmp_path / f"{number}.tar.gz")).code == 0
    finally:
        stop.set()
        thread.join()
        store.close()
    restored(tmp_path / "2.tar.gz", home, monkeypatch)
    copy = Store.open(create=False)
    names = [token.name for token in agents.api_tokens(copy)]
    copy.close()
    firsts, seconds = (sum(name.startswith(half) for name in names) for half in ("first", "second"))
    assert firsts == seconds > 0


def test_nothing_is_overwritten(home: Path, tmp_path: Path) -> None:
    archive = tmp_path / "saved.tar.gz"
    archive.write_text("precious")
    done = nas("backup", str(archive))
    assert done.code == 3 and "exists already" in done.err and archive.read_text() == "precious"
    done = nas("backup", str(home / "inside.tar.gz"))
    assert done.code == 3 and "name a file elsewhere" in done.err
    archive.unlink()
    assert nas("backup", str(archive)).code == 0
    done = nas("restore", str(archive))
    assert done.code == 3 and "is not empty" in done.err and (home / "signing.key").read_text() == "signing.key"
    assert sorted(tmp_path.iterdir()) == [home, archive]


def test_files_with_two_names_and_files_that_vanish_are_no_obstacle(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.link(home / "signing.key", home / "studies/one/zero.key")
    listed = os.walk

    def walk(*args: Any, **more: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        yield from ((folder, names, [*files, "removed since"]) for folder, names, files in listed(*args, **more))

    archive = tmp_path / "saved.tar.gz"
    with monkeypatch.context() as patch:
        patch.setattr("nas.infra.store.backup.os.walk", walk)
        done = nas("backup", str(archive), "--json")
    assert done.code == 0 and json.loads(done.out)["files"] == 4, done.err
    new = restored(archive, home, monkeypatch)
    assert (new / "signing.key").read_text() == (new / "studies/one/zero.key").read_text() == "signing.key"


def test_a_database_under_another_path_is_saved_once(home: Path, tmp_path: Path) -> None:
    Store.open(f"sqlite:///{home / 'farm.db'}", create=True).close()
    (tmp_path / "link").symlink_to(home)
    archive = tmp_path / "saved.tar.gz"
    done = nas("backup", str(archive), "--db", f"sqlite:///{tmp_path / 'link/farm.db'}")
    assert done.code == 0, done.err
    with tarfile.open(archive) as file:
        assert [name for name in file.getnames() if name.endswith(".db")] == [backup.DATABASE]


def test_a_folder_that_cannot_be_read_is_not_left_out_silently(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = os.scandir

    def scandir(folder: Any) -> Any:
        if str(folder).endswith("/tls"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return listing(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        done = nas("backup", str(tmp_path / "saved.tar.gz"))
    assert done.code == 4 and f"Permission denied ({home / 'tls'})" in done.err, done.err
    assert not (tmp_path / "saved.tar.gz").exists()


def test_a_file_system_without_links_takes_an_archive(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("nas.infra.store.backup.os.link", link)
    archive = tmp_path / "saved.tar.gz"
    done = nas("backup", str(archive))
    assert done.code == 0, done.err
    restored(archive, home, monkeypatch)


def test_an_empty_folder_is_filled_where_it_is(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "saved.tar.gz"
    assert nas("backup", str(archive)).code == 0
    volume = home.with_name("new")
    (volume / "lost+found").mkdir(parents=True)
    before = volume.stat().st_ino
    new = restored(archive, home, monkeypatch)
    assert new.stat().st_ino == before and stat.S_IMODE(new.stat().st_mode) == 0o700
    names = {path.name for path in new.iterdir()}
    assert names - {"hilnas.db-wal", "hilnas.db-shm"} == {"hilnas.db", "lost+found", "signing.key", "studies", "tls"}


def entry(name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content) if kind == tarfile.REGTYPE else 0, kind, target
    return info


MANIFEST = json.dumps({"v": 1, "at": 0, "files": 0, "has_database": False, "hilnas": "0.2.0", "revision": "0.2.0"})


@pytest.mark.parametrize(
    "entries, message",
    [
        ([(entry("../escape"), b"x")], "no backup"),
        ([(entry("home/../../escape"), b"x")], "escape"),
        ([(entry("/etc/escape"), b"x")], "no backup"),
        ([(entry("home/link", kind=tarfile.SYMTYPE, target="/etc"), b"")], "no backup"),
        ([(entry("home/device", kind=tarfile.CHRTYPE), b"")], "no backup"),
        ([(entry("home/file"), b"x")], "is incomplete"),
        ([(entry("backup.json", b"{}"), b"{}")], "is damaged"),
        ([(entry("backup.json", b"[1]"), b"[1]")], "is damaged"),
        ([(entry("home/file"), b"x"), (entry("backup.json", MANIFEST.encode()), MANIFEST.encode())], "holds 1 of 0"),
        ([(entry("backup.json", b'{"v": 9, "at": 0, "hilnas": "9"}'), b'{"v": 9, "at": 0, "hilnas": "9"}')], "newer"),
    ],
)
def test_archives_of_others_change_nothing(
    entries: list[tuple[tarfile.TarInfo, bytes]], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "archives/bad.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as file:
        for info, content in entries:
            file.addfile(info, io.BytesIO(content) if info.isreg() else None)
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home/new"))
    done = nas("restore", str(archive))
    assert done.code == 3 and message in done.err and "Traceback" not in done.err, done.err
    assert not (tmp_path / "home/new").exists() and not list(tmp_path.rglob("*escape*"))


@pytest.mark.parametrize("cut", [0.3, 0.9])
def test_half_an_archive_changes_nothing(
    cut: float, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "saved.tar.gz"
    assert nas("backup", str(archive)).code == 0
    content = archive.read_bytes()
    archive.write_bytes(content[: int(len(content) * cut)])
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "new"))
    done = nas("restore", str(archive))
    assert done.code == 3 and "saved.tar.gz" in done.err, done.err
    assert not (tmp_path / "new").exists()


def test_a_database_on_a_server_is_left_to_it(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "saved.tar.gz"
    done = nas("backup", str(archive), "--db", "postgresql://nas@db.example/nas")
    assert done.code == 0 and "pg_dump" in done.err + done.out
    with tarfile.open(archive) as file:
        assert backup.DATABASE not in file.getnames()
    new = restored(archive, home, monkeypatch)
    assert (new / "tls/ca.pem").is_file() and not (new / "hilnas.db").exists()
