"""What holds for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from nas.runtimes.executorch.builds import Build as ExecuTorchBuild
    from nas.runtimes.llama_cpp.builds import Build

# Set before torch loads: its thread pools spin, and tests run beside each other on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes is the machine's business.
settings.register_profile("hilnas", deadline=None)
settings.load_profile("hilnas")


@pytest.fixture(scope="session", autouse=True)
def own_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home and a host lock of this process: tests run beside each other, and beside studies of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAS_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("NAS_LOCK", str(tmp_path_factory.mktemp("lock")))
        yield


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
