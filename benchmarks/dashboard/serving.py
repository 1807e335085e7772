"""How fast the server answers with a study of many trials in its database, and what that costs it."""

from __future__ import annotations

import os
import platform
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.dashboard.candidates import Judge
from benchmarks.dashboard.made import LIVE, copied, made
from benchmarks.dashboard.maker import Orchestrator
from benchmarks.dashboard.server import Served, served
from benchmarks.dashboard.viewers import Client, crowd, percentiles_ms
from nas.store import studies
from nas.store.store import Store

_ARRIVE_S = 10.0
_TRIAL_EVERY_S = 1.0


def measure(home: Path, trials: int, small: int, viewers: list[int], seconds: float, again: int) -> dict[str, Any]:
    """One run; the report.

    Args:
        home: where studies that were made before are, and new ones are put.
        trials: of the live study.
        small: studies beside it.
        viewers: crowds, one after the other.
        seconds: each crowd stays.
        again: times that each single answer is asked for.
    """
    file = made(home, trials, small)
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
    """One viewer, who asks for one thing after the other."""
    client, started = Client(server.port), server.cpu_s()
    before, began = server.rss_mb(), time.monotonic()
    meanwhile = client.wait(f"/studies/{LIVE}", "/studies")
    report: dict[str, Any] = {
        "read_s": round(time.monotonic() - began, 2),
        "read_cpu_s": round(server.cpu_s() - started, 2),
    }
    pages = client.wait(f"/studies/{LIVE}.json", f"/studies/{LIVE}")
    report |= {
        "read_with_layouts_s": round(time.monotonic() - began, 2),
        "studies_list_while_reading_ms": percentiles_ms(meanwhile) if meanwhile else None,
        "page_while_layouts_are_read_ms": percentiles_ms(pages) if pages else None,
        "rss_mb": {"empty": round(before), "study": round(server.rss_mb())},
    }
    _, told = client.json(f"/studies/{LIVE}/points")
    report["axes"] = axes = ",".join(axis["key"] for axis in told["axes"] if axis["objective"])
    report["front"] = sum(entry["on"] for entry in told["front"])
    report["beside_the_front"] = len(told["front"]) - report["front"]
    whole = f"/studies/{LIVE}/points?since=0&axes={axes}"
    answer, told = client.json(whole)
    report["points_mb"] = round(len(answer.body) / 1e6, 2)
    after_a_trial, deltas = [], []
    for _ in range(again):
        orchestrator.add()
        answer, told = client.json(f"/studies/{LIVE}/points?since={told['revision']}&axes={axes}")
        deltas.append(answer.seconds)
        after_a_trial.append(client.get(whole).seconds)
    report["delta_bytes"] = len(answer.body)
    client.get("/studies", "text/html")
    return report | {
        "one_by_one_ms": {
            "page": percentiles_ms([client.get(f"/studies/{LIVE}", "text/html").seconds for _ in range(again)]),
            "studies list": percentiles_ms([client.get("/studies", "text/html").seconds for _ in range(again)]),
            "all points, as before": percentiles_ms([client.get(whole).seconds for _ in range(again)]),
            "all points, after a new trial": percentiles_ms(after_a_trial),
            "new points, of a new trial": percentiles_ms(deltas),
        }
    }


def _crowd(server: Served, orchestrator: Orchestrator, axes: str, viewers: int, seconds: float) -> dict[str, Any]:
    """So many viewers, while a trial a second is added."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(_TRIAL_EVERY_S):
            orchestrator.add()

    worker = threading.Thread(target=work)
    cpu, began = server.cpu_s(), time.monotonic()
    worker.start()
    try:
        seen = crowd(server.port, LIVE, axes, viewers, seconds, _ARRIVE_S)
    finally:
        over.set()
        worker.join()
    wall = time.monotonic() - began
    used = server.cpu_s() - cpu
    return {
        "viewers": viewers,
        "seconds": round(wall, 1),
        "ms": seen.told(),
        "cpu_share": round(used / wall, 3),
        "cpu_share_per_viewer": round(used / wall / viewers, 4),
        "rss_mb": round(server.rss_mb()),
    }
