"""The examples in the docstrings that an extender of the search reads."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from nas.search.proposers import api, promotion, sampling, state


@pytest.mark.parametrize("module", [api, promotion, sampling, state], ids=lambda module: str(module.__name__))
def test_examples_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0
