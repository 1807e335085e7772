"""`nas family post` with Ray as a user starts it, killed in three stages: it ends with the same weights."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pretrain_lab import SETTINGS, run_here, write_corpus, write_family, write_tokenizer

from nas.core.canonical import sha256_of
from nas.core.family import families_folder
from nas.posttrain.recipe import read_recipe, run_recipe
from nas.posttrain.tasks import write_tasks
from nas.pretrain import member_training

DEADLINE_S = 300
STAGES = ("pretrain", "sft", "prefer", "merge")


def weights() -> list[str]:
    """SHA-256 of the weights of all stages of the member, sorted."""
    return sorted(map(sha256_of, families_folder().glob("tiny/1M/training/*/weights.safetensors")))


def write_recipe(folder: Path) -> Path:
    write_tokenizer(folder / "tokenizer.json", write_corpus(folder / "corpus"))
    write_tasks(folder, train=30, test=4, pairs=12, lines=20)
    settings = SETTINGS.model_copy(update={"tokens": 8 * 256}).model_dump(mode="json")
    stages = [
        {"kind": "pretrain", "corpus": ["corpus"], "settings": settings},
        {"kind": "sft", "data": [{"path": "train.jsonl"}], "batch": 8, "lr": 5e-3, "epochs": 1},
        {"kind": "prefer", "pairs": ["pairs.jsonl"], "batch": 4, "epochs": 1, "lr": 1e-4},
        {"kind": "merge", "method": "ties", "density": 0.5},
    ]
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"tokenizer": "tokenizer.json", "stages": stages}))
    return path


def start(recipe: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nas.cli", "family", "post", "tiny", "--size", "1M", "--recipe", str(recipe)]
    with log.open("wb") as file:
        return subprocess.Popen([*command, "--workers", "1"], stdout=file, stderr=subprocess.STDOUT)


def wait_for(process: subprocess.Popen[bytes], log: Path, text: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while text not in log.read_text(errors="replace"):
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, f"no {text!r} in {log.read_text(errors='replace')}"
        time.sleep(0.01)


@pytest.mark.exhaustive  # by default test_posttrain_sft.py ends runs in its own process, at given steps
def test_a_command_killed_in_three_stages_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NAS_HOME", "NAS_LOCK"):
        monkeypatch.setenv(name, str(tmp_path / name))
    recipe = write_recipe(tmp_path)
    write_family()
    delays = random.Random(0)
    for number, stage in enumerate(STAGES[:3], 1):
        log = tmp_path / f"killed-{number}.txt"
        process = start(recipe, log)
        try:
            wait_for(process, log, f"stage {number} of 4: {stage}")
            time.sleep(delays.uniform(0, 4))
        finally:
            process.kill()
            process.wait(timeout=60)
        assert process.returncode == -signal.SIGKILL, log.read_text(errors="replace")
        assert len(weights()) < len(STAGES), "it ended before it was killed"
    log = tmp_path / "last.txt"
    process = start(recipe, log)
    assert process.wait(timeout=DEADLINE_S) == 0, log.read_text(errors="replace")
    table = log.read_text()
    assert all(stage in table for stage in STAGES) and "peak memory" in table
    found = weights()

    monkeypatch.setenv("NAS_HOME", str(tmp_path / "calm"))
    monkeypatch.setattr(member_training, "run_workers", run_here)
    write_family()
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        stages = read_recipe(recipe)
        run_recipe("tiny", "1M", stages, tmp_path, lambda line: None, workers=1, write=lambda trained, log: None)
    finally:
        torch.set_num_threads(before)
    assert len(found) == len(STAGES) and found == weights()
