"""Device time: what is added in pieces, in whatever order, is what is added at once."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from nas.service.live_course import DeviceSeconds
from nas.store.columns import MeasuredRow

SECONDS = st.floats(0.1, 1e4)
MEASURED = st.lists(st.tuples(st.integers(0, 20), SECONDS), max_size=30)


def row(index: int, at: float, seconds: float) -> MeasuredRow:
    return MeasuredRow(0, f"{index:064x}", "box", "fake", "{}", {}, False, seconds, at, True)


@given(MEASURED, st.randoms(use_true_random=False), st.integers(1, 5))
def test_in_pieces_is_as_at_once(measured: list[tuple[int, float]], random: Random, size: int) -> None:
    rows = [row(index, float(at), seconds) for index, (at, seconds) in enumerate(measured)]
    whole, pieces, moments = DeviceSeconds(), DeviceSeconds(), [float(at) for at in range(-1, 22)]
    whole.add(rows)
    random.shuffle(rows)
    for start in range(0, len(rows), size):
        pieces.add(rows[start : start + size])
        pieces.add(rows[: start + size])  # again: it counts once
        assert pieces.total >= 0
    assert pieces.total == whole.total
    assert pieces.until(moments).tolist() == whole.until(moments).tolist()
    for moment, spent in zip(moments, whole.until(moments), strict=True):
        exact = sum(seconds for at, seconds in measured if at <= moment)
        assert abs(spent - exact) <= 1e-9 * (1 + exact)
