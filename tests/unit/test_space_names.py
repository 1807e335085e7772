"""Names of published models in spaces, and what `nas space validate` and a dry run say before a study begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import nas

from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.core.published import MODELS
from nas.measure.runtimes import RUNTIMES
from nas.search.spaces import load_space, space_key, space_text


def with_published(tmp_path: Path, name: str) -> Path:
    file = tmp_path / "named.yaml"
    published = load_space("lfm2").references.published
    lines = space_text("lfm2").splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if line.strip().startswith("published:"))
    assert Layout.parse(published).id == Layout.parse(MODELS["LFM2-350M"]).id
    lines[at] = f"  published: {name}\n"
    file.write_text("".join(lines))
    return file


def test_a_published_name_is_its_layout(tmp_path: Path) -> None:
    space = load_space(str(with_published(tmp_path, "LFM2-350M")))
    assert space_key(space) == space_key(load_space("lfm2").model_copy(update={"name": space.name}))


def test_a_wrong_name_offers_the_nearest(tmp_path: Path) -> None:
    answer = nas("space", "validate", str(with_published(tmp_path, "LFM2-350")))
    assert (answer.code, "did you mean 'LFM2-350M'?" in answer.err) == (3, True), answer.err
    assert len(answer.err.splitlines()) == 1


def test_layouts_of_published_models_are_listed() -> None:
    rows = json.loads(nas("space", "layouts", "--json").out)["layouts"]
    assert {row["name"]: Layout.parse(row["layout"]).id for row in rows} == {
        name: Layout.parse(text).id for name, text in MODELS.items()
    }
    assert "LFM2-8B-A1B" in nas("space", "layouts").out


@pytest.mark.parametrize(
    "command", [("space", "validate", "lfm2-mixed"), ("launch", "--space", "lfm2-mixed", "--dry-run")]
)
def test_a_missing_patched_build_is_said_before_a_study_begins(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def runner(*_: object, patched: bool, **__: object) -> None:
        if patched:
            raise InfrastructureFailed("no patched llama.cpp build: run `nas runtime build llama.cpp --patched`")

    monkeypatch.setattr(type(RUNTIMES["llama.cpp"]), "runner", runner)
    answer = nas(*command)
    assert answer.code == 0, answer.err
    assert "nas runtime build llama.cpp --patched" in answer.err


def test_a_missing_build_stops_a_launch_before_its_study_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runner(*_: object, **__: object) -> None:
        raise InfrastructureFailed("no llama.cpp build")

    monkeypatch.setattr(type(RUNTIMES["llama.cpp"]), "runner", runner)
    db = f"sqlite:///{tmp_path / 'a.db'}"
    answer = nas("launch", "--space", "lfm2", "--study", "first", "--db", db, "--yes")
    assert (answer.code, "no llama.cpp build" in answer.err) == (3, True), answer.err
    assert not (tmp_path / "a.db").exists()


def test_a_space_without_anchors_is_told_so(tmp_path: Path) -> None:
    assert "anchors" in nas("space", "validate", "lfm2-demo").err
    assert "anchors" not in nas("space", "validate", "lfm2").err
