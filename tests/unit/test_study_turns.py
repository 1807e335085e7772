from __future__ import annotations

import asyncio

from nas.study.stages import PrioritySemaphore


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
