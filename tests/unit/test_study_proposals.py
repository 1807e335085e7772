"""The proposer of a study: told in the order of the log, so that the log replays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from study_support import Bed, bed_of, tiny_space

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.trial import Event, EventKind
from nas.infra.store.rows import Trial
from nas.search.proposers import PROPOSERS, BaseProposer, Observation
from nas.search.proposers.sampling import Rng
from nas.search.study.events import Observed, ReferencePointFixed, notes
from nas.search.study.ledger import Ledger
from nas.search.study.proposals import ProposalDriver, replay

POINT_OF_TINY = {"quality": -0.5, "latency": 0.5, "memory": 0.5}


class Moody(BaseProposer):
    """Proposes by what it was told; waits while it is being asked, if it has to."""

    gate: ClassVar[threading.Event]
    knowledge: ClassVar[list[tuple[int, bool]]]

    def seeds(self) -> list[Layout]:
        return []

    def propose(self, rng: Rng) -> tuple[Layout, str, tuple[str, ...]]:
        Moody.gate.wait(60)
        count, pointed = len(self.log.sorted_observations()), self.log.reference_point is not None
        Moody.knowledge.append((count, pointed))
        depth = 2 + (count + pointed) % 3
        widths = (256, 320, 384, 448, 512)
        ffn = widths[int(rng.integers(len(widths)))]
        mixers = " ".join(["A2/1", *(f"C{int(rng.integers(3, 5))}" for _ in range(depth - 1))])
        return Layout.parse(f"d128 v256 ffn=swiglu:{ffn} [{mixers}]"), "random", ()


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    PROPOSERS.add("moody", Moody)
    Moody.knowledge, Moody.gate = [], threading.Event()
    Moody.gate.set()
    space = tiny_space(search={"proposer": "moody"})
    yield bed_of(tmp_path, space)


def asker(bed: Bed, ledger: Ledger) -> ProposalDriver:
    driver = ProposalDriver(bed.space, lambda layout: True, bed.folder / "lock")
    driver.resume(ledger.trials(), ledger.recall())
    return driver


def next_trial(driver: ProposalDriver, ledger: Ledger) -> Trial:
    trial = asyncio.run(driver.next(ledger))
    assert trial is not None
    return trial


def running(trial: Trial, latency: float = 0.1) -> Observation:
    return Observation(Layout.from_json(trial.layout), "running", {"latency": latency})


def differences(bed: Bed, ledger: Ledger, events: list[Event] | None = None) -> list[str]:
    return replay(bed.space, lambda layout: True, ledger.trials(), events or ledger.events())


def test_a_study_of_an_older_engine_is_resumed_and_says_so(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = bed.ledger()
    monkeypatch.setattr(Moody, "engine", "moody/1")
    next_trial(asker(bed, ledger), ledger)
    assert ProposalDriver(bed.space, lambda layout: True, bed.folder / "lock").resume(ledger.trials(), []) == []
    monkeypatch.setattr(Moody, "engine", "moody/2")
    resumed = ProposalDriver(bed.space, lambda layout: True, bed.folder / "lock")
    (line,) = resumed.resume(ledger.trials(), ledger.recall())
    assert line.startswith("earlier proposals are of moody/1; moody/2 continues")
    assert (next_trial(resumed, ledger).record or {})["engine"] == "moody/2"
    with pytest.raises(InvalidInput, match="was proposed by moody/1; here is moody/2"):
        differences(bed, ledger)


def test_a_log_with_everything_in_it_replays(bed: Bed) -> None:
    ledger = bed.ledger()
    driver = asker(bed, ledger)
    first = next_trial(driver, ledger)
    driver.tell(ledger, first.number, running(first))
    next_trial(driver, ledger)
    driver.fix_reference_point(ledger, POINT_OF_TINY)
    driver.fix_reference_point(ledger, POINT_OF_TINY)
    next_trial(driver, ledger)
    assert Moody.knowledge == [(0, False), (1, False), (1, True)]
    assert differences(bed, ledger) == []
    assert [event.payload.get("what") for event in ledger.events()].count(ReferencePointFixed.what) == 1


def test_a_log_that_lacks_something_does_not(bed: Bed) -> None:
    ledger = bed.ledger()
    driver = asker(bed, ledger)
    first = next_trial(driver, ledger)
    driver.tell(ledger, first.number, running(first))
    next_trial(driver, ledger)
    untold = [event for event in ledger.events() if event.payload.get("what") != Observed.what]
    (line,) = differences(bed, ledger, untold)
    assert line.startswith("trial 1: d128")


def test_a_log_of_another_engine_is_no_log_of_this_one(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = bed.ledger()
    next_trial(asker(bed, ledger), ledger)
    monkeypatch.setattr(Moody, "engine", "moody/2")
    with pytest.raises(InvalidInput, match="an engine without a name; here is moody/2"):
        differences(bed, ledger)


def test_what_comes_while_it_is_asked_is_told_and_logged_afterwards(bed: Bed) -> None:
    ledger = bed.ledger()
    driver = asker(bed, ledger)
    first = next_trial(driver, ledger)
    Moody.gate.clear()

    async def go() -> None:
        asking = asyncio.create_task(driver.next(ledger))
        await asyncio.sleep(0.05)
        driver.tell(ledger, first.number, running(first))
        driver.fix_reference_point(ledger, POINT_OF_TINY)
        Moody.gate.set()
        await asking

    asyncio.run(go())
    assert Moody.knowledge[-1] == (0, False)
    kinds = [(event.kind, event.payload.get("what")) for event in ledger.events()]
    position = max(i for i, (kind, _) in enumerate(kinds) if kind is EventKind.PROPOSED)
    assert kinds.index((EventKind.PROGRESS, Observed.what)) > position
    assert kinds.index((EventKind.STUDY, ReferencePointFixed.what)) > position
    next_trial(driver, ledger)
    assert Moody.knowledge[-1] == (1, True)
    assert differences(bed, ledger) == []


def test_a_trial_that_has_come_to_its_end_is_not_pending_again(bed: Bed) -> None:
    ledger = bed.ledger()
    driver = asker(bed, ledger)
    trial = next_trial(driver, ledger)
    end = replace(running(trial), status="complete")
    driver.tell(ledger, trial.number, end)
    resumed = asker(bed, ledger)
    for observation in (running(trial, 0.2), end):
        resumed.tell(ledger, trial.number, observation)
    assert [note.observation.status for note in notes(ledger.events(), Observed)] == ["complete"]
    resumed.tell(ledger, trial.number, replace(running(trial), status="withdrawn"))
    resumed.tell(ledger, trial.number, running(trial, 0.2))
    assert notes(ledger.events(), Observed)[-1].observation.status == "running", "it is tried again"


def test_a_later_process_goes_on_where_the_log_ends(bed: Bed) -> None:
    def half(ledger: Ledger, driver: ProposalDriver) -> None:
        trial = next_trial(driver, ledger)
        driver.tell(ledger, trial.number, running(trial))
        driver.fix_reference_point(ledger, POINT_OF_TINY)

    ledger = bed.ledger()
    half(ledger, asker(bed, ledger))
    ledger = bed.ledger()
    half(ledger, asker(bed, ledger))
    next_trial(asker(bed, ledger), ledger)
    assert Moody.knowledge == [(0, False), (1, True), (2, True)]
    assert differences(bed, ledger) == []


def test_the_same_is_told_once(bed: Bed) -> None:
    ledger = bed.ledger()
    driver = asker(bed, ledger)
    trial = next_trial(driver, ledger)
    for latency in (0.1, 0.2, 0.1):
        driver.tell(ledger, trial.number, running(trial, latency))
    assert [event.payload.get("what") for event in ledger.events()].count(Observed.what) == 2


def test_a_withdrawn_proposal_is_not_pending_and_is_told_again_if_it_runs_after_all(bed: Bed) -> None:
    ledger = bed.ledger()
    driver = asker(bed, ledger)
    trial = next_trial(driver, ledger)
    driver.tell(ledger, trial.number, running(trial))
    layout = Layout.from_json(trial.layout)
    withdrawn = Observation(layout, "withdrawn", {"latency": 0.1})
    for _ in range(2):
        driver.tell(ledger, trial.number, withdrawn)
    search = driver._proposer
    assert isinstance(search, Moody)
    assert (search.log.pending(), search.log.sorted_observations()) == ([], [withdrawn])
    next_trial(driver, ledger)
    ledger = bed.ledger()
    later = asker(bed, ledger)
    later.tell(ledger, trial.number, running(trial))
    assert [event.payload.get("what") for event in ledger.events()].count(Observed.what) == 3
    next_trial(later, ledger)
    assert differences(bed, ledger) == []


def test_an_exhausted_space_is_no_error(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moody, "ask", lambda self, count: [])
    ledger = bed.ledger()
    driver = asker(bed, ledger)
    assert asyncio.run(driver.next(ledger)) is None
    assert ledger.trials() == []


def test_parents_are_told_by_their_trial_numbers(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = bed.ledger()
    reference = ledger.propose(Layout.parse("d128 v256 ffn=swiglu:320 [C3 A2/1 C3]"), "reference")
    child = Layout.parse("d128 v256 ffn=swiglu:320 [A2/1 C3]")

    def propose(self: Moody, rng: Rng) -> tuple[Layout, str, tuple[str, ...]]:
        return child, "drop", (reference.layout_id, "0" * 64)

    monkeypatch.setattr(Moody, "propose", propose)
    trial = next_trial(asker(bed, ledger), ledger)
    assert (trial.parents, trial.operator, trial.origin) == ((reference.number,), "drop", "proposal")
    record: Mapping[str, Any] = trial.record or {}
    assert record["operator"] == "drop"
