"""Block kinds of another package are exported, gated against PyTorch, and released."""

from __future__ import annotations

from pathlib import Path

import pytest

from nas.measure.runtimes.executorch.variants import Build
from nas.measure.runtimes.llama_cpp.variants import Build as LlamaBuild
from tests.plugin import run_with_plugin

# Blocks are lowered, and llama.cpp is compiled, the first time. By default test_plugin_blocks.py reads the file that
# the record of such a block writes; nothing else runs its graphs.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]


def test_blocks_of_another_distribution_are_exported(executorch_build: Build, tmp_path: Path) -> None:
    run_with_plugin("gate.py", tmp_path, 800)


def test_blocks_of_another_distribution_are_exported_to_llama_cpp(patched_build: LlamaBuild, tmp_path: Path) -> None:
    run_with_plugin("gate_llama_cpp.py", tmp_path, 3500)
