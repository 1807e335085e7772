"""A package of its own adds two block kinds, from the layout's text to the page, and touches no file of ours."""

from __future__ import annotations

from pathlib import Path

from tests.plugin import run_with_plugin


def test_blocks_of_another_distribution(tmp_path: Path) -> None:
    run_with_plugin("checks.py", tmp_path, 500)
