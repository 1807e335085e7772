"""The public face of the search: light to import, and a space's own settings decide."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from nas.core.errors import InvalidInput, UnknownName
from nas.search.proposers import Observation, Proposal, Sampler, make_proposer
from nas.search.proposers.ehvi import EhviSearch
from nas.search.proposers.evolution import RandomSearch
from nas.search.spaces import load_space

SPACE = load_space("lfm2-demo")


def test_import_loads_nothing_heavy() -> None:
    code = "import sys, nas.search.proposers, nas.search.spaces; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint({"torch", "ray", "sqlalchemy", "sklearn", "scipy", "moocore", "optuna"})


def test_space_chooses_proposer_and_seed() -> None:
    chosen = make_proposer(Sampler(SPACE))
    assert isinstance(chosen, EhviSearch) and chosen.log.seed == SPACE.search.seed
    assert isinstance(make_proposer(Sampler(SPACE), "random", seed=7), RandomSearch)
    with pytest.raises(UnknownName, match="did you mean 'ehvi'"):
        make_proposer(Sampler(SPACE), "ehv")


def test_first_proposals_are_the_published_layout_and_heuristics() -> None:
    proposer = make_proposer(Sampler(SPACE))
    published = SPACE.references.layouts()["published"]
    proposals = proposer.ask(SPACE.search.seeds + 1)
    assert proposals[0].layout == published
    assert [proposal.operator for proposal in proposals[:-1]] == ["seed"] * SPACE.search.seeds
    again = make_proposer(Sampler(SPACE))
    again.tell(Observation(published, "complete"))
    assert published.id not in {proposal.layout.id for proposal in again.ask(8)}


def test_json_round_trip() -> None:
    proposal = make_proposer(Sampler(SPACE)).ask(1)[0]
    assert Proposal.from_json(proposal.to_json()) == proposal
    observation = Observation(proposal.layout, "stopped", {"quality": 0.5}, {"ttft@chat": -0.1}, rung=1)
    assert Observation.from_json(observation.to_json()) == observation and "noise" not in observation.to_json()
    noisy = replace(observation, noise={"quality": 0.02})
    assert Observation.from_json(noisy.to_json()) == noisy


def test_what_an_older_version_wrote_is_read() -> None:
    proposal = make_proposer(Sampler(SPACE)).ask(1)[0]
    old = {key: value for key, value in proposal.to_json().items() if key != "engine"}
    assert Proposal.from_json(old) == replace(proposal, engine="")


def test_state_of_another_engine_is_refused() -> None:
    state = make_proposer(Sampler(SPACE), "evolution").state()
    with pytest.raises(InvalidInput, match=r"'evolution/\d'; this is 'ehvi/\d'"):
        make_proposer(Sampler(SPACE), "ehvi").restore(state)


def test_a_log_of_an_older_version_is_continued_by_the_current_one() -> None:
    """As a resumed study does: observations hold for any version, and each proposal says which one made it."""
    first = make_proposer(Sampler(SPACE))
    for proposal in first.ask(2):
        first.tell(Observation(proposal.layout, "failed"))
    state = first.state()
    del state["engine"]
    state["proposals"] = [record | {"engine": "ehvi/3"} for record in state["proposals"]]
    again = make_proposer(Sampler(SPACE))
    again.restore(state)
    (third,) = again.ask(1)
    assert [record["engine"] for record in again.state()["proposals"]] == ["ehvi/3"] * 2 + [third.engine]
    assert third.engine != "ehvi/3" and third.number == 2


def test_noise_that_is_no_number_is_refused() -> None:
    layout = make_proposer(Sampler(SPACE)).ask(1)[0].layout
    with pytest.raises(InvalidInput, match="noise of 'quality'"):
        make_proposer(Sampler(SPACE)).tell(Observation(layout, "complete", noise={"quality": float("nan")}))
