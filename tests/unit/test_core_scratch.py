"""Scratch folders: what killed processes left is removed, what others use is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nas.core.durable import scratch_folder

USER = """
import sys
from nas.core.durable import scratch_folder
with scratch_folder("test") as folder:
    (folder / "model").write_text("half")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_only_folders_of_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "hilnas-test-other").mkdir()
    argv = [sys.executable, "-c", USER]
    with subprocess.Popen(argv, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process_folder = Path(process.stdout.readline().strip())
        with scratch_folder("test") as folder:
            assert (process_folder / "model").is_file() and folder.parent == process_folder.parent == tmp_path
        process.kill()
        process.wait()
        with scratch_folder("test"):
            assert not process_folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["hilnas-test-other"], "has no lock: it is none of ours"
