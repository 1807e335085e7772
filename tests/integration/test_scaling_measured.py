"""A family of a real study as users build it: processes, agent and database; only the runtime is a fake."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from study_lab import LIMIT_S, Lab

from nas.core.family import FAMILY, Family, read_record
from nas.core.layout import Layout
from nas.train.scaling.candidates import parse_size
from tests.support.waiting import until

LAYOUT = "d128 v256 ffn=swiglu:320 [C3*2 A2/1 C3]"
SIZES = ("1M", "2M")


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path / "lab", run_s=0.1)


def build(lab: Lab, *more: str) -> tuple[str, ...]:
    space = str(lab.folder / "tiny.yaml")
    options = ("--layout", LAYOUT, "--space", space, "--sizes", ",".join(SIZES), "--candidates", "2", "--no-files")
    return ("family", "build", *options, "--name", "tiny", "--yes", *more)


def recorded(lab: Lab) -> Family | None:
    return read_record(lab.home / "families" / "tiny" / FAMILY, Family)


def sizes(family: Family | None) -> list[str]:
    return [member.size for member in family.members] if family else []


def test_a_killed_build_goes_on_and_measures_nothing_twice(lab: Lab) -> None:
    with lab.start(*build(lab)) as process:
        until(lambda: bool(sizes(recorded(lab))) or process.poll() is not None, LIMIT_S)
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = recorded(lab)
    assert before is not None
    family = Family.model_validate(lab.json_here(*build(lab)))
    assert sizes(family) == list(SIZES)
    assert family.members[: len(before.members)] == before.members
    for member in family.members:
        assert parse_size(member.size).admits(Layout.parse(member.layout).params)
        assert member.measured[0].figures[0].value
        assert len(member.tried) == 2
    store = lab.store()
    try:
        with store.read() as connection:
            keys = connection.exec_driver_sql("SELECT count(*) FROM result WHERE stage = 'measure'").scalar()
    finally:
        store.close()
    assert keys == 2 * len(SIZES)  # one workload, so one measurement of each candidate
    report = lab.json_here("family", "show", "tiny")
    assert [row["member"]["size"] for row in report["members"]] == list(SIZES)


def test_a_device_that_is_not_there_is_named(lab: Lab) -> None:
    assert "unknown device 'phone'" in lab.run_here(*build(lab, "--device", "phone"), code=3).err
    assert sizes(recorded(lab)) == []
