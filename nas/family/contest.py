"""Measures contenders side by side: every model once, then every model again, so that all see the same conditions.

Each repetition is a result of its own in the store, found by the key of all its inputs: a comparison that was killed,
or is asked for again with more models, measures what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nas.core.canonical import content_hash
from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.family import Metric
from nas.core.measurement import Measurement
from nas.core.space import Protocol
from nas.core.workload import Workload
from nas.family.contender import Contender
from nas.runtimes.base import Artifact
from nas.service.judge import measurement
from nas.service.keys import measure_key
from nas.service.measuring import Jobs, Subject, measure
from nas.service.stage_work import Bench
from nas.service.stages import failure
from nas.store import results
from nas.store.store import Store

GENERATED = 100
"""Decoded tokens, as in the report."""
DEADLINE_S = 3600.0
"""Per process: 4K tokens through 4B weights take some minutes on one slow core."""

_REPLICATES = 1000
"""More repetitions than anyone asks for: where the numbers of the next replicate begin."""


@dataclass(frozen=True)
class Task:
    """What every contender does.

    Args:
        at: tokens of context that its figures are said of.
        workload: what is run.
        metrics: which figures are taken from it.
        repetitions: processes.
    """

    at: int
    workload: Workload
    metrics: tuple[Metric, ...]
    repetitions: int


def tasks(threads: int, repetitions: int, *, flash_attn: bool = True) -> tuple[Task, ...]:
    """The report's workloads, the cheapest first.

    The peak at 32K is taken with the whole cache allocated and a short prompt: docs/family-comparison.md says why.
    """
    common = {"threads": threads, "flash_attn": flash_attn}
    speed: tuple[Metric, ...] = ("prefill_tps", "decode_tps", "ttft_ms")
    return (
        Task(32768, Workload(prompt=512, gen=16, context=32768, **common), ("peak_rss_mb",), 1),
        Task(1024, Workload(prompt=1024, gen=GENERATED, **common), speed, repetitions),
        Task(4096, Workload(prompt=4096, gen=GENERATED, **common), (*speed, "peak_rss_mb"), repetitions),
    )


@dataclass
class Standing:
    """What one contender has done of a task.

    Args:
        taken: its repetitions so far.
        failed: why it takes no further part; empty: it does.
    """

    taken: list[Measurement] = field(default_factory=list)
    failed: str = ""

    def summary(self) -> Measurement | None:
        """All repetitions as one measurement."""
        if not self.taken:
            return None
        first = self.taken[0]
        counted = [rep for each in self.taken for rep in each.repetitions if rep.valid or each.noisy]
        return measurement(
            counted, noisy=any(each.noisy for each in self.taken),
            artifact=first.artifact, runtime=first.runtime, build=first.build, patched=first.patched,
            device=first.device, workload=first.workload, file_bytes=round(_file_mb(first) * 1e6),
            calibration_ms=first.calibration_ms, wall_s=sum(each.wall_s for each in self.taken),
        )  # fmt: skip


Standings = dict[tuple[str, int], Standing]
"""(contender's name, the task's context) -> what it has done."""


@dataclass(frozen=True)
class Contest:
    """Everything that a comparison is measured with.

    Args:
        bench: device, runtime, reference run.
        jobs: runs rounds on the device.
        store: keeps repetitions.
        protocol: limits and attempts.
        accept_noise: keep refused repetitions, marked.
        replicate: a higher number measures anew.
    """

    bench: Bench
    jobs: Jobs
    store: Store
    protocol: Protocol
    accept_noise: bool = False
    replicate: int = 0

    async def hold(
        self,
        entries: Sequence[tuple[Contender, Artifact]],
        asked: Sequence[Task],
        after_each: Callable[[Standings, str], None],
    ) -> Standings:
        """Measures every entry in every task; `after_each` is told what stands after each repetition, and its name.

        Raises:
            InfrastructureFailed: the device is gone or too noisy; what was measured until then is kept.
        """
        standings: Standings = {(each.name, task.at): Standing() for task in asked for each, _ in entries}
        for task in asked:
            for turn in range(task.repetitions):
                for contender, artifact in entries:
                    standing = standings[contender.name, task.at]
                    if standing.failed:
                        continue
                    standing.failed = self._too_large(artifact)
                    if not standing.failed:
                        await self._repeat(standing, contender, artifact, task, turn)
                    after_each(standings, f"{contender.name} at {task.at} tokens, {turn + 1} of {task.repetitions}")
        return standings

    async def _repeat(
        self, standing: Standing, contender: Contender, artifact: Artifact, task: Task, turn: int
    ) -> None:
        outcome = await self._repetition(artifact, self._workload(contender, task), turn)
        if "failed" in outcome:
            failed = outcome["failed"]
            standing.failed = f"{failed['reason']}: {failed['message'].splitlines()[0]}"
        else:
            standing.taken.append(Measurement.model_validate(outcome["value"]))

    async def _repetition(self, artifact: Artifact, workload: Workload, turn: int) -> dict[str, Any]:
        bench = self.bench
        key = measure_key(
            artifact.sha256, bench.runner, bench.device.id, workload, 1, self.protocol, bench.reference.calibration_ms,
            self.accept_noise, self.replicate * _REPLICATES + turn, bench.device.energy_counter,
        )  # fmt: skip
        if row := results.get(self.store, key):
            return row.payload
        subject = Subject(artifact, bench.runtime, bench.runner, bench.device, workload)
        # Jobs of an earlier try, which the device may have left, are not this one's.
        job = content_hash({"compare": key, "at": time.time()})
        try:
            taken = await measure(
                subject, bench.reference, self.jobs, job, None, 1, self.protocol, accept_noise=self.accept_noise
            )
        except CandidateFailed as error:
            return results.put(self.store, key, "measure", dict(failure(error))).payload
        except InfrastructureFailed as error:
            raise InfrastructureFailed(
                f"{error}. What was measured is kept: the same command goes on from here"
            ) from error
        payload = {"value": taken.model_dump(mode="json")}
        return results.put(self.store, key, "measure", payload, seconds=taken.wall_s).payload

    def _workload(self, contender: Contender, task: Task) -> Workload:
        fused = task.workload.flash_attn and contender.flash_attn
        return self.bench.device.pinned(task.workload.model_copy(update={"flash_attn": fused}))

    def _too_large(self, artifact: Artifact) -> str:
        needs, has = artifact.size / 1e6, self.bench.device.memory_mb
        return f"too large: {needs:,.0f} MB of weights, {has:,} MB of memory on the device" if needs > has else ""


def _file_mb(taken: Measurement) -> float:
    size = taken.figures["file_size"].value
    assert size is not None
    return size
