"""What people may call a device."""

from __future__ import annotations

import pytest

from nas.core.errors import InvalidInput, UnknownName
from nas.measure.farm.farm import find_name

PHONE, OTHER, BOX = "cortex-a76-1f2e", "cortex-a76-77aa", "epyc-00"
TAGS = {PHONE: ("phone", "bench"), OTHER: ("bench",), BOX: ()}


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("epyc-00", "epyc-00"),
        ("epyc", "epyc-00"),
        ("cortex-a76-7", "cortex-a76-77aa"),
        ("tag:phone", "cortex-a76-1f2e"),
    ],
)
def test_one_device_is_meant(name: str, id: str) -> None:
    assert find_name(name, TAGS) == id


def test_a_whole_id_is_no_prefix() -> None:
    assert find_name("box", {"box": (), "box-2": ()}) == "box"


@pytest.mark.parametrize("name", ["cortex", "tag:bench"])
def test_several_could_be_meant(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"{PHONE}, {OTHER}"):
        find_name(name, TAGS)


@pytest.mark.parametrize(
    ("name", "offered"), [("cortex-a77-1f2e", "cortex-a76-1f2e"), ("tag:phones", "phone"), ("", "local")]
)
def test_none_is_meant(name: str, offered: str) -> None:
    with pytest.raises(UnknownName, match=offered):
        find_name(name, TAGS)
