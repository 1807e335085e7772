"""`nas family post` from text to chat as a user starts it, killed within three stages: the weights are the same."""

from __future__ import annotations

import json
import os
import re
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
from nas.search.spaces.problems import read_model
from nas.train.posttrain.toy_data import write_tasks
from nas.train.pretrain import member_training
from nas.train.recipe import PostTrainingRecipe, run_recipe
from nas.train.release.options import FileOptions

DEADLINE_S = 600
STAGES = ("pretrain", "sft", "prefer", "merge")
MEMBER = ("tiny", "--size", "1M")


def results() -> list[str]:
    """SHA-256 of the weights of all stages of the member and of its Q4_0 file, sorted."""
    folder = families_folder() / "tiny" / "1M"
    return sorted(map(sha256_of, (*folder.glob("training/*/weights.safetensors"), *folder.glob("gguf/*Q4_0.gguf"))))


def write_recipe(folder: Path) -> Path:
    write_tokenizer(folder / "tokenizer.json", write_corpus(folder / "corpus"))
    write_tasks(folder, train=80, test=4, pairs=24, lines=20)
    settings = SETTINGS.model_copy(update={"tokens": 24 * 256}).model_dump(mode="json")
    stages = [
        {"kind": "pretrain", "corpus": ["corpus"], "settings": settings},
        {"kind": "sft", "data": [{"path": "train.jsonl"}], "batch": 8, "lr": 5e-3, "epochs": 2},
        {"kind": "prefer", "pairs": ["pairs.jsonl"], "batch": 4, "epochs": 2, "lr": 1e-4},
        {"kind": "merge", "method": "ties", "density": 0.5},
    ]
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"tokenizer": "tokenizer.json", "stages": stages}))
    return path


def start(recipe: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nas.cli", "family", "post", *MEMBER, "--recipe", str(recipe), "--workers", "1"]
    with log.open("wb") as file:
        return subprocess.Popen([*command, "--checkpoint-every", "0"], stdout=file, stderr=subprocess.STDOUT)


def wait_for_checkpoint(process: subprocess.Popen[bytes], log: Path, stage: int) -> None:
    """Returns once the stage that is number `stage`, from 1, has written a checkpoint, and is not done."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        folders = list(families_folder().glob("tiny/1M/training/*"))
        running = [folder for folder in folders if not (folder / "weights.safetensors").exists()]
        if len(folders) == stage and running and (running[0] / "checkpoint.safetensors").exists():
            return
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, f"no checkpoint of stage {stage} in {log.read_text(errors='replace')}"
        time.sleep(0.005)


def answer() -> str:
    chat = [sys.executable, "-m", "nas.cli", "family", "chat", *MEMBER, "-q", "q4_0", "--temperature", "0"]
    done = subprocess.run([*chat, "--tokens", "24"], input=b"What is 2 + 3?\n", capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout.decode().strip()


@pytest.mark.exhaustive  # by default test_posttrain_sft.py ends runs in its own process, at given steps
def test_a_command_killed_within_three_stages_ends_with_the_same_weights_and_talks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NAS_HOME", "NAS_LOCK"):
        monkeypatch.setenv(name, str(tmp_path / name))
    recipe = write_recipe(tmp_path)
    write_family()
    logs = [tmp_path / f"run-{number}.txt" for number in range(1, len(STAGES) + 1)]
    for number, log in enumerate(logs[:-1], 1):
        process = start(recipe, log)
        try:
            wait_for_checkpoint(process, log, number)
        finally:
            process.kill()
            process.wait(timeout=60)
        assert process.returncode == -signal.SIGKILL, log.read_text(errors="replace")
    process = start(recipe, logs[-1])
    assert process.wait(timeout=DEADLINE_S) == 0, logs[-1].read_text(errors="replace")
    for log in logs[1:]:
        (first, *_) = re.findall(r"training \w+ from step ([\d,]+) to", log.read_text(errors="replace"))
        assert first != "0", f"the interrupted stage began anew: {log.read_text(errors='replace')}"
    table = logs[-1].read_text()
    assert all(stage in table for stage in STAGES) and "peak memory" in table
    assert answer()
    hashes = results()

    monkeypatch.setenv("NAS_HOME", str(tmp_path / "calm"))
    monkeypatch.setattr(member_training, "run_workers", run_here)
    write_family()
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        files = FileOptions(transformers=False, gguf=("q4_0",))
        stages = read_model(recipe, PostTrainingRecipe)
        run_recipe("tiny", "1M", stages, tmp_path, lambda line: None, workers=1, files=files)
    finally:
        torch.set_num_threads(before)
    assert len(hashes) == len(STAGES) + 1 and hashes == results()
