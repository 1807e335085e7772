"""What became of each kind of block in an archived study, on the dashboard's page and on the documentation's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from live_lab import LiveLab
from test_dashboard_access import HTML, OPEN, client
from test_dashboard_pages import LOOPBACK

from benchmarks.front import of_archive
from benchmarks.quality.studies import FOLDER, read
from nas.serve.views.study import KindView

PAGE = Path(__file__).resolve().parents[2] / "docs/measured/fronts.md"
DROPPED = {"gdn", "gla", "mlstm"}


@pytest.fixture(scope="module")
def visitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Reads a server with the study of all kinds of mixers, imported as `nas study import` does."""
    lab = LiveLab(tmp_path_factory.mktemp("archive"))
    read(FOLDER / "lfm2-full.jsonl.gz", lab.store)
    with client(lab, OPEN, LOOPBACK) as visitor:
        yield visitor


@pytest.fixture(scope="module")
def kinds(visitor: TestClient) -> dict[str, KindView]:
    page: Any = visitor.get("/studies/lfm2-full.json").json()
    return {kind["kind"]: KindView.model_validate(kind) for kind in page["kinds"]}


def test_the_page_says_which_kinds_are_not_on_the_front(visitor: TestClient, kinds: dict[str, KindView]) -> None:
    answer = visitor.get("/studies/lfm2-full", headers=HTML)
    assert answer.status_code == 200
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", answer.text))
    match = re.search(r"Not on the front: ([\w, ]+)\.", text)
    assert match is not None
    assert set(match[1].split(", ")) == DROPPED == {kind for kind, view in kinds.items() if not view.front}
    assert "share of the proposed layouts (initial seeds excluded) and of random layouts" in text
    gdn = kinds["gdn"]
    assert gdn.chosen is not None and gdn.drawn is not None
    assert f"{100 * gdn.chosen:.0f} % {100 * gdn.drawn:.0f} %" in text


def test_the_search_has_fewer_of_the_kinds_that_it_dropped_than_random_layouts(kinds: dict[str, KindView]) -> None:
    shares = {kind: view.chosen / view.drawn for kind, view in kinds.items() if view.chosen and view.drawn}
    assert all(shares[kind] < 0.25 for kind in DROPPED)
    assert shares["conv"] > 0.75


@pytest.mark.parametrize("archive", ["lfm2-study", "lfm2", "lfm2-full"])
def test_the_page_is_what_the_command_writes(archive: str) -> None:
    name, written = of_archive(FOLDER / f"{archive}.jsonl.gz")
    assert f"<!-- {name} -->\n{written}<!-- end -->" in PAGE.read_text(encoding="utf-8")
