"""The citation file names the version and license of the package."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    assert cited["cff-version"] == "1.2.0" and cited["authors"]
