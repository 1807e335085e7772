"""Failures before and during a build are reported with their remedy. A whole build runs in tests/integration."""

from __future__ import annotations

import fcntl
import io
import os
import runpy
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from nas.core.canonical import sha256_of
from nas.core.errors import InfrastructureFailed, InvalidInput, UnknownName
from nas.measure.runtimes.llama_cpp import compile as building
from nas.measure.runtimes.llama_cpp import source
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.toolchain import build_environment, find_build_tools, stream


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, home: Path) -> Path:
    return tmp_path / "cache"


def script(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_missing_compiler_is_told_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InfrastructureFailed, match=r"no-such-compiler on this machine: install a C\+\+17 compiler"):
        LLAMA_CPP.build(log=print)


def test_broken_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(script(tmp_path / "bin", "cc", "exit 3")))
    with pytest.raises(InfrastructureFailed, match="does not work"):
        LLAMA_CPP.build(log=print)


def test_stray_compiler_flags_do_not_reach_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFLAGS", "-march=native")
    assert "CFLAGS" not in build_environment()


def test_unknown_target_is_told_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="riscv64-linux"):
        LLAMA_CPP.build("riscv64-linux", log=print)


def test_unknown_variant_is_told_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="armv8"):
        LLAMA_CPP.build("aarch64-linux", variant="armv7", log=print)


def test_tools_are_for_this_machine_only() -> None:
    with pytest.raises(InvalidInput, match="llama-quantize"):
        LLAMA_CPP.build("aarch64-linux", tools=True, log=print)


def test_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(InfrastructureFailed, match=r"full.*NAS_CACHE"):
        LLAMA_CPP.build(log=print)


def test_failed_step_shows_the_compilers_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_cache: Path
) -> None:
    """A stand-in for cmake fails as the real one would; nothing of the attempt stays."""
    _put_sdist(empty_cache, monkeypatch)
    failing = script(tmp_path / "bin", "cmake", "echo 'CMake Error: no good'; exit 1")
    _, ninja = find_build_tools()
    monkeypatch.setattr(building, "find_build_tools", lambda: (str(failing), ninja))
    with pytest.raises(InfrastructureFailed, match=r"(?s)cmake failed.*no good"):
        LLAMA_CPP.build(log=print)
    assert [path.name for path in LLAMA_CPP.folder.iterdir()] == [".lock"]


def test_compiler_that_fills_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_cache: Path) -> None:
    _put_sdist(empty_cache, monkeypatch)
    failing = script(tmp_path / "bin", "cmake", "echo 'as: No space left on device'; exit 1")
    _, ninja = find_build_tools()
    monkeypatch.setattr(building, "find_build_tools", lambda: (str(failing), ninja))
    with pytest.raises(InfrastructureFailed, match="is full"):
        LLAMA_CPP.build(log=print)


def test_leftovers_of_a_killed_build_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_cache: Path) -> None:
    _put_sdist(empty_cache, monkeypatch)
    dead = LLAMA_CPP.folder / ".building-dead" / "source"
    dead.mkdir(parents=True)
    failing = script(tmp_path / "bin", "cmake", "exit 1")
    _, ninja = find_build_tools()
    monkeypatch.setattr(building, "find_build_tools", lambda: (str(failing), ninja))
    with pytest.raises(InfrastructureFailed):
        LLAMA_CPP.build(log=print)
    assert not dead.exists()


def test_second_builder_waits_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.measure.runtimes.build_cache.LOCK_S", 0.1)
    LLAMA_CPP.folder.mkdir(parents=True)
    lines: list[str] = []
    with (LLAMA_CPP.folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InfrastructureFailed, match="another process kept it locked"):
            LLAMA_CPP.build(log=lines.append)
    assert lines == ["another process is building llama.cpp: waiting for it"]


