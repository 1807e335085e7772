"""Devices as data: what is read of the files and commands of each in `tests/data/devices.json`.

Another device is another entry: a name, the files and commands that differ from the common ones (an error is its number
and text), what the device lacks of those, and what is expected: a value, or a part of the reason why there is none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nas.core.device import show_cores
from nas.measure.devices.describe import describe
from nas.measure.devices.probes import cpu, power, thermal
from nas.measure.devices.probes.readings import Unread
from nas.testing.fake_reader import FakeReader

_LAB = json.loads((Path(__file__).parents[1] / "data/devices.json").read_text())
DEVICES: Mapping[str, Mapping[str, Any]] = {device["name"]: device for device in _LAB["devices"]}

PROBES: Mapping[str, Callable[[FakeReader], Any]] = {
    "id": lambda device: describe(device).id,
    "cores": lambda device: describe(device).cores,
    "clusters": lambda device: [[cluster.cpu, show_cores(cluster.cores)] for cluster in describe(device).clusters],
    "biggest": lambda device: show_cores(describe(device).clusters[0].cores),
    "power": power.power_source,
    "percent": power.battery_percent,
    "energy": lambda device: power.energy_counter(device).name,
    "temperature": thermal.temperature_c,
    "governor": cpu.governor,
    "busy": cpu.busy_s,
}


def device_of(name: str) -> FakeReader:
    entry = DEVICES[name]
    files = {path: text for path, text in _LAB["common"]["files"].items() if path not in entry.get("without", ())}
    errors = {path: OSError(*text) if isinstance(text, list) else text for path, text in entry["files"].items()}
    return FakeReader(files | errors, _LAB["common"]["commands"] | entry["commands"])


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_is_read_as_it_is(name: str) -> None:
    for probe, expected in DEVICES[name]["expected"].items():
        try:
            value = PROBES[probe](device_of(name))
        except Unread as reason:
            assert isinstance(expected, str) and expected in str(reason), probe
        else:
            assert value == expected, probe


def test_all_are_described_whatever_is_expected_of_them() -> None:
    assert len(DEVICES) >= 25
    for name in DEVICES:
        device = describe(device_of(name))
        assert sum(len(cluster.cores) for cluster in device.clusters) == device.cores


def test_cores_that_sleep_can_be_chosen() -> None:
    assert describe(device_of("hotplug-little-only"), pinned_to=(6, 7)).pinned_to == (6, 7)
