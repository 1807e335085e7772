"""Fixtures and rules for all tests.

Tests marked `exhaustive` are deselected unless HILNAS_TEST_ALL is set (`make test-all`); the run says how many. Next to
each of them, or at the top of its file, a comment names the tests that guard the same behaviour by default.

Tests of a group in scripts/tools_for_tests.py, by the marker `needs` or a fixture, are deselected where its tools are
missing; the run says how many of which. Where CI is "true", they run, and fail.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tools_for_tests
from exhaustive import examples
from hypothesis import settings

if TYPE_CHECKING:
    from store_support import StillClock

    from nas.infra.store.store import Store
    from nas.measure.runtimes.executorch.variants import Build as ExecuTorchBuild
    from nas.measure.runtimes.llama_cpp.variants import Build

# Set before torch loads: its thread pools spin, and tests run beside each other on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes is the machine's business. Each run draws other examples.
settings.register_profile("hilnas", deadline=None, max_examples=examples(100))
settings.load_profile("hilnas")


LEFT_OUT = pytest.StashKey[dict[str, int]]()

LONGEST = (
    "test_study_orchestrator",
    "test_blocks_contract",
    "test_adapt_adapt",
    "test_adapt_checkpoints",
    "test_api_fuzz",
    "test_space_packaged",
    "test_benchmark_search",
    "test_benchmark_claims",
    "test_release_class",
    "test_plugin_blocks",
    "test_proxy_train",
    "test_proposers",
    "test_measured_pages",
    "test_search_ehvi",
    "test_store_unusable",
    "test_analysis_archive",
    "test_retrieval_release",
    "test_dashboard_actions",
    "test_adapt_own_text",
    "test_cli_launch",
    "test_benchmark_archives",
    "test_analysis_optuna",
    "test_benchmark_front",
    "test_web_attacks",
    "test_dashboard_fuzz",
    "test_posttrain_prefer",
    "test_benchmark_adapt_bits",
    # Those of tests/integration.
    "test_executorch_private",
    "test_compute_cluster",
    "test_add_your_phone",
    "test_study_kill",
    "test_study_search",
    "test_llama_cpp_patched",
    "test_llama_cpp_arm",
    "test_executorch_arm",
    "test_executorch_gate",
    "test_llama_cpp_gate",
    "test_farm_faults",
    "test_executorch_whole",
    "test_tutorial_model_file",
    "test_devices_ssh",
    "test_devices_adb",
    "test_api_submitted",
    "test_benchmarks",
    "test_store_processes",
    "test_compare_whole",
    "test_release_stock",
    "test_api_serve",
    "test_command_fuzz",
    "test_quantise",
    "test_gguf_upstream",
    "test_packaging",
    "test_study_library",
    "test_compute_local_ray",
    "test_devices_login_shells",
    "test_retrieval_gguf",
    "test_llama_cpp_runner",
    "test_devices_hostile",
    "test_devices_child",
    "test_retrieval_kill",
    "test_llama_cpp_stock",
    "test_posttrain_files",
)
"""Files that take longest. They begin first, so that no process is left with one of them when the others are done."""


@pytest.fixture(scope="session", autouse=True)
def idle_machine() -> Iterator[None]:
    """Lets no launch watch for two seconds what else runs here; tests/unit/test_cli_preflight.py has the function."""
    from nas.cli.preflight import Load

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nas.cli.preflight.load", lambda: Load(0.1, 2, ()))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_power_cut() -> Iterator[None]:
    """Lets no write of this process wait for the disk: some tests do it hundreds of times, and none cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses what is no open file, too
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = {} if tools_for_tests.in_ci() else tools_for_tests.absent()
    reasons = [reason_to_leave_out(item, absent) for item in items]
    config.stash[LEFT_OUT] = dict(Counter(filter(None, reasons)))
    config.hook.pytest_deselected(items=[item for item, reason in zip(items, reasons, strict=True) if reason])
    rank = {name: place for place, name in enumerate(LONGEST)}
    selection = [item for item, reason in zip(items, reasons, strict=True) if not reason]
    items[:] = sorted(selection, key=lambda item: rank.get(item.path.stem, len(rank)))


def reason_to_leave_out(item: pytest.Item, absent: Iterable[str]) -> str:
    """Returns "exhaustive" or the first group of a test that is in `absent`; "": it runs."""
    if item.get_closest_marker("exhaustive") and not os.environ.get("HILNAS_TEST_ALL"):
        return "exhaustive"
    named = {name for marker in item.iter_markers("needs") for name in marker.args}
    assert named <= tools_for_tests.GROUPS.keys(), f"{item.nodeid}: unknown group in {sorted(named)}"
    used = set(getattr(item, "fixturenames", ()))
    return next((name for name in absent if name in named or used & set(tools_for_tests.GROUPS[name].fixtures)), "")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from walking through the imported modules again and again: a tenth of the time.

    Afterwards it looks at what is new less often than by default: a further fortieth.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes the counts from a worker of xdist; each of them collects the same tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, count in config.stash.get(LEFT_OUT, {}).items():
        if name == "exhaustive":
            terminalreporter.write_line(f"{count} exhaustive tests left out; HILNAS_TEST_ALL=1 runs them too")
        else:
            what = tools_for_tests.GROUPS[name].what
            terminalreporter.write_line(f"{count} tests left out that {what}: scripts/tools_for_tests.py says why")


@pytest.fixture(scope="session", autouse=True)
def own_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home and a host lock of this process: tests run beside each other, and beside studies of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAS_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("NAS_LOCK", str(tmp_path_factory.mktemp("lock")))
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of this test, with a cache and a lock beside it; no database is named."""
    for name in ("home", "cache", "lock"):
        monkeypatch.setenv(f"NAS_{name.upper()}", str(tmp_path / name))
    monkeypatch.delenv("NAS_DB", raising=False)
    return tmp_path / "home"


@pytest.fixture
def clock() -> StillClock:
    """The clock of `store`."""
    from store_support import StillClock

    return StillClock()


@pytest.fixture
def store(tmp_path: Path, clock: StillClock) -> Store:
    """An empty store."""
    from store_support import open_store

    return open_store(tmp_path, clock)


@pytest.fixture
def registered(store: Store) -> None:
    """Registers a device in `store`."""
    from store_support import add_device

    add_device(store)


@pytest.fixture(scope="session")
def llama_build() -> Build:
    """llama.cpp for this machine: built once (some minutes), then found in the user's cache."""
    from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP

    return LLAMA_CPP.build(log=print)


@pytest.fixture(scope="session")
def image_build() -> Build:
    """The same with libmtmd, which reads images and sound."""
    from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP

    return LLAMA_CPP.build(log=print, images=True)


@pytest.fixture(scope="session")
def patched_build() -> Build:
    """The same with our patches, which layouts beyond the stock architectures need."""
    from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP

    return LLAMA_CPP.build(log=print, patched=True)


@pytest.fixture(scope="session")
def tools_build() -> Build:
    """The stock build with llama.cpp's own programs: compiled once (some minutes), then found in the user's cache."""
    from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP

    return LLAMA_CPP.build(log=print, tools=True)


@pytest.fixture(scope="session")
def executorch_build() -> ExecuTorchBuild:
    """The ExecuTorch runner for this machine: compiled once (half a minute), then found in the user's cache."""
    from nas.measure.runtimes.executorch.runtime import EXECUTORCH

    return EXECUTORCH.build(log=print)
