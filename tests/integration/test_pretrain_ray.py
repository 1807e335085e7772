"""Trainings of a small member through Ray Train, interrupted and resumed.

By default two workers resume what an interrupted training in this process left, so that Ray starts once; with
HILNAS_TEST_ALL, commands on one and two workers are killed and run again. That one worker resumes to the bit, and that
what has ended is not trained again, is by default in tests/unit/test_pretrain_train.py and test_pretrain_files.py,
without Ray; a process that is killed while it trains in test_proxy_kill.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pretrain_lab import SETTINGS, KilledError, killed_after, pretraining, write_corpus, write_family, write_tokenizer
from safetensors.torch import load_file

from nas.train.pretrain import member_training
from nas.train.pretrain.member_training import CHECKPOINT, Work, run_plan, train_member
from nas.train.pretrain.next_token import PretrainingRequest

PROGRAM = """
import json, sys
from pathlib import Path
from pretrain_lab import SETTINGS
from nas.train.pretrain.next_token import PretrainingRequest
from nas.train.pretrain.member_training import train_member

corpus, tokenizer, workers = sys.argv[1:]
request = PretrainingRequest(
    (Path(corpus),), SETTINGS, tokenizer=Path(tokenizer), workers=int(workers), checkpoint_s=0
)
record = train_member("tiny", "1M", request, lambda line: print(line, file=sys.stderr), lambda trained, log: None)
print(record.model_dump_json())
"""
DEADLINE_S = 400


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NAS_HOME", "NAS_CACHE", "NAS_LOCK"):
        monkeypatch.setenv(name, str(tmp_path / name))
    write_tokenizer(tmp_path / "tokenizer.json", write_corpus(tmp_path / "corpus"))
    write_family()


@pytest.fixture
def start(tmp_path: Path) -> Callable[[int], subprocess.Popen[str]]:
    """Starts the training in a process of its own, on a number of workers."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def run(workers: int) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            *map(str, (tmp_path / "corpus", tmp_path / "tokenizer.json", workers)),
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    return run


def killed(work: Work, *_: object) -> None:
    """Stands for `run_workers`: one worker in this process, killed after 20 passes."""
    run_plan(work, killed_after(20))


def undisturbed(folder: Path, threads: int) -> dict[str, torch.Tensor]:
    """The weights of the same training in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    calm = pretraining(folder / "calm", folder / "corpus", folder / "tokenizer.json")
    calm.run()
    torch.set_num_threads(before)
    return calm.model.state_dict()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = (folder / "NAS_HOME").glob("families/tiny/1M/training/*/weights.safetensors")
    return load_file(path)


def starts_of(folder: Path) -> list[str]:
    (log,) = (folder / "NAS_HOME").glob("families/tiny/1M/training/*/log.txt")
    return [line for line in log.read_text().splitlines() if "from step" in line]


@pytest.mark.exhaustive  # minutes; by default test_compute_cluster.py loses a node of trainings
def test_two_workers_resume_an_interrupted_training(
    tmp_path: Path, start: Callable[[int], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_training, "run_workers", killed)
    request = PretrainingRequest(
        (tmp_path / "corpus",), SETTINGS, tokenizer=tmp_path / "tokenizer.json", workers=1, checkpoint_s=0
    )
    with pytest.raises(KilledError):
        train_member("tiny", "1M", request, lambda line: None)
    (checkpoint,) = (tmp_path / "NAS_HOME").glob(f"families/tiny/1M/training/*/{CHECKPOINT}")
    out, _ = start(2).communicate(timeout=DEADLINE_S)
    record = json.loads(out)
    (resumed_from,) = starts_of(tmp_path)
    assert "from step 0 " not in resumed_from
    assert (record["steps"], record["device"]) == (30, "2 x cpu")
    assert record["curve"][-1][1] < record["curve"][0][1] - 1
    assert not checkpoint.exists(), "a training that has ended needs no checkpoint"
    require_close(weights_of(tmp_path), undisturbed(tmp_path, max(1, len(os.sched_getaffinity(0)) // 2)))


def require_close(resumed: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.allclose(resumed[name], tensor, atol=2e-3), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_training_ends_with_the_weights_of_one_left_alone(
    tmp_path: Path, start: Callable[[int], subprocess.Popen[str]], workers: int
) -> None:
    process = start(workers)
    deadline = time.monotonic() + DEADLINE_S
    while not (checkpoints := list((tmp_path / "NAS_HOME").glob(f"families/tiny/1M/training/*/{CHECKPOINT}"))):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline, "no checkpoint appeared"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    out, _ = start(workers).communicate(timeout=DEADLINE_S)
    record = json.loads(out)
    starts = starts_of(tmp_path)
    assert len(starts) == 2 and "from step 0 " in starts[0] and "from step 0 " not in starts[1]
    assert record["curve"][-1][1] < record["curve"][0][1] - 1
    assert record["steps"] == 30
    assert not checkpoints[0].exists(), "a training that has ended needs no checkpoint"
    calm, resumed = undisturbed(tmp_path, max(1, len(os.sched_getaffinity(0)) // workers)), weights_of(tmp_path)
    if workers == 1:
        assert record["device"] == "cpu"
        assert all(torch.equal(resumed[name], tensor) for name, tensor in calm.items())
        again, _ = start(1).communicate(timeout=DEADLINE_S)
        assert json.loads(again) == record
    else:
        assert record["device"] == "2 x cpu"
        require_close(resumed, calm)
