"""Tasks that train a library: files of one process, failures, and disks; without Ray (test_adapt_ray.py has it)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_lab import LAYOUT, RECALLING, adaptation, work_of, write_lab
from cli_runner import nas

from benchmarks.adapt import hashes
from nas.adapt import parallel
from nas.adapt.adapt import Adaptation
from nas.adapt.parallel import Workers
from nas.compute.ray import Kind, Outcome, Work, checked
from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput
from nas.core.replacement import slots_of
from nas.nn.fit import Worker
from nas.testing.poll import poll


class Here:
    """Runs tasks in this process; some end in another way."""

    workers = 2

    def __init__(self, *outcomes: Outcome | InfrastructureFailed) -> None:
        self.specs: list[Mapping[str, Any]] = []
        self._outcomes = list(outcomes)

    async def run(self, work: Work, spec: Mapping[str, Any], kind: Kind = "short") -> Outcome:
        assert kind == "shared"
        self.specs.append(spec)
        if not self._outcomes:
            return checked(work(spec))
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, InfrastructureFailed):
            raise outcome
        return outcome

    def close(self) -> None: ...
