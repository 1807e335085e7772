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
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import nas
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.proxy.corpus import packed
from nas.service import freight, ray_sitter, work
from nas.service.slots import Node, Request

_MARK = "HILNAS_RAY"
_SITTER_S = 10.0
_CHECK_S = 10.0
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
    """Ray on this machine: a cluster that ends with this process.

    Args:
        workers: CPU slots.
    """

    def __init__(self, workers: int) -> None:
        self._ray = _import_ray()
        mark = secrets.token_hex(8)
        self._sitter = _start_sitter(mark)
        os.environ[_MARK] = mark
        try:
            _connect(
                self._ray,
                "local",
                num_cpus=workers,
                include_dashboard=False,
                object_store_memory=100 << 20,
                _system_config={"idle_worker_killing_time_threshold_ms": _IDLE_MS},
            )
        except InfrastructureFailed:
            self.close()
            raise
        finally:
            del os.environ[_MARK]
        nodes = _alive(self._ray)
        self._request = Request.of(nodes, None)
        self._workers = max(1, self._request.slots(nodes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def workers(self) -> int:
        """CPU slots."""
        return self._workers

    async def run(self, work: Work, spec: Mapping[str, Any], kind: Kind = "short") -> dict[str, Any]:
        """Runs `work(spec)` in a Ray worker; a cancelled await cancels the task."""
        # Exports and gates take seconds: they run beside the trainings instead of queueing behind them.
        cpus, gpus = (1.0, self._request.gpus) if kind == "train" else (0.0, 0.0)
        remote = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(work)
        return _checked(await _result(self._ray, remote.remote(dict(spec))))

    def close(self) -> None:
        """Ends the cluster."""
        self._ray.shutdown()
        self._sitter.communicate(timeout=_SITTER_S)


class ClusterCompute:
    """A Ray cluster that somebody else started, of which this machine is a node.

    Trainings run on any node that has what they ask for; a node that is lost costs the stages that it ran. Exports and
    gates run on this machine, which has runtimes, lowered blocks and artifacts. Our code travels; libraries do not.

    Args:
        address: of the cluster.
        train_gpus: GPUs that a training takes; None: see `Request.of`.

    Raises:
        InvalidInput: the address of a Ray client, or no node runs such a training.
        InfrastructureFailed: the cluster cannot be reached.
    """

    def __init__(self, address: str, train_gpus: float | None = None) -> None:
        if "://" in address:
            raise InvalidInput(
                f"{address}: this machine must be a node of the cluster (`ray start --address=HOST:PORT`); then give "
                "HOST:PORT, or auto",
                where="--ray-address",
            )
        self._ray = _import_ray()
        # What runs there is what runs here, whatever is installed there.
        environment = {"py_modules": [str(Path(nas.__file__).parent)], "excludes": ["__pycache__"]}
        _connect(self._ray, address, runtime_env=environment)
        self._home: str = self._ray.get_runtime_context().get_node_id()
        nodes = _alive(self._ray)
        self._request = Request.of(nodes, train_gpus)
        self._workers = self._request.slots(nodes)
        self._corpora: dict[str, Any] = {}
        if self._workers == 0:
            self.close()
            raise InvalidInput(
                f"no node of the cluster has a CPU slot and {self._request.gpus:g} GPUs", where="--ray-address"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def workers(self) -> int:
        """Trainings that the nodes of the start run side by side."""
        return self._workers

    async def run(self, work: Work, spec: Mapping[str, Any], kind: Kind = "short") -> dict[str, Any]:
        """Runs `work(spec)` at home, or a training anywhere; a cancelled await cancels the task."""
        if kind == "train":
            return await self._train(spec)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = self._ray.remote(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self._home, soft=False),
            runtime_env={"env_vars": freight.shipped_environment()},
        )(work)
        return _checked(await _result(self._ray, remote.remote(dict(spec))))

    async def _train(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        there = dict(spec) | ({"device": "cpu"} if self._request.gpus == 0 else {})
        remote = self._ray.remote(num_cpus=1, num_gpus=self._request.gpus, max_retries=0)(_train_there)
        brought = await asyncio.to_thread(freight.checkpoints, spec)
        task = remote.remote(there, brought, self._corpus(spec), self._home)
        outcome = _checked(await _result(self._ray, task, self._require_room))
        return await asyncio.to_thread(freight.unload, spec, outcome)

    def _corpus(self, spec: Mapping[str, Any]) -> Any:
        """The corpus in Ray's object store, which hands it to each node once."""
        wanted = freight.corpus_of(spec)
        if wanted is None:
            return None
        if wanted.hash not in self._corpora:
            self._corpora[wanted.hash] = self._ray.put(packed(wanted))
        return self._corpora[wanted.hash]

    def _require_room(self) -> None:
        """Nobody may wait for a node that does not come back."""
        if self._request.slots(_alive(self._ray)) == 0:
            raise InfrastructureFailed(f"no node is left with a CPU slot and {self._request.gpus:g} GPUs")

    def close(self) -> None:
        """Disconnects."""
        self._ray.shutdown()


def _train_there(
    spec: Mapping[str, Any], checkpoints: Mapping[str, bytes], corpus: bytes | None, home: str
) -> dict[str, Any]:
    """In a worker: a training, on the launch's own machine or elsewhere."""
    import ray

    if ray.get_runtime_context().get_node_id() == home:
        freight.unpack_corpus(spec, corpus)
        return work.train(spec)
    return freight.train(spec, checkpoints, corpus)


def _import_ray() -> Any:
    # Read when ray is imported: no usage report, no colour codes, no log lines of workers on our terminal.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING", "0")
    import ray

    return ray


def _connect(ray: Any, address: str, **more: Any) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except Exception as error:
        # Python's classes, Ray's, and where a busy machine's node is late, this one itself.
        where = "Ray did not start" if address == "local" else f"cannot use the Ray cluster at {address}"
        raise InfrastructureFailed(f"{where}: {error}") from error


def _alive(ray: Any) -> list[Node]:
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(has.get("CPU", 0.0), has.get("GPU", 0.0)) for has in found]


async def _result(ray: Any, task: Any, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """What a task gives; `check` may give it up by raising, and is asked now and then, in a thread."""
    future = asyncio.wrap_future(task.future())
    try:
        while not future.done():
            await asyncio.wait([future], timeout=_CHECK_S)
            if not future.done():
                await asyncio.to_thread(check)
        result: dict[str, Any] = future.result()
        return result
    except (asyncio.CancelledError, InfrastructureFailed):
        future.add_done_callback(_heard)  # nobody waits for it any more
        ray.cancel(task, force=True)
        raise
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ImportError):
            raise InfrastructureFailed(f"a node of the cluster lacks a library: {error.cause}") from error
        raise  # a bug in the work: its own traceback says where
    except ray.exceptions.RayError as error:
        raise InfrastructureFailed(f"a worker died: {_first_line(error)}") from error


def _heard(future: asyncio.Future[Any]) -> None:
    """Takes note of its exception, which asyncio would print otherwise."""
    if not future.cancelled():
        future.exception()


def _checked(result: dict[str, Any]) -> dict[str, Any]:
    if "infrastructure" in result:
        raise InfrastructureFailed(result["infrastructure"])
    return result


def _start_sitter(mark: str) -> subprocess.Popen[bytes]:
    """See `ray_sitter`. In a session of its own, so that Ctrl-C in a terminal does not reach it."""
    argv = [sys.executable, "-I", "-S", "-B", ray_sitter.__file__, f"{_MARK}={mark}"]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
