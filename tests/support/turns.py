"""Checks of a runner with two models, for tests of each runtime."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from typing import Literal

import psutil


def assert_neither_outlives_the_other(argv: Sequence[str], killed: Literal["reference", "candidate"]) -> None:
    """Kills one process of a runner at work: both end, and a candidate without its reference model says so."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as candidate:
        (reference,) = _children(candidate.pid)
        (reference if killed == "reference" else psutil.Process(candidate.pid)).kill()
        out, _ = candidate.communicate(timeout=60)
    if killed == "reference":
        assert candidate.returncode == 69
        assert json.loads(out)["error"]["message"] == "it ended without a report"
    else:
        assert (candidate.returncode, out) == (-9, "")
    reference.wait(timeout=60)


def _children(pid: int) -> list[psutil.Process]:
    end = time.monotonic() + 60
    while not (children := psutil.Process(pid).children()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return children
