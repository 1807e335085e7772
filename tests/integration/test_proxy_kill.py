"""A training that is really killed: SIGKILL at any moment, then the same command again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from nas.core.layout import Layout
from nas.search.proxy.job import TaskRun, TrainJob, TrainResult
from nas.search.proxy.train import train
from tests.support.waiting import until_written

PROGRAM = """
import sys, time
from pathlib import Path
from nas.search.proxy.job import TrainJob
from nas.search.proxy.train import train

job = TrainJob.model_validate_json(Path(sys.argv[1]).read_text())
step_s = float(sys.argv[3])
result = train(
    job,
    yield_hook=lambda: time.sleep(step_s),
    checkpoint_dir=Path(sys.argv[2]),
    device="cpu",
    log=print,
    checkpoint_s=0,
)
print(result.model_dump_json())
"""
LAYOUT = Layout.parse("d32 v256 ffn=moe:4x2:32 [C3 A2/1]")
JOB = TrainJob(
    layout=LAYOUT.to_json(), run=TaskRun(task="induction"), steps=40, batch=2, lr=3e-3, warmup=5, weight_decay=0.1,
    clip=1.0, ema=0.9, seed=0,
)  # fmt: skip


def start(folder: Path, step_s: float = 0.0) -> subprocess.Popen[str]:
    job = folder / "job.json"
    job.write_text(JOB.model_dump_json())
    command = [sys.executable, "-c", PROGRAM, str(job), str(folder / "runs"), str(step_s)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def numbers(result: TrainResult) -> dict[str, Any]:
    return result.model_dump(include={"key", "scores", "accuracy", "losses", "curve", "weights_sha256"})


def test_a_killed_training_ends_like_one_that_was_left_alone(tmp_path: Path) -> None:
    calm = train(JOB, yield_hook=lambda: None, checkpoint_dir=tmp_path / "calm", device="cpu", log=print)
    process = start(tmp_path, step_s=0.1)
    checkpoint = tmp_path / "runs" / JOB.key / "checkpoint.safetensors"
    until_written(checkpoint, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    out, _ = start(tmp_path).communicate(timeout=240)
    first, *_, last = out.splitlines()
    assert f"from step 0 to {JOB.steps}" not in first
    assert numbers(TrainResult.model_validate_json(last)) == numbers(calm)
