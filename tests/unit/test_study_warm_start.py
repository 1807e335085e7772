"""A new study learns from earlier ones what means the same in both, and learns it again when it is resumed."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_support import CHAT, TINY, Bed, bed_of, tiny_space

from nas.core.errors import InvalidInput, UnknownName
from nas.core.space import SearchSpace
from nas.core.trial import Event, EventKind
from nas.infra.store import studies, trials
from nas.search.analysis.report import study_report
from nas.search.proposers import Observation, Proposer, Sampler, make_proposer
from nas.search.study.check import support_filter
from nas.search.study.events import CorpusUsed, WarmStarted, all_events
from nas.search.study.ledger import Ledger
from nas.search.study.proposals import BoundSpace, SharedNames, replay, require_studies, warm_start

ANYWHERE = {"local": "box"}


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return bed_of(tmp_path)


def begin(bed: Bed, *names: str, name: str = "second") -> tuple[Ledger, list[str]]:
    """A study that learns from `names` before it runs, and its messages."""
    ledger, messages = bed.ledger(name=name), list[str]()
    warm_start(ledger, bed.space, support_filter(bed.space), names, messages.append)
    return ledger, messages


def earlier(ledger: Ledger) -> list[Observation]:
    (event,) = [event for event in ledger.events() if event.payload.get("what") == WarmStarted.what]
    return [Observation.from_json(record) for record in event.payload["observations"]]


def test_the_same_space_takes_all_that_ended(bed: Bed) -> None:
    bed.run(6)
    ledger, messages = begin(bed, "study")
    observations = earlier(ledger)
    assert len(observations) == 7 and all(observation.status != "running" for observation in observations)
    objectives = {
        tuple(sorted(observation.objectives)) for observation in observations if observation.status == "complete"
    }
    assert objectives == {("latency", "memory", "quality")}
    assert "study: 7 layouts with latency, memory, quality, decode_p50@chat on local/fake" in messages[0]
    assert "1 outside this space" in messages[0]  # the attention-only reference
    begin(bed, "study")  # resumed before its first proposal
    assert len(earlier(ledger)) == 7
    (row,) = study_report(bed.store, "second")["warm_start"]
    assert (row["study"], row["layouts"], row["not_comparable"]) == ("study", 7, [])


def test_a_study_that_learnt_is_resumed_and_replayed(bed: Bed) -> None:
    bed.run(4)
    ledger, _ = begin(bed, "study")

    async def go(count: int) -> Proposer:
        orchestrator = bed.orchestrator(bed.ledger(name="second"), count)
        await orchestrator.run()
        return orchestrator._proposals._proposer

    for count in (3, 5):
        state = asyncio.run(go(count)).state()
        assert len(state["earlier"]) == 5
    rows, log = trials.all(bed.store, ledger.study.id), all_events(bed.store, ledger.study.id)
    assert len(rows) == 7
    assert replay(bed.space, support_filter(bed.space), rows, log) == []
    cold = make_proposer(Sampler(bed.space, support_filter(bed.space))).state()
    assert cold["earlier"] == []


def shared(old: dict[str, Any], new: dict[str, Any], devices: dict[str, str] | None = None) -> SharedNames:
    spaces = [SearchSpace.model_validate(TINY | changes) for changes in (old, new)]
    return SharedNames.between(BoundSpace(spaces[0], ANYWHERE), BoundSpace(spaces[1], devices or ANYWHERE))


def test_what_means_something_else_is_not_shared() -> None:
    assert set(shared({}, {}).objectives) == {"quality", "latency", "memory"}
    longer = {"workloads": {"chat": {"prompt": 128, "gen": 16}}}
    assert set(shared({}, longer).objectives) == {"quality"} and not shared({}, longer).budgets
    quality = TINY["quality"] | {"proxy_d_model": 64}
    assert set(shared({}, {"quality": quality}).objectives) == {"latency", "memory"}
    elsewhere = shared({}, {}, {"local": "phone"})
    assert set(elsewhere.objectives) == {"quality"} and not elsewhere.budgets
    other = [{"name": "loss", "metric": "quality"}, {"name": "speed", "metric": "decode_p50", **CHAT}]
    assert shared({}, {"objectives": other}).objectives == {"quality": "loss"}


def test_figures_of_another_build_or_corpus_are_not_shared() -> None:
    def bound(build: str, corpus: str) -> BoundSpace:
        calibrated = {"what": "calibrated", "device": "local", "runtime": "fake", "id": "b", "build": build, "ms": 1.0}
        used = {"what": CorpusUsed.what, "hash": corpus * 64, "versions": {}, "made_of": {}}
        return BoundSpace.of(tiny_space(), [Event(EventKind.STUDY, payload, None, 1) for payload in (calibrated, used)])

    def common(build: str, corpus: str) -> tuple[set[str], int]:
        names = SharedNames.between(bound("a", "b"), bound(build, corpus))
        return set(names.objectives), len(names.budgets)

    assert common("a", "b") == ({"quality", "latency", "memory"}, 2)
    assert common("other", "b") == ({"quality"}, 0)
    assert common("a", "c") == ({"latency", "memory"}, 2)


def test_an_excess_is_told_for_the_new_limit() -> None:
    tighter = {"budgets": [{"metric": "peak_rss", "max": "1x", **CHAT}]}
    common, name = shared({}, tighter), "peak_rss@chat on local/fake"
    layout = tiny_space().references.layouts()["attention"]
    fits = Observation(layout, "complete", {"quality": -1.0}, {name: math.log(1.5 / 2)}, 2)
    observation = common.translate(fits)
    assert observation.status == "infeasible" and observation.constraints == {name: pytest.approx(math.log(1.5))}
    back = SharedNames.between(
        BoundSpace(SearchSpace.model_validate(TINY | tighter), ANYWHERE), BoundSpace(tiny_space(), ANYWHERE)
    ).translate(Observation(layout, "infeasible", {}, {name: math.log(1.5)}))
    assert back.status == "stopped" and back.constraints == {name: pytest.approx(math.log(1.5 / 2))}
    absolute = {"budgets": [{"metric": "peak_rss", "max": "100MB", **CHAT}]}
    assert shared({}, absolute).budgets == {}


def test_of_two_budgets_on_a_figure_the_strictest_is_translated() -> None:
    loose, strict = ({"metric": "peak_rss", "max": limit, **CHAT} for limit in ("2x", "1.2x"))
    names = "peak_rss@chat on local/fake", "peak_rss@chat/local on local/fake"
    layout = tiny_space().references.layouts()["attention"]
    for budgets in ([loose, strict | {"device": "local"}], [strict | {"device": "local"}, loose]):
        broken = dict(zip(names, (math.log(1.5 / 2), math.log(1.5 / 1.2)), strict=True))
        observation = shared({"budgets": budgets}, {"budgets": budgets}).translate(
            Observation(layout, "infeasible", {}, broken)
        )
        assert observation.status == "infeasible"
        assert observation.constraints == {names[1]: pytest.approx(broken[names[1]])}


def test_an_excess_of_quality_is_told_for_the_new_limit() -> None:
    was, now = ({"budgets": [{"metric": "quality", "min": limit}]} for limit in ("0.9x", 0.95))
    common, name = shared(was, now), "quality on the proxy"
    layout = tiny_space().references.layouts()["attention"]
    fits = Observation(layout, "complete", {"quality": -0.92}, {name: 0.9 - 0.92}, 2)
    observation = common.translate(fits)
    assert observation.status == "infeasible" and observation.constraints == {name: pytest.approx(0.95 - 0.92)}
    assert common.translate(replace(fits, status="stopped", rung=0)).status == "stopped"
    attention = TINY["references"]["attention"]
    other = {"references": {"published": attention, "attention": TINY["references"]["published"]}}
    assert shared(was, now | other).budgets == {}


def test_layouts_outside_the_new_space_are_left_out_and_said(bed: Bed) -> None:
    bed.run(6)
    bed.space = tiny_space(model=TINY["model"] | {"depth": 3})
    ledger, messages = begin(bed, "study")
    observations = earlier(ledger)
    assert 0 < len(observations) < 8 and {observation.layout.depth for observation in observations} == {3}
    assert f"{8 - len(observations)} outside this space" in messages[0]


def test_a_study_needs_another_one_that_is_there(bed: Bed) -> None:
    bed.ledger()
    with pytest.raises(UnknownName, match="study"):
        require_studies(bed.store, ["studdy"], "second")
    with pytest.raises(InvalidInput, match="itself"):
        require_studies(bed.store, ["study"], "study")
    assert [row.name for row in studies.all(bed.store)] == ["study"]
