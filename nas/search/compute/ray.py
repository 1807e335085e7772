"""Runs the compute of a study on Ray: exports, trainings, equivalence checks; on this machine or on a cluster.

Ray's retries are off: `nas.search.study.stages` alone decides whether a stage runs again. A device is never a Ray
resource.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import nas
from nas.core import paths
from nas.core.durable import write_durably
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.measure.devices.host_lock import host_lock_folder
from nas.model.text.corpus import CorpusRef, packed, unpack
from nas.search.compute import ray_reaper
from nas.search.compute.worker import Outcome, Spec, Work, train
from nas.search.proxy.job import CHECKPOINT, STABLE, WEIGHTS, TrainJob

_MARK = "HILNAS_RAY"
_REAPER_S = 10.0
_CHECK_S = 10.0

_SHARED_MEMORY = Path("/dev/shm")
_STARTS = 4
"""Times that a local Ray is started: it gives up after 30 s, and a busy machine needs more."""

_NEEDED = ("NAS_HOME", "NAS_CACHE", "PYTHONPATH", "PATH")
"""Environment variables that workers on this host need."""
_IDLE_MS = 60_000
"""Idle time after which a worker ends: one that has loaded torch, which takes seconds, serves the next training."""

_ABANDONED_S = 7 * 86400.0
"""Time without a write after which a node removes the checkpoints of a training that did not end there."""

Kind = Literal["short", "train", "shared"]
"""Of work: "shared" is a training that reads and writes folders which all nodes share."""


@dataclass(frozen=True)
class Node:
    """Resources of a node of a cluster.

    Args:
        cpus: CPU slots.
        gpus: GPUs.
    """

    cpus: float
    gpus: float


@dataclass(frozen=True)
class Request:
    """Resources of a training: CPU slots and a share of a GPU, or several whole ones.

    Args:
        gpus: 0: it trains on the CPU.
        cpus: CPU slots, which are its threads where it trains on the CPU.
    """

    gpus: float
    cpus: int = 1

    @staticmethod
    def of(nodes: Sequence[Node], gpus: float | None) -> Request:
        """Returns the request for `gpus` per training; None: the CPU slots of nodes with GPUs share them evenly.

        Raises:
            InvalidInput: neither a share of one GPU nor a number of them.
        """
        if gpus is not None:
            if gpus < 0 or not (gpus <= 1 or float(gpus).is_integer()):  # not a number, and infinity, are none
                raise InvalidInput(f"{gpus:g} GPUs: give 0, a share of one, or a whole number", where="--train-gpus")
            return Request(gpus)
        with_gpu = [node for node in nodes if node.gpus > 0]
        slots = sum(node.cpus for node in with_gpu)
        return Request(min(1.0, sum(node.gpus for node in with_gpu) / slots) if slots else 0.0)

    @staticmethod
    def of_few(nodes: Sequence[Node], trainings: int) -> Request:
        """Returns the request with which `trainings` fill the nodes: a GPU each, or where there is none, CPU slots."""
        if any(node.gpus >= 1 for node in nodes):
            return Request(1.0)
        slots = [int(node.cpus) for node in nodes]
        return Request(0.0, max(1, min(sum(slots) // trainings, max(slots))))

    def fits(self, node: Node) -> int:
        """Returns how many trainings a node runs in parallel."""
        if self.gpus == 0:
            return int(node.cpus / self.cpus)
        return int(min(node.cpus / self.cpus, node.gpus / self.gpus + 1e-9))

    def __str__(self) -> str:
        return f"{self.cpus} CPU slot{'s' * (self.cpus > 1)} and {self.gpus:g} GPUs"

    def slots(self, nodes: Sequence[Node]) -> int:
        """Returns how many trainings all nodes run in parallel."""
        return sum(self.fits(node) for node in nodes)


class Compute(Protocol):
    """Runs stages in worker processes."""

    @property
    def workers(self) -> int:
        """Trainings that run in parallel."""

    def run(self, work: Work, spec: Mapping[str, Any], kind: Kind = "short") -> Awaitable[Outcome]:
        """Runs `work(spec)` in a worker process.

        Raises:
            InfrastructureFailed: the worker or its node died, or the work says so.
        """


class RayCompute:
    """Ray on this machine: a cluster that ends with this process, and that only this machine reaches.

    Args:
        workers: CPU slots.

    Raises:
        InfrastructureFailed: Ray does not start here.
    """

    def __init__(self, workers: int) -> None:
        # Ray reads both when it is imported. Without clusters of several nodes it takes 127.0.0.1 for the node's
        # address; a token of its own it would keep in ~/.ray, for everybody to read.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Without shared memory Ray's node times out, and does not say why.
        if _SHARED_MEMORY.is_dir() and not os.access(_SHARED_MEMORY, os.W_OK):
            raise InfrastructureFailed(
                f"Ray needs shared memory, but this user cannot write to {_SHARED_MEMORY}: mount a tmpfs of mode 1777"
            )
        self._ray = _import_ray()
        for retries in reversed(range(_STARTS)):
            try:
                self._start(workers)
                break
            except InfrastructureFailed:
                self.close()
                if not retries:
                    raise
        nodes = _alive(self._ray)
        self._request = Request.of(nodes, None)
        self._workers = max(1, self._request.slots(nodes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is None:  # else its logs may tell why
            shutil.rmtree(self._session, ignore_errors=True)

    @property
    def workers(self) -> int:
        """CPU slots."""
        return self._workers

    async def run(self, work: Work, spec: Mapping[str, Any], kind: Kind = "short") -> Outcome:
        """Runs `work(spec)` in a Ray worker; a cancelled await cancels the task."""
        # Exports and checks take seconds: they run in parallel with trainings instead of queueing for a slot.
        cpus, gpus = (0.0, 0.0) if kind == "short" else (1.0, self._request.gpus)
        remote = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(work)
        return checked(await _result(self._ray, remote.remote(dict(spec))))

    def _start(self, workers: int) -> None:
        mark = secrets.token_hex(8)
        argv = [sys.executable, "-I", "-S", "-B", ray_reaper.__file__, f"{_MARK}={mark}"]
        # It kills orphans of Ray; in a session of its own, so that Ctrl-C does not reach it.
        self._reaper = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
        os.environ[_MARK] = mark
        try:
            self._session = _connect(
                self._ray,
                "local",
                num_cpus=workers,
                include_dashboard=False,
                object_store_memory=100 << 20,
                _system_config={"idle_worker_killing_time_threshold_ms": _IDLE_MS},
            )
        finally:
            del os.environ[_MARK]

    def close(self) -> None:
        """Ends the cluster."""
        self._ray.shutdown()
        with contextlib.suppress(subprocess.TimeoutExpired):  # on a busy machine it ends later, by itself
            self._reaper.communicate(timeout=_REAPER_S)


class ClusterCompute:
    """An existing Ray cluster of which this machine is a node.

    Trainings run on any node with the resources that they request; losing a node costs the stages that it ran. Exports
    and checks run on this machine, which has runtimes, lowered blocks and artifacts. This code is sent, libraries are
    not.

    Args:
        address: of the cluster.
        train_gpus: GPUs per training; None: see `Request.of`.
        trainings: number of trainings, where they are so few that each may take several slots (`Request.of_few`).

    Raises:
        InvalidInput: the address is that of a Ray client, or no node can run such a training.
        InfrastructureFailed: the cluster cannot be reached.
    """

    def __init__(self, address: str, train_gpus: float | None = None, trainings: int | None = None) -> None:
        if "://" in address:
            raise InvalidInput(
                f"{address}: this machine must be a node of the cluster (`ray start --address=HOST:PORT`); then give "
                "HOST:PORT, or auto",
                where="--ray-address",
            )
        self._ray = _import_ray()
        # Workers run this code, whatever version is installed on their node.
        environment = {"py_modules": [str(Path(nas.__file__).parent)], "excludes": ["__pycache__"]}
        _connect(self._ray, address, runtime_env=environment)
        self._home: str = self._ray.get_runtime_context().get_node_id()
        nodes = _alive(self._ray)
        self._request = Request.of(nodes, train_gpus) if trainings is None else Request.of_few(nodes, trainings)
        self._workers = self._request.slots(nodes)
        self._corpora: dict[str, Any] = {}
        if self._workers == 0:
            self.close()
            raise InvalidInput(f"no node of the cluster has {self._request}", where="--ray-address")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def workers(self) -> int:
        """Trainings that the nodes run in parallel; counted at the start."""
        return self._workers

    async def run(self, work: Work, spec: Mapping[str, Any], kind: Kind = "short") -> Outcome:
        """Runs `work(spec)` on this machine, or a training on any node; a cancelled await cancels the task."""
        if kind == "train":
            return await self._train(spec)
        if kind == "shared":
            environment = {"NAS_CACHE": str(paths.cache())}
            remote = self._remote(_run_on_node, runtime_env={"env_vars": environment})
            return checked(
                await _result(self._ray, remote.remote(work, self._on_node(spec), self._home), self._require_room)
            )
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # The node may have been started without them.
        environment = {name: os.environ[name] for name in _NEEDED if name in os.environ}
        remote = self._ray.remote(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self._home, soft=False),
            runtime_env={"env_vars": environment},
        )(work)
        return checked(await _result(self._ray, remote.remote(dict(spec))))

    async def _train(self, spec: Mapping[str, Any]) -> Outcome:
        remote = self._remote(_train_on_node)
        checkpoints = await asyncio.to_thread(checkpoints_of, spec)
        task = remote.remote(self._on_node(spec), checkpoints, self._corpus(spec), self._home)
        outcome = checked(await _result(self._ray, task, self._require_room))
        return await asyncio.to_thread(collect_remote_training, spec, outcome)

    def _remote(self, work: Callable[..., Outcome], **options: Any) -> Any:
        """Returns the remote function of a training."""
        request = self._request
        return self._ray.remote(num_cpus=request.cpus, num_gpus=request.gpus, max_retries=0, **options)(work)

    def _on_node(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the spec of a training with what it may use of its node."""
        device = {"device": "cpu"} if self._request.gpus == 0 else {}
        return dict(spec) | device | {"threads": self._request.cpus}

    def _corpus(self, spec: Mapping[str, Any]) -> Any:
        """Returns a reference to the corpus in Ray's object store, which sends it to each node once."""
        corpus = corpus_of(spec)
        if corpus is None:
            return None
        if corpus.hash not in self._corpora:
            self._corpora[corpus.hash] = self._ray.put(packed(corpus))
        return self._corpora[corpus.hash]

    def _require_room(self) -> None:
        """Raises if no node is left that could run the training."""
        if self._request.slots(_alive(self._ray)) == 0:
            raise InfrastructureFailed(f"no node is left with {self._request}")

    def close(self) -> None:
        """Disconnects."""
        self._ray.shutdown()


