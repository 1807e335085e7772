"""Runs a plan on this machine, without a device, for contract tests of runtimes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from nas.core.plan import Plan, RawRun


def run_plan(plan: Plan, runner_folder: Path, inputs: Mapping[str, Path]) -> RawRun:
    """Runs one process of `plan`, killed at its deadline.

    Args:
        plan: to run.
        runner_folder: holds the runner's files.
        inputs: input name -> file on this machine.
    """
    paths = {name: str(path) for name, path in inputs.items()}
    argv = [str(runner_folder / plan.runner.main), *(_fill(arg, paths) for arg in plan.args)]
    started_at, start = time.time(), time.monotonic()
    process = subprocess.Popen(
        argv, env=dict(plan.env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    timed_out = False
    try:
        out, err = process.communicate(timeout=plan.deadline_s)
    except subprocess.TimeoutExpired:
        timed_out = True
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    return RawRun(
        exit_code=process.returncode,
        stdout=out[: plan.output_limit].decode(errors="replace"),
        stderr_tail=err[-4096:].decode(errors="replace"),
        wall_s=time.monotonic() - start,
        timed_out=timed_out,
        truncated=len(out) > plan.output_limit,
        started_at=started_at,
    )


def _fill(arg: str, paths: Mapping[str, str]) -> str:
    for name, path in paths.items():
        arg = arg.replace(f"{{{name}}}", path)
    return arg
