"""Spaces of several targets: runtimes on some of the devices, devices with threads and cores of their own."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from study_support import TINY, tiny_space

from nas.core.scoring import MeasurementKey, measurement_keys
from nas.core.workload import Workload
from nas.search.analysis.axes import measured_figures
from nas.search.analysis.record import key_lookup
from nas.search.study.events import CalibratedDevice

LATENCY = {"name": "latency", "metric": "latency", "workload": "chat"}
SPACE: dict[str, Any] = {
    "devices": ["local", "tag:old", "tag:two"],
    "runtimes": [
        {"name": "fake", "quantisation": "q4_0"},
        {"name": "other", "quantisation": "q4_0", "devices": ["local", "tag:two"]},
    ],
    "budgets": [],
    "objectives": [{"name": "quality", "metric": "quality"}, LATENCY],
}
TARGETS = [("local", "fake"), ("local", "other"), ("tag:old", "fake"), ("tag:two", "fake"), ("tag:two", "other")]


def test_a_runtime_may_run_on_some_of_the_devices() -> None:
    space = tiny_space(**SPACE)
    assert space.targets == TARGETS
    keys = [MeasurementKey(*target, "chat") for target in TARGETS]
    assert measurement_keys(space, space.objectives[1]) == keys
    assert [figure.key for figure in measured_figures(space)] == keys
    assert space.labels_on("another device of a family") == ["fake", "other"]
    named = tiny_space(**SPACE | {"objectives": [SPACE["objectives"][0], LATENCY | {"runtime": "other"}]})
    assert [key.device for key in measurement_keys(named, named.objectives[1])] == ["local", "tag:two"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runtimes": [SPACE["runtimes"][1]]}, "no runtime runs on tag:old"),
        ({"devices": ["local", "tag:old"]}, "unknown device of this space 'tag:two'"),
        (
            {"objectives": [SPACE["objectives"][0], LATENCY | {"runtime": "other", "device": "tag:old"}]},
            "other does not run on tag:old",
        ),
    ],
)
def test_targets_that_do_not_exist_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny_space(**SPACE | change)


def test_measurements_are_found_with_the_cores_and_threads_of_their_device() -> None:
    space = tiny_space(**SPACE)
    chat = Workload.model_validate(TINY["workloads"]["chat"])
    devices = [
        CalibratedDevice("phone", "local", (("chat", (4, 5)),), ()),
        CalibratedDevice("phone-t2", "tag:two", (("chat", (4, 5)),), (("chat", 2),)),
        CalibratedDevice("box", "tag:old", (), ()),
    ]
    lookup = key_lookup(space, devices)
    ran = chat.model_copy(update={"affinity": (4, 5)})
    assert lookup("phone", "fake", "q4_0", ran.model_dump_json()) == [("local", "fake", "chat")]
    assert lookup("phone", "fake", "q4_0", chat.model_dump_json()) == []
    two = ran.model_copy(update={"threads": 2})
    assert lookup("phone-t2", "fake", "q4_0", two.model_dump_json()) == [("tag:two", "fake", "chat")]
    assert lookup("box", "fake", "q4_0", chat.model_dump_json()) == [("tag:old", "fake", "chat")]
