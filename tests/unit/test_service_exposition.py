"""Metrics as text, in Prometheus' format."""

from __future__ import annotations

from nas.service.exposition import Counter, Family, Histogram


def test_a_family_is_written_with_its_labels_escaped() -> None:
    family = Family("farm_jobs", "gauge", "Jobs.", ("state",), {('a "b"\\c\nd',): 2.0, ("A",): 1.5})
    assert list(family.lines()) == [
        "# HELP farm_jobs Jobs.", "# TYPE farm_jobs gauge",
        'farm_jobs{state="A"} 1.5', 'farm_jobs{state="a \\"b\\"\\\\c\\nd"} 2.0',
    ]  # fmt: skip
    assert list(Family("age", "gauge", "Age.", (), {(): 0.0}).lines())[-1] == "age 0.0"


def test_a_counter_counts_by_label() -> None:
    counter = Counter("done_total", "Done.", ("how",))
    for how in ("well", "badly", "well"):
        counter.add(how)
    assert list(counter.lines())[2:] == ['done_total{how="badly"} 1.0', 'done_total{how="well"} 2.0']


def test_buckets_are_cumulative_and_a_bound_belongs_to_its_own() -> None:
    histogram = Histogram("wait_seconds", "Waits.", ("route",), (0.5, 1.0))
    for seconds in (0.25, 0.5, 0.75, 4.0):
        histogram.observe(seconds, "/x")
    assert list(histogram.lines())[1:] == [
        "# TYPE wait_seconds histogram",
        'wait_seconds_bucket{route="/x",le="0.5"} 2',
        'wait_seconds_bucket{route="/x",le="1.0"} 3',
        'wait_seconds_bucket{route="/x",le="+Inf"} 4',
        'wait_seconds_sum{route="/x"} 5.5',
        'wait_seconds_count{route="/x"} 4',
    ]
