"""What Prometheus is told: the farm as the database knows it, and what this process has counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nas.service.exposition import Counter, Family, Histogram, Labels
from nas.store import agents, pages
from nas.store.store import Store

REQUEST_SECONDS = Histogram(
    "hilnas_request_seconds",
    "Time to answer a request, the wait of long polls included.",
    ("method", "route", "status"),
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
RESULTS = Counter("hilnas_results_total", "Results and failures that agents handed in.", ("verdict",))
"""By verdict, `accepted` or `refused`; the job API counts."""


def render(store: Store) -> str:
    """All metrics as text."""
    parts = [*(family.lines() for family in _of_farm(store)), REQUEST_SECONDS.lines(), RESULTS.lines()]
    return "".join(f"{line}\n" for part in parts for line in part)


def _of_farm(store: Store) -> Iterator[Family]:
    yield Family(
        "hilnas_devices", "gauge", "Registered devices by what they do and what is thought of them.",
        ("state", "health"), {where: float(count) for where, count in pages.devices_by_condition(store).items()},
    )  # fmt: skip
    yield Family("hilnas_jobs", "gauge", "Measurement jobs by state.", ("state",), _by_name(pages.jobs_by_state(store)))
    yield Family(
        "hilnas_queue_age_seconds", "gauge", "How long the job that has been due longest has waited.",
        (), {(): pages.longest_wait_s(store)},
    )  # fmt: skip
    yield Family(
        "hilnas_leases_total", "counter", "Leases granted, by device.", ("device",),
        _by_name(pages.leases_granted(store)),
    )  # fmt: skip
    seen = {agent.name: agent.last_seen for agent in agents.all(store) if agent.last_seen is not None}
    yield Family(
        "hilnas_agent_last_seen_timestamp_seconds", "gauge", "When an agent was last heard from.", ("agent",),
        _by_name(seen),
    )  # fmt: skip


def _by_name(values: Mapping[str, float]) -> dict[Labels, float]:
    return {(name,): value for name, value in values.items()}
