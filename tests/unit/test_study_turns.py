from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from study_support import lm_job

from nas.search.compute.worker import Work
from nas.search.proxy.job import TrainJob
from nas.search.study.stages import PrioritySemaphore, Trainings


def test_lower_ranks_go_first_and_equals_in_order_of_arrival() -> None:
    async def run() -> list[str]:
        turns, order = PrioritySemaphore(1), []

        async def work(rank: int, name: str) -> None:
            async with turns.acquire(rank):
                order.append(name)
                await asyncio.sleep(0)

        async with turns.acquire(9):
            tasks = [asyncio.create_task(work(rank, name)) for rank, name in [(5, "c"), (1, "a"), (5, "d"), (2, "b")]]
            await asyncio.sleep(0)
            assert order == []
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(run()) == ["a", "b", "c", "d"]


def test_as_many_at_once_as_there_are_places() -> None:
    async def run() -> int:
        turns, inside, most = PrioritySemaphore(3), 0, 0

        async def work() -> None:
            nonlocal inside, most
            async with turns.acquire(0):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(work() for _ in range(10)))
        return most

    assert asyncio.run(run()) == 3


def test_cancelled_waiters_and_holders_give_their_place_back() -> None:
    async def run() -> None:
        turns = PrioritySemaphore(1)

        async def hold() -> None:
            async with turns.acquire(0):
                await asyncio.sleep(60)

        holder, waiter = asyncio.create_task(hold()), asyncio.create_task(hold())
        await asyncio.sleep(0)
        waiter.cancel()
        holder.cancel()
        await asyncio.gather(holder, waiter, return_exceptions=True)
        async with asyncio.timeout(5), turns.acquire(0):
            pass

    asyncio.run(run())


def test_a_turn_granted_in_the_moment_of_cancelling_is_passed_on() -> None:
    async def run() -> None:
        turns = PrioritySemaphore(1)

        async def hold() -> None:
            async with turns.acquire(0):
                await asyncio.sleep(60)

        async with turns.acquire(0):
            waiter = asyncio.create_task(hold())
            await asyncio.sleep(0)
        waiter.cancel()  # its turn has come, but it has not run since
        await asyncio.gather(waiter, return_exceptions=True)
        async with asyncio.timeout(5), turns.acquire(0):
            pass

    asyncio.run(run())


class CountedCompute:
    """Trains nothing: notes the seeds of each training that is started, and answers when it may."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self.started: list[list[int]] = []
        self.go = asyncio.Event()

    async def run(self, work: Work, spec: Mapping[str, Any], kind: str = "short") -> dict[str, Any]:
        jobs = [TrainJob.model_validate(job) for job in spec["jobs"]]
        self.started.append([job.seed for job in jobs])
        await self.go.wait()
        outcomes = {
            job.key: {"value": job.seed} if job.seed < 9 else {"failed": {"reason": "diverged"}} for job in jobs
        }
        return {"value": outcomes, "seconds": 6.0}


def trainings_of(
    seeds: Sequence[int], check: Callable[[Trainings, CountedCompute, list[Any]], Any], workers: int = 1
) -> Any:
    """Starts a training per seed at once, then runs `check`."""

    async def go() -> Any:
        compute = CountedCompute(workers)
        trainings = Trainings(compute, Path("scratch"), Path("lock"))
        running = [
            asyncio.ensure_future(trainings.run(0, lm_job().model_copy(update={"seed": seed}))) for seed in seeds
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return await asyncio.wait_for(check(trainings, compute, running), 60)

    return asyncio.run(go())


def test_seeds_that_start_together_are_one_training_with_an_outcome_each() -> None:
    async def check(trainings: Trainings, compute: CountedCompute, running: list[Any]) -> None:
        compute.go.set()
        outcomes = await asyncio.gather(*running)
        assert compute.started == [[0, 1, 9]]
        assert [outcome.get("value") for outcome in outcomes] == [0, 1, None]
        assert "failed" in outcomes[2]
        assert [outcome["seconds"] for outcome in outcomes] == [2.0] * 3

    trainings_of([0, 1, 9], check)


def test_free_workers_share_the_seeds() -> None:
    async def check(trainings: Trainings, compute: CountedCompute, running: list[Any]) -> None:
        compute.go.set()
        outcomes = await asyncio.gather(*running)
        assert compute.started == [[0, 1], [2, 3], [4]]
        assert [outcome["value"] for outcome in outcomes] == [0, 1, 2, 3, 4]

    trainings_of(range(5), check, workers=3)


def test_a_seed_that_comes_while_its_group_waits_for_a_worker_joins_it() -> None:
    async def check(trainings: Trainings, compute: CountedCompute, running: list[Any]) -> None:
        other = lm_job(steps=4)
        later = [asyncio.ensure_future(trainings.run(1, other.model_copy(update={"seed": seed}))) for seed in (3, 4)]
        await asyncio.sleep(0)
        compute.go.set()
        await asyncio.gather(*running, *later)
        assert compute.started == [[0], [3, 4]]

    trainings_of([0], check)


def test_a_training_ends_when_nobody_waits_for_it() -> None:
    async def check(trainings: Trainings, compute: CountedCompute, running: list[Any]) -> None:
        first, second = running
        first.cancel()
        await asyncio.wait([first])
        assert not second.done()
        second.cancel()
        await asyncio.wait([second])
        compute.go.set()
        again = await trainings.run(0, lm_job())  # the worker is free again
        assert again["value"] == 0
        assert compute.started == [[0, 1], [0]]

    trainings_of([0, 1], check)
