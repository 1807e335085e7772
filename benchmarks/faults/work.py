"""Jobs with a known right result."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeVar

from benchmarks.faults.runtime import MAIN, CampaignRuntime, plan
from nas.core.canonical import content_hash
from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.plan import InputFile, RawRun, Round
from nas.infra.store import artifacts, jobs
from nas.infra.store.rows import JobRow
from nas.infra.store.store import Store
from nas.measure.farm.trust import Admissions
from nas.measure.runtimes.runner import read_sample

T = TypeVar("T")

Conduct = Literal["right", "crash", "hang", "garbage", "flood", "out_of_memory"]

ENDS: dict[Conduct, str] = {
    "right": "right",
    "crash": "crash",
    "hang": "timeout",
    "garbage": "garbage_output",
    "flood": "garbage_output",
    "out_of_memory": "out_of_memory",
}
"""What a run must be judged to be."""

KILLED = "killed from outside"

_PATIENCE_S, _LOOK_S = 180.0, 0.1
_RETRIES_S, _RETRY_S = 120.0, 0.5
_HANG_S, _PATIENT_S = 2, 20


@dataclass(frozen=True, slots=True)
class Order:
    """A job to run.

    Args:
        key: its result key.
        device: id.
        conduct: of the runner.
        seconds: duration of its run.
        model: its input.
    """

    key: str
    device: str
    conduct: Conduct
    seconds: float
    model: InputFile

    @property
    def job(self) -> str:
        """Id of the job row."""
        return f"{self.key}.0"

    @property
    def tag(self) -> str:
        """Tag in the arguments of its processes."""
        return self.key[:16]

    @property
    def deadline_s(self) -> int:
        """Deadline on the device."""
        return _HANG_S if self.conduct == "hang" else _PATIENT_S


class Works:
    """Makes jobs and their files.

    Args:
        store: the coordinator's.
        seed: of the campaign.
    """

    def __init__(self, store: Store, seed: int) -> None:
        self._store, self._seed = store, seed
        self._runtime = CampaignRuntime(store.artifacts.parent / "campaign")
        self._runner = self._runtime.runner("x86_64-linux")

    def admit(self, admissions: Admissions) -> None:
        """Admits the runner, as those of runtimes are."""
        admissions.admit(self._runner, self._runtime.runner_folder(self._runner))

    def order(
        self, name: str, device: str, conduct: Conduct = "right", *, seconds: float = 0.5, size: int = 4096
    ) -> Order:
        """Returns a job, not queued yet, with its own model in the coordinator's store."""
        content = random.Random(f"{self._seed}/{name}").randbytes(size)
        with TemporaryDirectory() as folder:
            Path(folder, "model").write_bytes(content)
            sha256 = patiently(lambda: artifacts.put_file(self._store, Path(folder, "model"))).sha256
        key = content_hash({"campaign": self._seed, "job": name, "device": device})
        return Order(key, device, conduct, round(seconds, 2), InputFile(sha256=sha256, size=size))

    def enqueue(self, order: Order) -> None:
        """Queues a job, as a launch does."""
        plan_ = plan(self._runner, order.model, order.conduct, order.seconds, order.tag, order.deadline_s)
        round_ = Round(candidate=plan_, repetitions=1)
        patiently(lambda: jobs.enqueue(self._store, order.key, round_, device=order.device))

    def twin(self, order: Order) -> Order:
        """Returns another job with the same model."""
        return replace(order, key=content_hash({"twin": order.key}), conduct="right")

    def await_end(self, order: Order) -> JobRow:
        """Returns the job once it is done or failed, or after a time limit."""
        end = time.monotonic() + _PATIENCE_S
        while True:
            row = patiently(lambda: jobs.get(self._store, order.job))
            assert row is not None, order
            if row.state not in jobs.LIVE or time.monotonic() > end:
                return row
            time.sleep(_LOOK_S)

    def runner_files(self, folder: Path, *, everywhere: bool) -> list[Path]:
        """Returns paths of the runner on a device: ready to run and, if asked for, the copy by content."""
        (sha256,) = (file.sha256 for file in self._runner.files.values())
        copies = [*folder.glob(f"bundles/*/{MAIN}"), *([folder / "content" / sha256] if everywhere else [])]
        return [path for path in copies if path.exists()]

    def path(self, order: Order) -> Path:
        """Returns the path of its model in the coordinator's store."""
        return artifacts.path(self._store, order.model.sha256)

    def forget(self, order: Order, cache: Path, device: Path) -> None:
        """Removes its model everywhere, to limit disk use; the devices' storage is memory."""
        sha256 = order.model.sha256
        with contextlib.suppress(InfrastructureFailed):
            self.path(order).unlink()
        for path in (cache / sha256[:2] / sha256, device / "content" / sha256):
            path.unlink(missing_ok=True)


def patiently(call: Callable[[], T]) -> T:
    """Repeats a call of the campaign's own while a fault, such as a full disk, makes it fail."""
    end = time.monotonic() + _RETRIES_S
    while True:
        try:
            return call()
        except InfrastructureFailed:
            if time.monotonic() > end:
                raise
            time.sleep(_RETRY_S)


def judged(row: JobRow, order: Order) -> str:
    """Returns the result of a done job: "right", a reason of failure, `KILLED`, or another text."""
    assert row.result is not None, row
    if len(row.result.pairs) != 1:
        return f"{len(row.result.pairs)} runs instead of one"
    return _judged(row.result.pairs[0].candidate, order)


def fingerprint(row: JobRow) -> str:
    """Returns a hash of all that must not change once a job is done."""
    assert row.result is not None, row
    return content_hash([row.epoch, row.updated, row.result.model_dump(mode="json")])


def _judged(raw: RawRun, order: Order) -> str:
    try:
        sample = read_sample(raw)
    except CandidateFailed as error:
        return error.reason
    except InfrastructureFailed as error:
        return KILLED if KILLED in str(error) else str(error)
    answer = sample.info.get("answer")
    return "right" if answer == order.model.sha256 else f"a wrong answer: {answer!r}"
