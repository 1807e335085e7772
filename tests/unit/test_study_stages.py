"""One stage under its key: found, shared, tried again, never done twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from store_support import key
from study_support import bed_of, lm_job

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.layout import Layout
from nas.infra.store import outcomes, results
from nas.measure.runtimes.base import Artifact, Checkpoint
from nas.search.compute.worker import Outcome
from nas.search.proxy.job import TrainJob
from nas.search.study.ledger import Ledger
from nas.search.study.stages import Stages, Trainings
from nas.testing import inline_study

KEY = key("stage")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    bed = bed_of(tmp_path)
    ledger = bed.ledger()
    for width in (256, 320, 384):
        ledger.propose(Layout.parse(f"d128 v256 ffn=swiglu:{width} [C3 A2/1]"), "proposal")
    return ledger


def test_a_damaged_checkpoint_is_trained_again(tmp_path: Path) -> None:
    bed = bed_of(tmp_path)
    ledger = bed.ledger()
    ledger.propose(Layout.parse("d128 v256 ffn=swiglu:256 [C3 A2/1]"), "proposal")
    trained: list[str] = []

    class Trainer:
        workers = 1

        async def run(self, work: Any, spec: Any, kind: str = "short") -> Outcome:
            (job,) = (TrainJob.model_validate(fields) for fields in spec["jobs"])
            trained.append(job.key)
            return {
                "value": {job.key: {"value": inline_study.trained(job, spec).model_dump(mode="json")}},
                "seconds": 1.0,
            }

    work = bed.work(ledger)
    work = replace(work, trainings=Trainings(cast(Any, Trainer()), work.scratch, work.lock))

    async def weights() -> Checkpoint:
        return await work._weights(0, lm_job())

    first = run(weights)
    first.path.write_text("rotten")
    assert run(weights).is_intact() and run(weights).is_intact()
    assert len(trained) == 2


def test_what_two_trials_share_is_written_again_once(tmp_path: Path) -> None:
    bed = bed_of(tmp_path)
    ledger, layout = bed.ledger(), Layout.parse("d128 v256 ffn=swiglu:256 [C3 A2/1]")
    for quantisation in ("", "q4_0"):
        ledger.propose(replace(layout, quantisation=quantisation), "proposal")
    exports: list[str] = []

    class Exporter:
        workers = 2

        async def run(self, work: Any, spec: Any, kind: str = "short") -> Outcome:
            exports.append(spec["destination"])
            outcome: Outcome = work(spec)
            await asyncio.sleep(0.01)  # the answer of a worker takes time
            return outcome

    work = replace(bed.work(ledger), compute=cast(Any, Exporter()))

    async def export() -> list[dict[str, Artifact]]:
        return await asyncio.gather(*(work.export_all(trial, layout) for trial in (0, 1)))

    ((artifact,), _) = [exported.values() for exported in run(export)]
    for file in artifact.written:
        ledger.artifact_path(file.sha256).unlink()
    run(export)
    assert len(exports) == 2
    assert all(ledger.has_artifact(file.sha256) for file in artifact.written)


class Action:
    """Gives the outcomes of `script` in turn; a blocked one waits until it is released."""

    def __init__(self, *script: Outcome | Exception) -> None:
        self.script, self.calls = list(script), 0
        self.free = asyncio.Event()
        self.free.set()

    async def __call__(self) -> Outcome:
        self.calls += 1
        answer = self.script[min(self.calls, len(self.script)) - 1]
        await self.free.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        return await asyncio.wait_for(test(), 120)

    return asyncio.run(go())


def firsts(ledger: Ledger) -> dict[int, bool]:
    with ledger.store.read() as connection:
        rows = connection.exec_driver_sql("SELECT trial, first FROM result_use").all()
    return {row.trial: bool(row.first) for row in rows}


def test_what_is_there_is_not_done_again(ledger: Ledger) -> None:
    async def test() -> None:
        action = Action({"value": 7, "seconds": 2.0})
        assert await Stages(ledger).run("train", KEY, 0, action) == 7
        assert await Stages(ledger).run("train", KEY, 1, action) == 7
        assert action.calls == 1

    run(test)
    assert firsts(ledger) == {0: True, 1: False}
    assert results.stage_seconds(ledger.store, 1) == {"train": 2.0}


def test_who_comes_meanwhile_shares_the_work(ledger: Ledger) -> None:
    async def test() -> None:
        action, stages = Action({"value": 7}), Stages(ledger)
        action.free.clear()
        both = [asyncio.create_task(stages.run("train", KEY, trial, action)) for trial in (0, 1)]
        await asyncio.sleep(0.01)
        action.free.set()
        assert await asyncio.gather(*both) == [7, 7]
        assert action.calls == 1

    run(test)
    assert firsts(ledger) == {0: True, 1: False}


@pytest.mark.parametrize(("cancelled", "calls"), [(0, 2), (1, 1)], ids=["at work", "waiting"])
def test_of_two_trials_with_one_key_either_may_be_cancelled(ledger: Ledger, cancelled: int, calls: int) -> None:
    async def test() -> None:
        action, stages = Action({"value": 7}), Stages(ledger)
        action.free.clear()
        both = [asyncio.create_task(stages.run("train", KEY, trial, action)) for trial in (0, 1)]
        await asyncio.sleep(0.01)
        both[cancelled].cancel()
        await asyncio.sleep(0.01)
        action.free.set()
        assert await both[1 - cancelled] == 7
        assert both[cancelled].cancelled()
        assert action.calls == calls

    run(test)
    assert firsts(ledger) == {1 - cancelled: True}


def test_an_infrastructure_failure_is_tried_again_and_kept(ledger: Ledger) -> None:
    async def test() -> None:
        action = Action(InfrastructureFailed("a worker died"), InfrastructureFailed("again"), {"value": 7})
        assert await Stages(ledger, first_pause_s=0).run("export", KEY, 0, action) == 7

    run(test)
    assert [attempt.message for attempt in outcomes.attempts_of_key(ledger.store, KEY)] == ["a worker died", "again"]
    assert ledger.tries(KEY) == 2


@pytest.mark.parametrize(("stage", "tries"), [("export", 3), ("train", 3), ("gate", 3), ("measure", 1)])
def test_after_the_last_try_it_is_passed_on(ledger: Ledger, stage: Any, tries: int) -> None:
    async def test() -> None:
        action = Action(InfrastructureFailed("a worker died"))
        with pytest.raises(InfrastructureFailed, match="a worker died"):
            await Stages(ledger, first_pause_s=0).run(stage, KEY, 0, action)
        assert action.calls == tries

    run(test)
    assert results.get(ledger.store, KEY) is None
    assert ledger.tries(KEY) == tries


def test_a_candidates_failure_is_a_result_like_any_other(ledger: Ledger) -> None:
    async def test() -> None:
        action = Action({"failed": {"reason": "diverged", "message": "loss is not finite"}})
        for trial in (0, 1):
            with pytest.raises(CandidateFailed, match="loss is not finite") as failed:
                await Stages(ledger).run("train", KEY, trial, action)
            assert failed.value.reason == "diverged"
        assert action.calls == 1

    run(test)


def test_a_bug_in_an_action_is_not_hidden(ledger: Ledger) -> None:
    async def test() -> None:
        with pytest.raises(ZeroDivisionError):
            await Stages(ledger).run("train", KEY, 0, Action(ZeroDivisionError()))

    run(test)


def test_of_two_writers_the_first_one_wins(ledger: Ledger) -> None:
    async def test() -> None:
        async def action() -> Outcome:
            results.put(ledger.store, KEY, "train", {"value": "another study's"})
            return {"value": "ours"}

        assert await Stages(ledger).run("train", KEY, 0, action) == "another study's"

    run(test)
    assert firsts(ledger) == {0: False}