def checked(result: Outcome) -> Outcome:
    """Returns what a worker returned; raises the `InfrastructureFailed` that it reports."""
    if "infrastructure" in result:
        raise InfrastructureFailed(result["infrastructure"])
    return result


def jobs_of(spec: Spec) -> list[TrainJob]:
    """Returns the seeds that `spec` trains."""
    return [TrainJob.model_validate(job) for job in spec["jobs"]]


def checkpoints_of(spec: Spec) -> dict[str, bytes]:
    """Returns KEY/FILE -> content of the local files that the training of `spec` continues or learns from."""
    folder = Path(spec["checkpoints"])
    names = [f"{job.key}/{name}" for job in jobs_of(spec) for name in (CHECKPOINT, STABLE)]
    names += [f"{job.resume_from}/{STABLE}" for job in jobs_of(spec) if job.resume_from is not None]
    names += [f"{job.teacher.job.key}/{WEIGHTS}" for job in jobs_of(spec) if job.teacher is not None]
    return {name: path.read_bytes() for name in names if (path := folder / name).is_file()}


def corpus_of(spec: Spec) -> CorpusRef | None:
    """Returns the corpus that the training of `spec` reads; None for a task, which generates its data."""
    return jobs_of(spec)[0].run.corpus


def run_remote_training(spec: Spec, checkpoints: Mapping[str, bytes], text: bytes | None) -> Outcome:
    """Runs the training of `spec` on this host; returns what `train` does, with the contents of its files.

    Args:
        spec: of the launch's host; its paths are not used.
        checkpoints: see `checkpoints_of`.
        text: content of the corpus.
    """
    _unpack_corpus(spec, text)
    # Named by the key: a training that is retried on this host continues from a killed worker's checkpoint.
    folder = paths.home() / "work" / "elsewhere" / jobs_of(spec)[0].key
    _remove_abandoned(folder.parent)
    for name, content in checkpoints.items():
        if not (path := folder / name).is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, content)
    outcome: Outcome = train({**spec, "checkpoints": str(folder), "lock": str(host_lock_folder())})
    if "value" in outcome:
        trained = [key for key, of_seed in outcome["value"].items() if "value" in of_seed]
        names = [f"{key}/{name}" for key in trained for name in (CHECKPOINT, STABLE, WEIGHTS)]
        # The evaluation of a library's mix writes weights alone, or nothing.
        outcome["files"] = {name: path.read_bytes() for name in names if (path := folder / name).is_file()}
        shutil.rmtree(folder, ignore_errors=True)  # a candidate that failed may have left none
    return outcome


