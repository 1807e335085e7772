"""Names of sizes, and the weights that they allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nas.core.errors import InvalidInput
from nas.core.layout import Layout, Params
from nas.core.published import LFM2
from nas.train.scaling.candidates import TOLERANCE, parse_size, parse_sizes


@pytest.mark.parametrize("name", list(LFM2))
def test_the_published_family_fits_its_own_names(name: str) -> None:
    assert parse_size(name.removeprefix("LFM2-")).admits(Layout.parse(LFM2[name]).params)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("8B-A1B", 0.92e9, 2e9),
        ("20B-A3.6B", 3.312e9, 3.888e9),
        ("8B-A1.5B", 1.38e9, 1.62e9),
        ("1B-A40M", 36.8e6, 43.2e6),
    ],
)
def test_active_weights_are_cut_where_the_name_ends(text: str, low: float, high: float) -> None:
    assert parse_size(text).active == (round(low), round(high))


@given(st.integers(1, 9_999), st.sampled_from("MB"))
def test_a_dense_size_admits_its_tolerance_and_no_more(number: int, unit: str) -> None:
    size = parse_size(f"{number}{unit}")
    for share, admitted in ((0.99 * TOLERANCE, True), (1.2 * TOLERANCE, False)):
        for sign in (-1, 1):
            total = round(size.total * (1 + sign * share))
            assert size.admits(Params(total, total, total)) == admitted


@pytest.mark.parametrize(
    "text", ["", "350", "350m", "0M", "M", "8B-A", "8B-A1", "1B-A2B", "1B-A1B", "1B-A0B", "-1B", "../1B"]
)
def test_an_unreadable_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidInput, match="--sizes"):
        parse_sizes(text)


def test_more_active_weights_than_weights_are_refused() -> None:
    with pytest.raises(InvalidInput, match="'1B-A2B': 2B active of 1B weights"):
        parse_size("1B-A2B")


def test_sizes_come_smallest_first_and_once() -> None:
    assert [size.name for size in parse_sizes("8B-A1B, 350M,1.2B")] == ["350M", "1.2B", "8B-A1B"]
    with pytest.raises(InvalidInput, match="350M is named twice"):
        parse_sizes("350M,350M")
