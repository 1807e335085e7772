"""Ray runs the compute of a study: exports, trainings, gates. The only file of the service that imports ray.

Its retries are off: whether a stage runs again is decided in one place, by the orchestrator, from result keys. A device
is never a Ray resource.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, Protocol, Self

from nas.core.errors import InfrastructureFailed
from nas.service import ray_sitter

_MARK = "HILNAS_RAY"
_SITTER_S = 10.0
_IDLE_MS = 60_000
"""A worker that has loaded torch, which takes seconds, stays for the next training; by default it goes after one."""

Work = Callable[[Mapping[str, Any]], dict[str, Any]]
Kind = Literal["short", "train"]


class Compute(Protocol):
    """Where stages run."""

    @property
    def workers(self) -> int:
        """Stages that run side by side."""

    def run(self, work: Work, spec: Mapping[str, Any], kind: Kind = "short") -> Awaitable[dict[str, Any]]:
        """Runs `work(spec)` in a worker process.

        Raises:
            InfrastructureFailed: the worker or its node died, or the work says so.
        """

    def close(self) -> None:
        """Stops the workers that this process started."""


class RayCompute:
    """Ray, local by default.

    Args:
        address: of a running cluster; None starts one on this machine that ends with this process.
        workers: CPU slots of a local cluster.
    """

    def __init__(self, address: str | None, workers: int) -> None:
        # Read when ray is imported: no usage report, no colour codes, no log lines of workers on our terminal.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING", "0")
        import ray

        self._ray = ray
        self._own = address is None
        local: dict[str, Any] = {
            "num_cpus": workers,
            "include_dashboard": False,
            "object_store_memory": 100 << 20,
            "_system_config": {"idle_worker_killing_time_threshold_ms": _IDLE_MS},
        }
        mark = secrets.token_hex(8)
        self._sitter = _start_sitter(mark) if self._own else None
        os.environ[_MARK] = mark
        try:
            ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                **(local if self._own else {}),
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            self.close()
            raise InfrastructureFailed(f"Ray did not start: {error}") from error
        finally:
            del os.environ[_MARK]
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        self._workers = max(1, int(resources.get("CPU", workers)))
        self._gpu_share = min(1.0, resources.get("GPU", 0.0) / self._workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def workers(self) -> int:
        """CPU slots of the cluster."""
        return self._workers

    async def run(self, work: Work, spec: Mapping[str, Any], kind: Kind = "short") -> dict[str, Any]:
        """Runs `work(spec)` in a Ray worker; a cancelled await cancels the task."""
        # Exports and gates take seconds: they run beside the trainings instead of queueing behind them.
        cpus, gpus = (1.0, self._gpu_share) if kind == "train" else (0.0, 0.0)
        remote = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(work)
        reference = remote.remote(dict(spec))
        try:
            result: dict[str, Any] = await asyncio.wrap_future(reference.future())
        except asyncio.CancelledError:
            self._ray.cancel(reference, force=True)
            raise
        except self._ray.exceptions.RayTaskError:
            raise  # a bug in the work: its own traceback says where
        except self._ray.exceptions.RayError as error:
            raise InfrastructureFailed(f"a worker died: {_first_line(error)}") from error
        if "infrastructure" in result:
            raise InfrastructureFailed(result["infrastructure"])
        return result

    def close(self) -> None:
        """Disconnects; a local cluster ends."""
        self._ray.shutdown()
        if self._sitter is not None:
            self._sitter.communicate(timeout=_SITTER_S)


def _start_sitter(mark: str) -> subprocess.Popen[bytes]:
    """See `ray_sitter`. In a session of its own, so that Ctrl-C in a terminal does not reach it."""
    argv = [sys.executable, "-I", "-S", "-B", ray_sitter.__file__, f"{_MARK}={mark}"]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