def _remove_abandoned(folder: Path) -> None:
    oldest = time.time() - _ABANDONED_S
    for training in folder.glob("*"):
        with contextlib.suppress(OSError):  # another worker may end its training, or remove this one
            if max(path.stat().st_mtime for path in (training, *training.rglob("*"))) < oldest:
                shutil.rmtree(training)


def collect_remote_training(spec: Spec, outcome: Outcome) -> Outcome:
    """Stores the files of a remote training where `spec` wants them; returns the outcome of a local training.

    Raises:
        InfrastructureFailed: the weights are not those that were trained, or the disk is full.
    """
    files = outcome.pop("files", None)
    if files is None:
        return outcome  # trained on this host, or failed
    folder = Path(spec["checkpoints"])
    for key, of_seed in outcome["value"].items():
        if "value" not in of_seed:
            continue
        weights = files.get(f"{key}/{WEIGHTS}")
        digest = "" if weights is None else hashlib.sha256(weights).hexdigest()
        if digest != of_seed["value"]["weights_sha256"]:
            raise InfrastructureFailed(f"the weights of training {key[:12]} were damaged in transit")
    for name, content in files.items():
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_durably(folder / name, content)
        except OSError as error:
            raise InfrastructureFailed(f"cannot write {folder / name}: {error.strerror}") from error
    return outcome


