"""An agent runs only complete runners of the newest manifest signed with the pinned key."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_support import StillClock

from nas.core.clock import Clock
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError, Unsupported
from nas.core.plan import PlanFile, Runner
from nas.core.trust import RunnerManifest, SignedManifest
from nas.measure.devices.agent.client import JobClient
from nas.measure.devices.agent.trust import FRESH_S, PinnedManifest, verified
from nas.measure.farm.trust import SigningKey
from tests.support.fake_coordinator import FakeCoordinator

KEY, OTHER = SigningKey.generate(), SigningKey.generate()
FILES = {name: PlanFile(sha256=digit * 64, size=1) for name, digit in (("runner", "1"), ("lib.so", "2"))}
RUNNER = Runner(runtime="script", build="b" * 64, target="x86_64-linux", files=FILES, main="runner")
ANOTHER = RUNNER.model_copy(update={"build": "c" * 64})


def signed(*runners: Runner, serial: int = 1, key: SigningKey = KEY) -> SignedManifest:
    return key.sign(RunnerManifest(serial=serial, issued_at=0.0, runners=runners))


class Coordinator:
    """Hands out `manifest`, and counts how often."""

    def __init__(self, manifest: SignedManifest) -> None:
        self.manifest, self.fetches = manifest, 0

    def fetch(self) -> SignedManifest:
        self.fetches += 1
        return self.manifest


def pinned(coordinator: Coordinator, state: Path, clock: Clock | None = None) -> PinnedManifest:
    return PinnedManifest(coordinator.fetch, KEY.public, state, clock)


def test_a_listed_runner_is_known_and_the_manifest_is_fetched_once(tmp_path: Path) -> None:
    coordinator = Coordinator(signed(RUNNER))
    is_known = pinned(coordinator, tmp_path)
    assert is_known(RUNNER) and is_known(RUNNER)
    assert coordinator.fetches == 1


def test_a_runner_that_was_withdrawn_is_refused_after_an_hour_and_after_a_restart(tmp_path: Path) -> None:
    coordinator, clock = Coordinator(signed(RUNNER, ANOTHER)), StillClock()
    is_known = pinned(coordinator, tmp_path, clock)
    assert is_known(RUNNER) and is_known(ANOTHER)
    coordinator.manifest = signed(ANOTHER, serial=2)
    assert is_known(RUNNER), "it is not asked about every plan"
    assert not pinned(coordinator, tmp_path)(RUNNER)
    clock.time += FRESH_S
    assert not is_known(RUNNER)
    assert is_known(ANOTHER)


def test_an_unknown_runner_makes_it_fetch_again(tmp_path: Path) -> None:
    coordinator = Coordinator(signed(RUNNER))
    is_known = pinned(coordinator, tmp_path)
    assert is_known(RUNNER)
    assert not is_known(ANOTHER)
    coordinator.manifest = signed(RUNNER, ANOTHER, serial=2)
    assert is_known(ANOTHER)
    assert is_known(RUNNER)
    assert coordinator.fetches == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": FILES | {"lib.so": PlanFile(sha256="3" * 64, size=1)}}, r"in lib\.so"),
        ({"files": FILES | {"lib.so": PlanFile(sha256="2" * 64, size=2)}}, r"in lib\.so"),
        ({"files": FILES | {"more.so": PlanFile(sha256="2" * 64, size=1)}}, r"in more\.so"),
        ({"files": {"runner": FILES["runner"]}}, r"in lib\.so"),
        ({"main": "lib.so"}, "in its description"),
        ({"patched": True}, "in its description"),
        ({"options": ("--output",)}, "in its description"),
    ],
)
def test_a_build_with_any_other_record_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(Unsupported, match=f"script bbbbbbbbbbbb.*number 1.*{message}"):
        pinned(Coordinator(signed(RUNNER)), tmp_path)(RUNNER.model_copy(update=change))


def test_a_tampered_document_is_refused(tmp_path: Path) -> None:
    genuine = signed(RUNNER)
    tampered = genuine.model_copy(update={"text": genuine.text.replace("1" * 64, "9" * 64)})
    assert tampered != genuine
    with pytest.raises(Unsupported, match="altered after signing"):
        pinned(Coordinator(tampered), tmp_path)(RUNNER)
    assert pinned(Coordinator(genuine), tmp_path)(RUNNER)  # nothing of it was kept


def test_a_signature_of_other_bytes_is_refused() -> None:
    swapped = signed(RUNNER).model_copy(update={"signature": signed(ANOTHER).signature})
    with pytest.raises(Unsupported, match="altered after signing"):
        verified(swapped, KEY.public)


def test_another_key_is_refused_even_where_it_claims_to_be_the_pinned_one(tmp_path: Path) -> None:
    foreign = signed(RUNNER, key=OTHER)
    with pytest.raises(Unsupported, match=r"signed with key [0-9a-f]{16}, but this agent trusts only [0-9a-f]{16}$"):
        pinned(Coordinator(foreign), tmp_path)(RUNNER)
    with pytest.raises(Unsupported, match="altered after signing"):
        pinned(Coordinator(foreign.model_copy(update={"key": KEY.public})), tmp_path)(RUNNER)


def test_a_signature_for_another_purpose_is_none_for_a_manifest() -> None:
    manifest = RunnerManifest(serial=1, issued_at=0.0, runners=(RUNNER,))
    bare = KEY._private.sign(manifest.to_text().encode()).hex()
    with pytest.raises(Unsupported, match="altered after signing"):
        verified(SignedManifest(text=manifest.to_text(), key=KEY.public, signature=bare), KEY.public)


def test_an_older_manifest_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    coordinator = Coordinator(signed(ANOTHER, serial=8))
    assert pinned(coordinator, tmp_path)(ANOTHER)
    coordinator.manifest = signed(RUNNER, serial=7)
    for _ in range(2):
        with pytest.raises(Unsupported, match="sent number 7, but this agent saw another one, number 8"):
            pinned(coordinator, tmp_path)(RUNNER)
    assert pinned(coordinator, tmp_path)(ANOTHER)


def test_one_serial_stands_for_one_document(tmp_path: Path) -> None:
    coordinator = Coordinator(signed(ANOTHER, serial=8))
    assert pinned(coordinator, tmp_path)(ANOTHER)
    coordinator.manifest = signed(ANOTHER, RUNNER, serial=8)
    with pytest.raises(Unsupported, match="number 8"):
        pinned(coordinator, tmp_path)(RUNNER)


def test_a_newer_manifest_takes_a_runner_back(tmp_path: Path) -> None:
    coordinator = Coordinator(signed(RUNNER, serial=1))
    is_known = pinned(coordinator, tmp_path)
    assert is_known(RUNNER)
    coordinator.manifest = signed(ANOTHER, serial=2)
    assert is_known(ANOTHER)
    assert not is_known(RUNNER)


def test_each_coordinator_has_serials_of_its_own(tmp_path: Path) -> None:
    assert pinned(Coordinator(signed(RUNNER, serial=100)), tmp_path)(RUNNER)
    coordinator = Coordinator(signed(RUNNER, serial=1, key=OTHER))
    assert PinnedManifest(coordinator.fetch, OTHER.public, tmp_path)(RUNNER)


def test_a_form_of_tomorrow_is_refused(tmp_path: Path) -> None:
    manifest = RunnerManifest.model_construct(v=2, serial=1, issued_at=0.0, runners=())
    with pytest.raises(Unsupported, match="not in the form that this agent reads"):
        pinned(Coordinator(KEY.sign(manifest)), tmp_path)(RUNNER)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff"])
def test_a_damaged_stored_manifest_is_reported_and_never_ignored(tmp_path: Path, damage: bytes) -> None:
    is_known = pinned(Coordinator(signed(RUNNER)), tmp_path)
    assert is_known(RUNNER)
    (memory,) = tmp_path.glob("*.json")
    memory.write_bytes(damage)
    with pytest.raises(InfrastructureFailed, match="damaged"):
        is_known(RUNNER)


def test_a_memory_that_somebody_edited_is_damaged(tmp_path: Path) -> None:
    is_known = pinned(Coordinator(signed(RUNNER)), tmp_path)
    assert is_known(RUNNER)
    (memory,) = tmp_path.glob("*.json")
    memory.write_text(memory.read_text().replace("1" * 64, "9" * 64))
    with pytest.raises(InfrastructureFailed, match="damaged"):
        is_known(RUNNER)


def test_a_key_is_64_hex_digits(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="64 hex digits"):
        PinnedManifest(Coordinator(signed()).fetch, "../../etc", tmp_path)


def test_it_comes_over_the_job_api(tmp_path: Path) -> None:
    coordinator = FakeCoordinator(tmp_path)
    is_known = PinnedManifest(JobClient(coordinator.client()).manifest, KEY.public, tmp_path / "state")
    with pytest.raises(NasError, match="404 no runner was admitted"):
        is_known(RUNNER)
    coordinator.manifest = signed(RUNNER)
    assert is_known(RUNNER)
