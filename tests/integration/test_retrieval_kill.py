"""An index that is really killed: SIGKILL at random moments, then the same command again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from retrieval_lab import texts, write_lines, write_model

from tests.support.waiting import until_written

KILLS = 5 if os.environ.get("HILNAS_TEST_ALL") else 1


def start(folder: Path, index: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nas.cli", "family", "index", "model", "documents.jsonl", "-o", index]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)


def test_a_killed_index_is_continued_to_the_same_index(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    lines = [{"id": f"d{number}", "text": text} for number, text in enumerate(texts(4000 if KILLS > 1 else 1536, 40))]
    write_lines(tmp_path / "documents.jsonl", lines)
    process = start(tmp_path, "whole")
    until_written(tmp_path / "whole" / "request.json", process)
    began = time.monotonic()
    assert process.wait(240) == 0
    seconds, index, rng = time.monotonic() - began, tmp_path / "index", random.Random(0)
    parts = [0]
    for _ in range(KILLS):
        process = start(tmp_path, "index")
        until_written(index / f"documents-{parts[-1]:05}.jsonl", process)
        time.sleep(rng.uniform(0, seconds / 10))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL and not (index / "index.json").exists()
        parts.append(len(list(index.glob("documents-*"))))
    assert parts == sorted(set(parts))
    assert start(tmp_path, "index").wait(240) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {path.name: path.read_bytes() for path in index.iterdir()} == files