def test_progress_is_told_in_tenths() -> None:
    lines: list[str] = []
    on_line = building._progress(lines.append)
    for step in range(1, 79):
        on_line(f"[{step}/78] Building CXX object {step}")
    on_line("warning: something else")
    assert len(lines) == 10 and lines[-1].startswith("compiling: 78 of 78")


def test_other_bytes_than_the_pinned_ones_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip is asked with the hash; should it deliver something else all the same, that is not used."""
    body = f'while [ "$1" != -d ]; do shift; done; echo evil > "$2/{source.SDIST}"'
    _only_pip(monkeypatch, script(tmp_path / "bin", "pip3", body))
    with pytest.raises(InfrastructureFailed, match="not the pinned file"):
        source.fetch(print)
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


def test_failed_download_says_where_to_put_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _only_pip(monkeypatch, script(tmp_path / "bin", "pip3", "echo no network; exit 1"))
    with pytest.raises(InfrastructureFailed, match=rf"(?s)put it at .*{source.SDIST}.*no network"):
        source.fetch(print)


def test_no_pip_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _only_pip(monkeypatch, tmp_path / "nothing")
    with pytest.raises(InfrastructureFailed, match="ensurepip"):
        source.fetch(print)


def test_archive_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "evil.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        _add(archive, f"{source._ROOT}../../../../evil", b"x")
    with pytest.raises(InfrastructureFailed, match=r"evil\.tar\.gz names a file outside"):
        source.unpack(path, tmp_path / "out")
    assert not (tmp_path / "evil").exists()


def test_archive_is_unpacked_by_a_python_without_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12 has Python 3.11.2; filters came with 3.11.4."""
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        _add(archive, f"{source._ROOT}src/x.c", b"x")

    def extractall(self: tarfile.TarFile, path: Path, members: list[tarfile.TarInfo]) -> None:
        for member in members:
            (path / member.name).parent.mkdir(parents=True, exist_ok=True)
            (path / member.name).write_bytes(content.read() if (content := self.extractfile(member)) else b"")

    monkeypatch.setattr(tarfile.TarFile, "extractall", extractall)
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    assert (source.unpack(path, tmp_path / "out") / "src" / "x.c").read_bytes() == b"x"


def test_the_recipe_for_android_compiles_a_runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps: list[list[str]] = []
    monkeypatch.setattr(building, "unpacked_source", lambda spec, work, log: work)
    monkeypatch.setattr(building, "compile_library", lambda tree, out, *_: out)
    monkeypatch.setattr(building, "run_step", lambda argv, *_: steps.append(argv))
    monkeypatch.setenv("ANDROID_NDK", str(tmp_path / "ndk"))
    recipe = Path(__file__).resolve().parents[2] / "docker" / "android" / "llama_cpp" / "make.py"
    runpy.run_path(str(recipe))["main"](tmp_path / "out")
    compilers = [Path(argv[0]).name for argv in steps]
    assert compilers == ["aarch64-linux-android28-clang", "aarch64-linux-android28-clang++"]
    assert str(tmp_path / "out" / "runner") in steps[-1]


def test_deadline_kills_the_whole_group() -> None:
    """It would not come back for an hour if only the shell were killed."""
    for deadline_s in (0.3, 3, 30):  # a busy machine may say nothing before the first is over
        argv = ["/bin/sh", "-c", "echo hi; sleep 3600 & sleep 3600"]
        code, tail = stream(argv, deadline_s=deadline_s, env=dict(os.environ))
        assert code == -9
        if tail:
            break
    assert tail == "hi"


def _put_sdist(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An almost empty sdist, declared to be the pinned one."""
    path = cache / "downloads" / source.SDIST
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as archive:
        _add(archive, f"{source._ROOT}CMakeLists.txt", b"")
    monkeypatch.setattr(source, "SHA256", sha256_of(path))


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _only_pip(monkeypatch: pytest.MonkeyPatch, pip: Path) -> None:
    """This interpreter has no pip, and the search path nothing but `pip`."""
    monkeypatch.setattr(sys.modules["importlib.util"], "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{pip.parent}")
