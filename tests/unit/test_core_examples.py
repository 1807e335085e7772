"""Examples in the docstrings that extenders read."""

from __future__ import annotations

import doctest
import importlib

import pytest

from nas.core.block import BLOCKS
from nas.core.task import TASKS


@pytest.mark.parametrize("module", ["block", "layout", "metrics", "registry", "task"])
def test_examples_give_what_they_say(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (BLOCKS, TASKS):
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    result = doctest.testmod(importlib.import_module(f"nas.core.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
