"""Prometheus metrics: of the farm, read from the database, and of this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from nas.core import paths
from nas.infra.store import agents, artifacts, calibrations, studies
from nas.infra.store import listings as pages
from nas.infra.store.rows import AgentAccess, StudyState
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
        store, by_device = self._store, ("device",)
        conditions = pages.devices_by_condition(store)
        yield _gauge("hilnas_devices", "Registered devices by state and health.", ("state", "health"), conditions)
        yield _gauge("hilnas_jobs", "Measurement jobs by state.", ("state",), pages.jobs_by_state(store))
        # 0 for states without studies, so that the first of one is a change.
        counts = dict.fromkeys((*StudyState, studies.INTERRUPTED), 0) | pages.studies_by_condition(store)
        yield _gauge("hilnas_studies", "Studies by state, as `nas study list` shows it.", ("state",), counts)
        folders = (("home", paths.home()), ("artifacts", store.artifacts))
        # A folder that is not made yet will be on the disk of the one above it.
        places = {name: next(at for at in (folder, *folder.parents) if at.exists()) for name, folder in folders}
        usages = {name: shutil.disk_usage(place) for name, place in places.items()}
        free = {name: usage.free for name, usage in usages.items()}
        size = {name: usage.total for name, usage in usages.items()}
        yield _gauge("hilnas_disk_free_bytes", "Free space of the disk of a folder.", ("folder",), free)
        yield _gauge("hilnas_disk_size_bytes", "Size of the disk of a folder.", ("folder",), size)
        yield GaugeMetricFamily("hilnas_artifact_bytes", "Size of all artifacts.", value=artifacts.total_bytes(store))
        yield _gauge(
            "hilnas_device_drift_ratio",
            "Share by which a device's latest reference runs are slower than its calibration; without too few runs.",
            ("device", "runtime"),
            _drift(store),
        )
        yield _gauge(
            "hilnas_device_disturbed_ratio",
            "Share of a device's reference runs of the last hour that something disturbed; without devices that had "
            "none.",
            by_device,
            calibrations.disturbed(store, since=store.now() - _NOISE_S),
        )
        waited_s = pages.longest_wait_s(store)
        yield GaugeMetricFamily(
            "hilnas_queue_age_seconds", "Waiting time of the job that has been due longest.", value=waited_s
        )
        leases = CounterMetricFamily("hilnas_leases_total", "Leases granted, by device.", labels=by_device)
        for device, granted in pages.leases_granted(store).items():
            leases.add_metric((device,), granted)
        yield leases
        times = {
            agent.name: agent.last_seen
            for agent in agents.all(store)
            if agent.last_seen is not None and agent.access is not AgentAccess.REVOKED  # whose silence is intended
        }
        name = "hilnas_agent_last_seen_timestamp_seconds"
        yield _gauge(name, "Time of an agent's last request.", ("agent",), times)
        yield _gauge("hilnas_build_info", "Version of hilnas, always 1.", ("version",), {version("hilnas"): 1})

    def describe(self) -> Iterator[Metric]:
        """Yields nothing, so that registering does not query the database."""
        yield from ()


def _gauge(
    name: str, text: str, labels: Sequence[str], values: Mapping[str, float] | Mapping[tuple[str, str], float]
) -> GaugeMetricFamily:
    """Returns a metric with a value for each label, or for each tuple of them."""
    metric = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        metric.add_metric((key,) if isinstance(key, str) else key, value)
    return metric


def _drift(store: Store) -> dict[tuple[str, str], float]:
    """Returns (device, runtime) -> how far it is off its calibration with the latest build."""
    latest: dict[tuple[str, str], float | None] = {}
    for device in pages.calibrated_devices(store):
        for trend in calibrations.drift(store, device, since=store.now() - _DRIFT_S):  # the latest build comes first
            latest.setdefault((device, trend.runtime), trend.off)
    return {place: off for place, off in latest.items() if off is not None}
