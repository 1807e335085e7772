"""What tests with real servers and devices share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nas.core.workload import Workload
from tests.support.postgres import CARELESS, Server, server

LONGEST = (
    "test_release_stock",
    "test_study_search",
    "test_llama_cpp_patched",
    "test_study_two_runtimes",
    "test_llama_cpp_gate",
    "test_devices_adb",
    "test_devices_ssh",
    "test_add_your_phone",
    "test_study_kill",
    "test_compare_whole",
    "test_compute_cluster",
    "test_adapt_ray",
    "test_pretrain_ray",
    "test_farm_faults",
    "test_benchmarks",
    "test_executorch_whole",
    "test_executorch_gate",
    "test_api_submitted",
    "test_api_serve",
    "test_farm_devices",
    "test_scaling_measured",
    "test_study_trouble",
    "test_llama_cpp_tools",
    "test_llama_cpp_stock",
    "test_executorch_arm",
)
"""Files that take longest. They begin first, so that no process is left with one of them when the others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


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
