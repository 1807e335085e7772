"""An index that is really killed: SIGKILL at random moments, then the same command again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_runner import nas
from retrieval_lab import texts, write_lines, write_model

from tests.support.waiting import until_written

KILLS = 5 if os.environ.get("HILNAS_TEST_ALL") else 1
COMMAND = ("family", "index", "model", "documents.jsonl", "-o")


def start(index: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nas.cli", *COMMAND, index.name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)


def test_a_killed_index_is_continued_to_the_same_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    lines = [{"id": f"d{number}", "text": text} for number, text in enumerate(texts(4000 if KILLS > 1 else 1024, 40))]
    write_lines(tmp_path / "documents.jsonl", lines)
    whole, index, rng = tmp_path / "whole", tmp_path / "index", random.Random(0)
    assert nas(*COMMAND, whole.name).code == 0
    first, *others = sorted(path.stat().st_mtime for path in whole.glob("documents-*"))
    part_s = (others[-1] - first) / len(others)
    parts = [0]
    for _ in range(KILLS):
        process = start(index)
        until_written(index / f"documents-{parts[-1]:05}.jsonl", process)
        time.sleep(rng.uniform(0, part_s / 2))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL and not (index / "index.json").exists()
        parts.append(len(list(index.glob("documents-*"))))
    assert parts == sorted(set(parts))
    assert nas(*COMMAND, index.name).code == 0
    files = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert {path.name: path.read_bytes() for path in index.iterdir()} == files
