"""What holds for all tests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nas.runtimes.executorch.builds import Build as ExecuTorchBuild
    from nas.runtimes.llama_cpp.builds import Build

# Set before torch loads: its thread pools spin, and tests run beside each other on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def llama_build() -> Build:
    """llama.cpp for this machine: built once (some minutes), then found in the user's cache."""
    from nas.runtimes.llama_cpp.build import build

    return build(log=print)


@pytest.fixture(scope="session")
def patched_build() -> Build:
    """The same with our patches, which layouts beyond the stock architectures need."""
    from nas.runtimes.llama_cpp.build import build

    return build(log=print, patched=True)


@pytest.fixture(scope="session")
def executorch_build() -> ExecuTorchBuild:
    """The ExecuTorch runner for this machine: compiled once (half a minute), then found in the user's cache."""
    from nas.runtimes.executorch.build import build

    return build(log=print)
