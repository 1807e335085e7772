"""The line that lets an agent enrol."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nas.core.errors import InvalidInput
from nas.core.trust import Invitation

LINE = Invitation("https://farm.example:7711", "ab" * 32, "secret")


def test_it_reads_what_it_wrote() -> None:
    assert Invitation.parse(f" {LINE.format()}\n") == LINE


@given(st.text(max_size=200))
def test_whatever_is_pasted_is_a_line_or_refused(text: str) -> None:
    try:
        Invitation.parse(text)
    except InvalidInput:
        return
    assert Invitation.parse(text).url.startswith("https://")


@pytest.mark.parametrize(
    "broken",
    [
        LINE.format()[:-5],
        "hilnas-enrol.",
        Invitation("http://farm.example", LINE.ca_sha256, LINE.token).format(),
        Invitation(LINE.url, "ab", LINE.token).format(),
        Invitation(LINE.url, LINE.ca_sha256, "").format(),
    ],
)
def test_what_is_damaged_is_refused(broken: str) -> None:
    with pytest.raises(InvalidInput):
        Invitation.parse(broken)
