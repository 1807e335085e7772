"""Measures latencies, CPU and memory of the server with a study of many trials in its database."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.dashboard.candidates import Judge
from benchmarks.dashboard.made import LIVE, copied, generated
from benchmarks.dashboard.maker import Orchestrator
from benchmarks.dashboard.server import Served, served
from benchmarks.dashboard.viewers import Client, crowd, percentiles_ms
from nas.infra.store import studies
from nas.infra.store.store import Store

_ARRIVE_S = 10.0
_TRIAL_EVERY_S = 1.0


def measure(home: Path, trials: int, small: int, viewers: list[int], seconds: float, again: int) -> dict[str, Any]:
    """Runs once and returns the report."""
    file = generated(home, trials, small)
    with tempfile.TemporaryDirectory(prefix="hilnas-dashboard-", dir=home) as folder:
        url = copied(file, Path(folder))
        store = Store.open(url, artifacts=Path(folder) / "artifacts")
        orchestrator = Orchestrator(store, studies.find_id(store, LIVE), Judge())
        report: dict[str, Any] = {
            "trials": trials,
            "small_studies": small,
            "database_mb": round(file.stat().st_size / 1e6),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": round(os.getloadavg()[0], 2),
        }
        with served(url, Path(folder)) as server:
            report |= _alone(server, orchestrator, again)
            axes = report["axes"]
            report["crowds"] = [_crowd(server, orchestrator, axes, count, seconds) for count in viewers]
        store.close()
    report["load_after"] = round(os.getloadavg()[0], 2)
    return report


def _alone(server: Served, orchestrator: Orchestrator, again: int) -> dict[str, Any]:
    """Measures one viewer, request after request."""
    client, page, cpu, before = Client(server.port), f"/studies/{LIVE}", server.cpu_s(), server.rss_mb()
    report: dict[str, Any] = {"first_page_s": round(client.get(page, "text/html").seconds, 2)}
    report["first_page_cpu_s"] = round(server.cpu_s() - cpu, 2)
    report["first_studies_list_s"] = round(client.get("/studies", "text/html").seconds, 2)
    report["rss_mb"] = {"empty": round(before), "studies": round(server.rss_mb())}
    _, points = client.json(f"{page}/points")
    report["axes"] = axes = ",".join(axis["key"] for axis in points["axes"] if axis["objective"])
    report["front"] = sum(entry["on"] for entry in points["front"])
    whole = f"{page}/points?since=0&axes={axes}"
    answer, points = client.json(whole)
    report["points_mb"] = round(len(answer.body) / 1e6, 2)
    requests = {
        "page": page,
        "studies list": "/studies",
        "all points": whole,
        "all trials as CSV": f"{page}/trials.csv",
    }
    report["warm_ms"] = {
        what: percentiles_ms([client.get(path, "text/html").seconds for _ in range(again)])
        for what, path in requests.items()
    }
    after: dict[str, list[float]] = {"new points": [], "page": []}
    for what, latencies in [*after.items()] * again:
        orchestrator.add()
        path = page if what == "page" else f"{page}/points?since={points['revision']}&axes={axes}"
        answer = client.get(path, "text/html")
        latencies.append(answer.seconds)
        if what != "page":
            points = json.loads(answer.body)
            assert points["told"]["trial"], "the new trial is in the first answer"
    report["after_a_new_trial_ms"] = {what: percentiles_ms(latencies) for what, latencies in after.items()}
    return report


def _crowd(server: Served, orchestrator: Orchestrator, axes: str, viewers: int, seconds: float) -> dict[str, Any]:
    """Measures several viewers while one trial per second is added."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(_TRIAL_EVERY_S):
            orchestrator.add()

    worker = threading.Thread(target=work)
    cpu, began = server.cpu_s(), time.monotonic()
    worker.start()
    try:
        latencies = crowd(server.port, LIVE, axes, viewers, seconds, _ARRIVE_S)
    finally:
        over.set()
        worker.join()
    wall = time.monotonic() - began
    used = server.cpu_s() - cpu
    return {
        "viewers": viewers,
        "seconds": round(wall, 1),
        "ms": latencies.percentiles(),
        "cpu_share": round(used / wall, 3),
        "cpu_share_per_viewer": round(used / wall / viewers, 4),
        "rss_mb": round(server.rss_mb()),
    }