def _unpack_corpus(spec: Spec, text: bytes | None) -> None:
    """Writes the corpus of `spec` into this host's cache."""
    corpus = corpus_of(spec)
    if corpus is not None and text is not None:
        unpack(corpus, text)


def _train_on_node(
    spec: Mapping[str, Any], checkpoints: Mapping[str, bytes], corpus: bytes | None, home: str
) -> Outcome:
    """Runs a training in a worker, on the launch's own machine or on another one."""
    import ray

    if ray.get_runtime_context().get_node_id() == home:
        _unpack_corpus(spec, corpus)
        return train(spec)
    return run_remote_training(spec, checkpoints, corpus)


def _run_on_node(work: Work, spec: Mapping[str, Any], home: str) -> Outcome:
    """Runs `work(spec)` in a worker, under the host lock of its machine."""
    import ray

    is_home = ray.get_runtime_context().get_node_id() == home
    return work(spec if is_home else {**spec, "lock": str(host_lock_folder())})


def _import_ray() -> Any:
    # Read when ray is imported: no usage report, no colour codes, no log lines of workers on our terminal.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING", "0")
    # Ray's default of 15 leaves workers 3 % of a core that another process keeps busy: a study would not end there.
    # Measurements do not need it, because training pauses while one runs.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    return ray


def _connect(ray: Any, address: str, **more: Any) -> str:
    """Connects this process to a cluster; returns the folder of its session on this machine."""
    try:
        context = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
        return str(context.address_info["session_dir"])
    except Exception as error:
        # Classes of Python and Ray, and a bare `Exception` where the node of a busy machine is late.
        where = "Ray did not start" if address == "local" else f"cannot use the Ray cluster at {address}"
        raise InfrastructureFailed(f"{where}: {error}") from error


def _alive(ray: Any) -> list[Node]:
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in resources]


async def _result(ray: Any, task: Any, check: Callable[[], None] = lambda: None) -> Outcome:
    """Waits for a task's result; `check` is called in a thread every few seconds and aborts the wait by raising."""
    future = asyncio.wrap_future(task.future())
    try:
        while not future.done():
            await asyncio.wait([future], timeout=_CHECK_S)
            if not future.done():
                await asyncio.to_thread(check)
        result: Outcome = future.result()
        return result
    except ray.exceptions.RayTaskError as error:  # it is of the class of its cause, too
        if isinstance(error.cause, ImportError):
            raise InfrastructureFailed(f"a node of the cluster lacks a library: {error.cause}") from error
        if isinstance(error.cause, InfrastructureFailed | OSError):  # of files that a node gets and sends
            raise InfrastructureFailed(f"a node of the cluster failed: {error.cause}") from error
        raise  # a bug in the work: its own traceback says where
    except (asyncio.CancelledError, InfrastructureFailed):
        # asyncio would print an exception that nobody retrieves.
        future.add_done_callback(lambda work: work.cancelled() or work.exception())
        ray.cancel(task, force=True)
        raise
    except ray.exceptions.RayError as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InfrastructureFailed(f"a worker died: {reason}") from error
