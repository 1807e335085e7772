"""Prometheus metrics: of the farm, read from the database, and of this process."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from nas.store import agents, pages
from nas.store.store import Store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PROCESS = CollectorRegistry()
disable_created_metrics()  # type: ignore[no-untyped-call]

REQUEST_SECONDS = Histogram(
    "hilnas_request_seconds",
    "Time to answer a request, the wait of long polls included.",
    ("method", "route", "status"),
    registry=_PROCESS,
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
RESULTS = Counter(
    "hilnas_results_total", "Results and failures that agents handed in.", ("verdict",), registry=_PROCESS
)
"""By verdict, `accepted` or `refused`; counted by the agents' API."""


def render(store: Store) -> bytes:
    """Returns all metrics in Prometheus' text format, version 0.0.4."""
    farm = CollectorRegistry()
    farm.register(_Farm(store))
    return generate_latest(farm) + generate_latest(_PROCESS)


class _Farm(Collector):
    """Reads devices, jobs and agents from the database at every scrape."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Yields one family for each metric."""
        store = self._store
        devices = GaugeMetricFamily(
            "hilnas_devices", "Registered devices by state and health.",
            labels=("state", "health"),
        )  # fmt: skip
        for condition, count in pages.devices_by_condition(store).items():
            devices.add_metric(condition, count)
        jobs = GaugeMetricFamily("hilnas_jobs", "Measurement jobs by state.", labels=("state",))
        for state, count in pages.jobs_by_state(store).items():
            jobs.add_metric((state,), count)
        leases = CounterMetricFamily("hilnas_leases_total", "Leases granted, by device.", labels=("device",))
        for device, granted in pages.leases_granted(store).items():
            leases.add_metric((device,), granted)
        seen = GaugeMetricFamily(
            "hilnas_agent_last_seen_timestamp_seconds", "Time of an agent's last request.", labels=("agent",)
        )
        for agent in agents.all(store):
            if agent.last_seen is not None:
                seen.add_metric((agent.name,), agent.last_seen)
        yield devices
        yield jobs
        yield GaugeMetricFamily(
            "hilnas_queue_age_seconds", "Waiting time of the job that has been due longest.",
            value=pages.longest_wait_s(store),
        )  # fmt: skip
        yield leases
        yield seen

    def describe(self) -> Iterator[Metric]:
        """Yields nothing, so that registering does not query the database."""
        yield from ()
