"""What tests with real servers and devices share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nas.core.workload import Workload
from tests.support.forked_binding import forked_binding
from tests.support.postgres import CARELESS, Server, server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """One PostgreSQL server for the whole run."""
    with server(CARELESS) as started:
        yield started


@pytest.fixture
def postgres(postgres_server: Server) -> Iterator[Server]:
    """The same; the databases that a test makes on it are removed afterwards."""
    with postgres_server.dropping():
        yield postgres_server


@pytest.fixture(scope="module")
def short_reference_runs() -> Iterator[None]:
    """Shortens the reference runs that this process plans to an eighth.

    One of full length is in test_llama_cpp_runner.py.
    """
    from nas.measure.runtimes.executorch.runtime import ExecuTorch
    from nas.measure.runtimes.llama_cpp.runtime import LlamaCpp

    with pytest.MonkeyPatch.context() as patch:
        for runtime in (ExecuTorch, LlamaCpp):
            patch.setattr(runtime, "reference_workload", lambda self: Workload(prompt=64, gen=32))
        yield


@pytest.fixture(scope="module")
def fast_binding() -> Iterator[None]:
    """Forks the processes of llama.cpp's binding.

    test_llama_cpp_text.py and test_llama_cpp_types.py start them as the product does.
    """
    with forked_binding():
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Lets commands of this process use one core: threads of llama.cpp spin while they wait, and tests share cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: {0})
        yield
