"""Which cores a workload runs on, and what a device may say about itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nas.core.device import Cluster, Device, parse_cores, show_cores
from nas.core.errors import InvalidInput
from nas.core.plan import Plan, Runner
from nas.core.workload import Workload

PHONE = (
    Cluster(cpu="Cortex-X1", cores=(6, 7)),
    Cluster(cpu="Cortex-A76", cores=(4, 5)),
    Cluster(cpu="Cortex-A55", cores=(0, 1, 2, 3)),
)
OLD_ROW = {
    **{"id": "box", "transport": "local", "model": "Box", "cpu": "c", "target": "x86_64-linux", "cpu_features": []},
    **{"cores": 8, "memory_mb": 1024, "os": "Linux", "tags": []},
}


def device(**more: Any) -> Device:
    return Device.model_validate(OLD_ROW | more)


def test_a_row_of_an_earlier_version_is_a_device() -> None:
    old = device()
    assert old.core_numbers == tuple(range(8))
    assert old.pinned(Workload()) == Workload()
    assert old.pinning(Workload()) == ""


@pytest.mark.parametrize(
    ("threads", "cores", "why"),
    [
        (1, (6, 7), "cores 6-7, its biggest: Cortex-X1"),
        (2, (6, 7), "cores 6-7, its biggest: Cortex-X1"),
        (4, (4, 5, 6, 7), "cores 4-7, its biggest: Cortex-X1 and Cortex-A76"),
        (9, tuple(range(8)), "cores 0-7, its biggest: Cortex-X1 and Cortex-A76 and Cortex-A55"),
    ],
)
def test_of_unlike_clusters_the_biggest_is_taken(threads: int, cores: tuple[int, ...], why: str) -> None:
    phone, workload = device(clusters=PHONE), Workload(threads=threads)
    assert phone.pinned(workload).affinity == cores
    assert phone.pinning(workload) == why


def test_the_owners_choice_comes_before_that() -> None:
    phone = device(clusters=PHONE, pinned_to=(4, 5))
    assert phone.pinned(Workload(threads=2)).affinity == (4, 5)
    assert phone.pinning(Workload()) == "cores 4-5, as chosen for the device"
    with pytest.raises(InvalidInput, match="3 threads do not fit on cores 4-5"):
        phone.pinned(Workload(threads=3))


def test_the_workloads_own_cores_come_first() -> None:
    phone = device(clusters=PHONE, pinned_to=(4, 5))
    assert phone.pinned(Workload(affinity=(0, 1))).affinity == (0, 1)
    assert phone.pinning(Workload(affinity=(0, 1))) == "cores 0-1, as the workload says"
    for machine in (phone, device()):
        with pytest.raises(InvalidInput, match="box has no core 8-9; it has 0-7"):
            machine.pinned(Workload(affinity=(7, 8, 9)))


@given(st.sets(st.integers(0, 9999), min_size=1, max_size=40))
def test_lists_of_cores_are_read_as_they_were_written(cores: set[int]) -> None:
    assert parse_cores(show_cores(cores)) == tuple(sorted(cores))


@pytest.mark.parametrize(
    ("text", "cores"), [("4-7", (4, 5, 6, 7)), ("0,2-3", (0, 2, 3)), ("0 1 2", (0, 1, 2)), ("3-3,3", (3,))]
)
def test_lists_of_cores(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", ",", "4-", "7-4", "a", "-1", "1.5", "0-99999", "1;2", "٣"])
def test_what_is_no_list_of_cores(text: str) -> None:
    with pytest.raises(InvalidInput, match="cores"):
        parse_cores(text)


@pytest.mark.parametrize("model", ["x" * 201, "a\nb", "\x1b[2J", "tnatropmi‮", "\x00"])
def test_a_device_says_short_printable_lines(model: str) -> None:
    for field in ({"model": model}, {"unread": {"soc": model}}, {"cpu_features": [model]}):
        with pytest.raises(ValidationError):
            device(**field)


def test_a_device_has_no_endless_number_of_cores() -> None:
    with pytest.raises(ValidationError):
        device(cores=10**12)


@pytest.mark.parametrize("core", [-1, 10**12])
def test_a_plan_is_pinned_to_cores_that_there_can_be(core: int) -> None:
    runner = Runner(runtime="fake", build="b", target="x86_64-linux", files={}, main="run")
    with pytest.raises(ValidationError, match="affinity"):
        Plan(runner=runner, inputs={}, args=(), affinity=(core,), deadline_s=1.0)
