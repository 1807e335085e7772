"""Simulated viewers of a study: they load the page, its points, and every few seconds the new ones."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

POINTS_EVERY_S = 3
"""Between a viewer's questions for new points, as in `dashboard/assets/study.js`."""
PARTS_EVERY_S = 5
"""Between fetches of each of the page's two parts that are kept up as HTML."""
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Answer:
    """A response, and the time until its last byte."""

    seconds: float
    body: bytes


class Client:
    """A client with one persistent connection, as a browser has."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)

    def get(self, path: str, accept: str = "*/*") -> Answer:
        """Returns the response of a path, which must succeed."""
        began = time.perf_counter()
        self._connection.request("GET", path, headers={"Accept": accept})
        response = self._connection.getresponse()
        body = response.read()
        assert response.status == http.client.OK, (path, response.status, body[:300])
        return Answer(time.perf_counter() - began, body)

    def json(self, path: str) -> tuple[Answer, Any]:
        """Returns the response and its parsed JSON."""
        answer = self.get(path, "application/json")
        return answer, json.loads(answer.body)


@dataclass
class Latencies:
    """Latencies by kind of request."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, answer: Answer) -> None:
        """Records a latency."""
        with self.lock:
            self.seconds.setdefault(what, []).append(answer.seconds)

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Returns percentiles by kind, in milliseconds."""
        return {what: percentiles_ms(latencies) for what, latencies in sorted(self.seconds.items())}


def percentiles_ms(seconds: list[float]) -> dict[str, float]:
    """Returns count, median, 95th percentile and maximum, in milliseconds."""
    p50, p95 = np.percentile(seconds, [50, 95], method="higher")
    return {
        "n": len(seconds),
        "p50": round(1e3 * p50, 2),
        "p95": round(1e3 * p95, 2),
        "max": round(1e3 * max(seconds), 2),
    }


def look(port: int, study: str, axes: str, latencies: Latencies, until: Callable[[], bool], late: float) -> None:
    """Runs one viewer, who opens the page after `late` seconds."""
    time.sleep(late)
    client = Client(port)
    latencies.note("page", client.get(f"/studies/{study}", "text/html"))
    answer, points = client.json(f"/studies/{study}/points?since=0&axes={axes}")
    latencies.note("all points", answer)
    began = time.monotonic()
    for tick in itertools.count(1):
        time.sleep(max(0.0, began + tick - time.monotonic()))
        if until():
            return
        if tick % POINTS_EVERY_S == 0:
            answer, points = client.json(f"/studies/{study}/points?since={points['revision']}&axes={axes}")
            latencies.note("new points", answer)
        if tick % PARTS_EVERY_S == 0:
            for _ in range(2):
                latencies.note("refreshed part", client.get(f"/studies/{study}/now", "text/html"))


def crowd(port: int, study: str, axes: str, viewers: int, seconds: float, arrive_s: float) -> Latencies:
    """Runs several viewers, who start within `arrive_s` and stop after `seconds`."""
    latencies, end = Latencies(), time.monotonic() + arrive_s + seconds
    threads = [
        threading.Thread(
            target=look, args=(port, study, axes, latencies, lambda: time.monotonic() > end, arrive_s * i / viewers)
        )
        for i in range(viewers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies
