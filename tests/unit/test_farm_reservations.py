"""Reservations of devices: whose jobs wait, who is told, and when they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_lab import Lab, refusal
from cli_runner import nas
from store_support import new_study, put

from nas.infra.store import jobs
from nas.infra.store.rows import JobKind, Role
from nas.infra.store.store import Store


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def reserve(lab: Lab, **request: Any) -> Any:
    answer = lab.client(Role.OPERATE).post("/v1/devices/box/reserve", json=request)
    assert answer.status_code == 200, answer.text
    return answer.json()


def claimed(store: Store) -> int | None:
    job = jobs.claim(store, "box", "local")
    return None if job is None else job.study


def test_others_wait_until_a_reservation_ends(lab: Lab) -> None:
    mine, other = (new_study(lab.store, name).id for name in ("mine", "other"))
    put(lab.store, "other's", trial=(other, None), priority=5)
    put(lab.store, "other's calibration", trial=(other, None), priority=5, kind=JobKind.CHECK)
    reserve(lab, for_s=3600, reason="release", study="mine")
    assert jobs.with_work(lab.store, ["box"]) == frozenset()
    assert claimed(lab.store) is None
    put(lab.store, "mine's", trial=(mine, None))
    assert jobs.with_work(lab.store, ["box"]) == {"box"}
    assert claimed(lab.store) == mine
    (device,) = lab.get("/v1/devices")["devices"]
    assert device["lease"]["study"] == "mine"
    jobs.cancel_study(lab.store, mine)
    lab.clock.time += 3601
    assert jobs.with_work(lab.store, ["box"]) == {"box"}
    assert claimed(lab.store) == other
    assert lab.get("/v1/devices/box")["reservation"] is None


def test_health_checks_go_on_for_a_study_and_stop_for_work_by_hand(lab: Lab) -> None:
    put(lab.store, "check", kind=JobKind.CHECK)
    reserve(lab, for_s=60, reason="a new battery")
    assert jobs.claim(lab.store, "box", "local") is None
    reserve(lab, for_s=60, reason="release", study="mine")
    assert jobs.claim(lab.store, "box", "local") is not None


def test_everybody_sees_who_reserved_what_for_what(lab: Lab) -> None:
    reservation = reserve(lab, for_s=3600, reason="release", study="mine")["reservation"]
    assert reservation == {"until": lab.clock.time + 3600, "by": "operate", "reason": "release", "study": "mine"}
    assert lab.get("/v1/devices")["devices"][0]["reservation"] == reservation
    first, *_ = lab.get("/v1/devices/box")["history"]
    assert (first["kind"], first["reason"]) == ("reservation", "operate, for mine: release")
    assert reserve(lab, for_s=0)["reservation"] is None
    first, *_ = lab.get("/v1/devices/box")["history"]
    assert (first["kind"], first["what"]) == ("reservation", "removed")


@pytest.mark.parametrize(("seconds", "reason"), [(60, ""), (-1, "x"), (7 * 86400 + 1, "x"), (60, "two\nlines")])
def test_reservations_have_a_reason_and_an_end(lab: Lab, seconds: float, reason: str) -> None:
    request = {"for_s": seconds, "reason": reason}
    refusal(lab.client().post("/v1/devices/box/reserve", json=request), 422, "invalid_input")


def test_the_command_reserves_lists_and_ends(lab: Lab) -> None:
    db = str(lab.store.engine.url)
    first = nas("device", "reserve", "box", "--for", "2h", "--reason", "release", "--db", db)
    assert (first.code, "for no study until" in first.err, "release" in first.err) == (0, True, True), first.err
    assert "release" in nas("device", "list", "--db", db).out
    assert "not reserved" in nas("device", "unreserve", "box", "--db", db).err
    wrong = nas("device", "reserve", "box", "--for", "soon", "--reason", "x", "--db", db)
    assert (wrong.code, "--for" in wrong.err) == (3, True)
