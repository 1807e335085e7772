"""Every built-in proposer keeps the contract.

By default one of each implementation: the three of Optuna share one adapter, and each also has a search of its own in
tests/unit/test_search_optuna.py.
"""

from __future__ import annotations

import pytest

from nas.core.space import SearchSpace
from nas.search.proposers import PROPOSERS, ProposerFactory
from nas.testing.proposer_contract import ProposerContract
from nas.testing.synthetic import SyntheticProblem, synthetic_space


class TestRandomSearch(ProposerContract):
    @pytest.fixture
    def factory(self) -> ProposerFactory:
        return PROPOSERS["random"]


class TestEvolution(ProposerContract):
    @pytest.fixture
    def factory(self) -> ProposerFactory:
        return PROPOSERS["evolution"]


class TestEhviSearch(ProposerContract):
    @pytest.fixture
    def factory(self) -> ProposerFactory:
        return PROPOSERS["ehvi"]


class TestCacheEvolution(ProposerContract):
    @pytest.fixture
    def factory(self) -> ProposerFactory:
        return PROPOSERS["cache-evolution"]


@pytest.mark.exhaustive
class TestOptunaNsga2(ProposerContract):
    @pytest.fixture
    def factory(self) -> ProposerFactory:
        return PROPOSERS["optuna-nsga2"]


class TestOptunaTpe(ProposerContract):
    rounds = 7  # past the ten random ones that it starts with

    @pytest.fixture
    def factory(self) -> ProposerFactory:
        return PROPOSERS["optuna-tpe"]


@pytest.mark.exhaustive
class TestOptunaGp(ProposerContract):
    """On two layers: its proposals take a second even there, so the model comes in behind each short search only."""

    rounds = 5

    @pytest.fixture
    def problem(self) -> SyntheticProblem:
        data = synthetic_space(self.pool, seeds=4).model_dump()
        data["model"] |= {"d_model": 512, "leading_dense": 0, "depth": 2, "params": {"total": {"max": "40M"}}}
        data["ffn"] = {"swiglu": {"width": {"choices": [768, 1152, 1536, 2048], "scope": "layer"}}}
        return SyntheticProblem(1, space=SearchSpace.model_validate(data))

    @pytest.fixture
    def factory(self) -> ProposerFactory:
        return PROPOSERS["optuna-gp"]
