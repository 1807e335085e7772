"""Every built-in proposer keeps the contract."""

from __future__ import annotations

import pytest

from nas.search.proposers import PROPOSERS, ProposerFactory
from nas.testing.proposer_contract import ProposerContract


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
