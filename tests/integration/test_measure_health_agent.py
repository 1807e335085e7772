"""Health checks with a real agent: a device that is registered is found good, and one that was bad heals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nas.core.registry import Registry
from nas.infra.store import calibrations, devices, outcomes
from nas.infra.store.rows import CheckOutcome, DeviceEventKind, Health
from nas.infra.store.store import Store
from nas.measure.farm.farm import Farm, open_farm
from nas.measure.protocol import health
from nas.measure.protocol.health import AnyDevice, HealthKeeper
from nas.measure.runtimes.base import Runtime
from nas.testing.fake_runtime import FakeRuntime
from tests.support.waiting import until


def install(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    """Makes it the only runtime."""
    registry: Registry[Runtime] = Registry("runtime", "nas.no.plugins", {"fake": runtime})
    monkeypatch.setattr(health, "RUNTIMES", registry)


def keeper(farm: Farm, folder: Path) -> HealthKeeper:
    return HealthKeeper(farm.store, farm.notifier.notify, AnyDevice(farm.store, farm.runners, folder / "work").plan)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(health, "_STEP_S", 0.05)
    store = Store.open()
    yield store
    store.close()


def test_a_registered_device_is_found_good_and_heals(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeRuntime(tmp_path / "fake"))
    with open_farm(store) as farm:
        local = farm.device("local")

        def is_good() -> bool:
            return devices.get(store, local.id).health is Health.GOOD

        with keeper(farm, tmp_path):
            until(is_good)
            # What the fake runner reports does not depend on the machine, unlike what else runs there meanwhile.
            assert {calibration.runtime for calibration in calibrations.of_device(store, local.id)} == {"fake"}
            devices.set_health(store, local.id, Health.BAD, "three jobs failed")
            assert outcomes.request_check(store, local.id).health is Health.BAD
            until(is_good)
        ends = [event.what for event in devices.history(store, local.id, kind=DeviceEventKind.CHECK)]
        assert set(ends) == {CheckOutcome.PASSED}


def test_a_device_whose_runner_crashes_is_bad(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PROTOCOL", health.MeasurementSettings(max_attempts=1))
    monkeypatch.setattr(health, "COOL_DOWN_S", 0.0)
    sound = FakeRuntime(tmp_path / "fake")
    install(monkeypatch, FakeRuntime(tmp_path / "fake", faults={sound.reference_models()[0].id: "crash"}))
    with open_farm(store) as farm:
        local = farm.device("local")
        with keeper(farm, tmp_path):
            until(lambda: devices.get(store, local.id).health is Health.BAD)
    reason = devices.get(store, local.id).health_reason or ""
    assert reason.startswith("the reference model of fake failed: ")
