"""Prometheus metrics: of the farm, read from the database, and of this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from nas.core import paths
from nas.infra.store import agents, artifacts, calibrations, studies
from nas.infra.store import listings as pages
from nas.infra.store.rows import StudyState
from nas.infra.store.store import Store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_DRIFT_S = 7 * 86_400.0
"""Age of the reference runs that drift is computed from, in seconds."""
_NOISE_S = 3600.0
"""Age of the reference runs that noise is computed from, in seconds."""

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
            "hilnas_devices",
            "Registered devices by state and health.",
            labels=("state", "health"),
        )
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
        yield _studies(store)
        yield from _disk(store)
        yield from _trust(store)
        yield GaugeMetricFamily(
            "hilnas_queue_age_seconds",
            "Waiting time of the job that has been due longest.",
            value=pages.longest_wait_s(store),
        )
        yield leases
        yield seen
        build = GaugeMetricFamily("hilnas_build_info", "Version of hilnas, always 1.", labels=("version",))
        build.add_metric((version("hilnas"),), 1)
        yield build

    def describe(self) -> Iterator[Metric]:
        """Yields nothing, so that registering does not query the database."""
        yield from ()


def _studies(store: Store) -> GaugeMetricFamily:
    """Returns how many studies are in each state, 0 for states without any, so that the first of one is a change."""
    metric = GaugeMetricFamily("hilnas_studies", "Studies by state, as `nas study list` shows it.", labels=("state",))
    counts = dict.fromkeys((*StudyState, studies.INTERRUPTED), 0) | pages.studies_by_condition(store)
    for state, count in counts.items():
        metric.add_metric((state,), count)
    return metric


def _disk(store: Store) -> Iterator[GaugeMetricFamily]:
    free = GaugeMetricFamily("hilnas_disk_free_bytes", "Free space of the disk of a folder.", labels=("folder",))
    size = GaugeMetricFamily("hilnas_disk_size_bytes", "Size of the disk of a folder.", labels=("folder",))
    for name, folder in (("home", paths.home()), ("artifacts", store.artifacts)):
        # A folder that is not made yet will be on the disk of the one above it.
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        usage = shutil.disk_usage(existing)
        free.add_metric((name,), usage.free)
        size.add_metric((name,), usage.total)
    yield free
    yield size
    yield GaugeMetricFamily("hilnas_artifact_bytes", "Size of all artifacts.", value=artifacts.total_bytes(store))


def _trust(store: Store) -> Iterator[GaugeMetricFamily]:
    """Yields how far devices are off their calibration, and how much disturbs them."""
    drift = GaugeMetricFamily(
        "hilnas_device_drift_ratio",
        "Share by which a device's latest reference runs are slower than its calibration; without too few runs.",
        labels=("device", "runtime"),
    )
    disturbed = GaugeMetricFamily(
        "hilnas_device_disturbed_ratio",
        "Share of a device's reference runs of the last hour that something disturbed; without devices that had none.",
        labels=("device",),
    )
    for device in pages.calibrated_devices(store):
        latest: dict[str, float] = {}
        for trend in calibrations.drift(store, device, since=store.now() - _DRIFT_S):  # the latest build comes first
            if trend.off is not None:
                latest.setdefault(trend.runtime, trend.off)
        for runtime, off in latest.items():
            drift.add_metric((device, runtime), off)
    for device, share in calibrations.disturbed(store, since=store.now() - _NOISE_S).items():
        disturbed.add_metric((device,), share)
    yield drift
    yield disturbed
