"""Block kinds of another package are exported, gated against PyTorch, and released."""

from __future__ import annotations

from pathlib import Path

import pytest

from nas.runtimes.executorch.builds import Build
from tests.plugin import run_with_plugin

pytestmark = pytest.mark.timeout(900)  # blocks are lowered the first time


def test_blocks_of_another_distribution_are_exported(executorch_build: Build, tmp_path: Path) -> None:
    run_with_plugin("gate.py", tmp_path, 800)
