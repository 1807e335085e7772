"""Scores of a library in a search space: what they say of a layout, and mistakes with file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.replacement import LibraryScores, Slot, assembled
from nas.core.space import SearchSpace
from nas.infra.store.store import Store
from nas.model.nn.model import Model
from nas.model.text.corpus import refer_scores
from nas.search.proxy.ladder import proxy_of, rung_jobs
from nas.search.spaces import load_space
from nas.serve.api.submissions import check_space

MODEL = "d64 v320 ffn=swiglu:128 [A4/4:16*2 C3]"
MIX = "d64 v320 ffn=swiglu:128 [A4/2:16 A4/4:16+swiglu:64 C3]"
SPACE = f"""\
v: 1
name: mixes
layouts:
  - {MIX}
  - d64 v320 ffn=swiglu:128 [A4/4:16 A4/4:16+swiglu:64 C3]
runtimes:
  - {{name: llama.cpp, quantisation: q4_0}}
workloads:
  chat: {{prompt: 64, gen: 16}}
objectives:
  - {{name: quality, metric: quality}}
  - {{name: latency, metric: latency, workload: chat}}
references:
  published: {MODEL}
  attention: d64 v320 ffn=swiglu:128 [A4/2:16 A4/4:16 C3]
quality:
  from: library
  path: scores.json
  sum_sd: 0.01
  part_sd: 0.02
  mixes: 12
"""


def scored(depth: int, part: str, block: str, *, text: float, recall: float) -> dict[str, Any]:
    trained = block != "-"
    return {
        "depth": depth, "part": part, "block": block, "kl": {"lm/library": text, "lm/recall": recall},
        "key": "a" * 64 if trained else None, "sha256": "b" * 64 if trained else None,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    blocks = [
        scored(0, "mixer", "A4/2", text=0.1, recall=0.4),
        scored(1, "ffn", "swiglu:64", text=0.2, recall=0.1),
        scored(1, "ffn", "-", text=0.7, recall=0.0),
    ]
    scores = {"layout": MODEL, "teacher": "/t", "teacher_sha256": "0" * 64, "library": "/l",
              "v": 2, "uniform": {"lm/library": 2.0, "lm/recall": 4.0},
              "text": "text.safetensors", "text_sha256": "0" * 64, "blocks": blocks}  # fmt: skip
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    return tmp_path


def mistakes(folder: Path, old: str, new: str) -> list[str]:
    assert old in SPACE
    path = folder / "mine.yaml"
    path.write_text(SPACE.replace(old, new))
    with pytest.raises(InvalidInput) as caught:
        load_space(path)
    return [line.removeprefix(f"{folder}/") for line in str(caught.value).splitlines()]


def line_of(text: str) -> int:
    return SPACE[: SPACE.index(text)].count("\n") + 1


def test_a_reader_of_keys_and_values_needs_the_block_of_the_model(folder: Path) -> None:
    path = folder / "scores.json"
    scores = json.loads(path.read_bytes())
    scores["blocks"] += [
        scored(0, "mixer", "A4/4(canon=3)", text=0.1, recall=0.1),
        scored(1, "mixer", "A4/4(kv=0)", text=0.1, recall=0.1),
    ]
    path.write_text(json.dumps(scores))
    library = LibraryScores.read(path)
    replacements = library.choice(Layout.parse("d64 v320 ffn=swiglu:128 [A4/4:16 A4/4:16(kv=0) C3]"))
    assert [replacement.block for replacement in replacements.values()] == ["A4/4(kv=0)"]
    with pytest.raises(InvalidInput, match="layer 1 reads keys and values of layer 0, whose mixer is replaced"):
        library.choice(Layout.parse("d64 v320 ffn=swiglu:128 [A4/4:16(canon=3) A4/4:16(kv=0) C3]"))


@pytest.mark.parametrize("norms", ["before", "behind", "both"])
def test_a_mix_keeps_all_norms_of_its_layers(norms: str) -> None:
    layout = Layout.parse(MODEL.replace("v320", f"v320 norms={norms}"))
    weights = Model(layout, seed=1).state_dict()
    child, state = assembled(layout, weights, {Slot(0, "mixer"): None, Slot(0, "ffn"): None}, {})
    assert state.keys() == Model(child, None).state_dict().keys()
    behind = [name for name in state if "_out_norm." in name]
    assert (behind == []) is (norms == "before")
    for name in behind:
        assert state[name] is weights[name.replace("layers.1.", "layers.2.").replace("layers.0.", "layers.1.")]


@pytest.mark.parametrize(("part", "problem"), [("norms=both", "norms is both"), ("softcap=9", "softcap is 9.0")])
def test_layouts_with_other_norms_or_bounds_are_no_mixes(folder: Path, part: str, problem: str) -> None:
    scores = LibraryScores.read(folder / "scores.json")
    with pytest.raises(InvalidInput, match=f"{problem}, of the library's model "):
        scores.choice(Layout.parse(MIX.replace("v320", f"v320 {part}")))


def test_scores_of_replaced_blocks_add_up(folder: Path) -> None:
    scores = LibraryScores.read(folder / "scores.json")
    replacements = scores.choice(Layout.parse(MIX))
    assert {slot: replacement.block for slot, replacement in replacements.items()} == {
        Slot(0, "mixer"): "A4/2",
        Slot(1, "ffn"): "swiglu:64",
    }
    assert scores.scores(Layout.parse(MIX)) == pytest.approx({"lm/library": 2.0 - 0.3, "lm/recall": 4.0 - 0.5})
    assert scores.scores(Layout.parse(MODEL)) == {"lm/library": 2.0, "lm/recall": 4.0}
    without = scores.scores(Layout.parse("d64 v320 ffn=swiglu:128 [A4/4:16 A4/4:16+none C3]"))
    assert without == pytest.approx({"lm/library": 1.3, "lm/recall": 4.0})
    assert scores.quality(without) == pytest.approx((1.3 / 2 + 1) / 2)


def test_terms_of_pairs_are_part_of_the_sum(folder: Path) -> None:
    pair = {"blocks": [[0, "mixer", "A4/2"], [1, "ffn", "swiglu:64"]], "kl": {"lm/library": 0.25, "lm/recall": -0.1}}
    path = folder / "scores.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pairs": [pair]}))
    scores = LibraryScores.read(path)
    assert scores.scores(Layout.parse(MIX)) == pytest.approx({"lm/library": 2.0 - 0.55, "lm/recall": 4.0 - 0.4})
    one = scores.scores(Layout.parse("d64 v320 ffn=swiglu:128 [A4/2:16 A4/4:16 C3]"))
    assert one == pytest.approx({"lm/library": 1.9, "lm/recall": 3.6}), "one of the two has no term"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"uniform": {"lm/library": 2.0, "lm/other": 1.0}}, "a score is of no lm/other"),
        ({"uniform": {}}, "uniform has no group that counts"),
    ],
)
def test_scores_of_other_groups_are_refused(folder: Path, more: dict[str, Any], why: str) -> None:
    path = folder / "scores.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    with pytest.raises(InvalidInput, match="is no file of scores"):
        LibraryScores.read(path)
    with pytest.raises(ValidationError, match=why):
        LibraryScores.model_validate_json(path.read_bytes())


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("d64 v320 ffn=swiglu:128 [A4/1:16 A4/4:16 C3]", "layer 0: the library has no A4/1 as mixer.*: A4/2"),
        ("d64 v320 ffn=swiglu:128 [A4/4:16*2 C5]", "layer 2: the library has no C5 as mixer.*: none"),
        ("d64 v320 ffn=swiglu:128 [A4/4:16*2]", "depth is 2, of the library's model 3"),
        ("d96 v320 ffn=swiglu:128 [A4/4:16*2 C3]", "d_model is 96"),
    ],
)
def test_a_layout_that_the_library_cannot_make_is_refused(folder: Path, layout: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        LibraryScores.read(folder / "scores.json").choice(Layout.parse(layout))


def test_a_space_has_the_rungs_of_a_library_and_survives_storage(folder: Path) -> None:
    (folder / "mine.yaml").write_text(SPACE)
    space = load_space(folder / "mine.yaml")
    assert [rung.name for rung in space.quality.rungs] == ["sum", "assembled"]
    assert SearchSpace.model_validate_json(space.model_dump_json()) == space
    assert space.quality.spread(0) == (0.01, 12.0)
    assert space.quality.spread(1) == (0.02, 12.0)
    assert space.quality.library is not None
    scores, mix = refer_scores(space.quality.library, folder), Layout.parse(MIX)
    jobs = [rung_jobs(space.quality, rung, mix, scores) for rung in (0, 1)]
    assert [len(batch) for batch in jobs] == [1, 4]
    assert len({job.key for batch in jobs for job in batch}) == 5
    assert {job.seeds_key for job in jobs[1]} == {jobs[1][0].seeds_key}
    assert proxy_of(mix, space.quality) == mix, "nothing is narrowed"
    (folder / "scores.json").write_text((folder / "scores.json").read_text() + " ")
    other = rung_jobs(space.quality, 0, mix, refer_scores(space.quality.library, folder))[0]
    assert other.key != jobs[0][0].key, "other scores have other results"


@pytest.mark.parametrize(
    ("old", "new", "place", "why"),
    [
        ("  mixes: 12", "  mixes: 12\n  anchors: {}", "  mixes: 12\n", "quality.anchors: is of trainings"),
        ("  mixes: 12", "  mixes: 12\n  rungs: []", "  mixes: 12\n", "quality.rungs: is of trainings"),
        ("  from: library", "  from: hub", "  from: library", "quality.from: must be 'library'"),
        ("  part_sd: 0.02", "  part_sd: 0", "  part_sd: 0.02", "quality.part_sd: "),
        ("  path: scores.json", "  path: none.json", "  path: scores.json", "No such file.*--write-space"),
        ("  path: scores.json", "  path: mine.yaml", "  path: scores.json", "is no file of scores"),
        (f"  - {MIX}", "  - d64 v320 ffn=swiglu:128 [C3*3]", f"  - {MIX}", "layouts.0: layer 0: the library has no C3"),
        (f"  published: {MODEL}", f"  published: {MIX}", "  published", "references.published: must be the library's"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_line(folder: Path, old: str, new: str, place: str, why: str) -> None:
    (message,) = mistakes(folder, old, new)
    line = line_of(place) + new.count("\n")
    assert message.startswith(f"mine.yaml:{line}: "), message
    assert re.search(why, message), message


def test_a_library_needs_listed_layouts(folder: Path) -> None:
    listed = SPACE[SPACE.index("layouts:") : SPACE.index("runtimes:")]
    free = """\
model: {d_model: 64, depth: 3, vocab: 320}
mixers: {conv: {kernel: 3}}
ffn: {swiglu: {width: 128}}
"""
    (message,) = mistakes(folder, listed, free)
    assert "give `layouts`" in message
    assert "quality.from" in message


def test_rungs_of_a_library_are_not_mixed_with_trainings(folder: Path) -> None:
    start = SPACE.index("quality:\n  from")
    rungs = "quality:\n  rungs:\n    - {name: sum, library: sum}\n"
    (message,) = mistakes(folder, SPACE[start:], rungs)
    assert "from: library" in message


def test_a_submitted_study_names_no_library_of_the_coordinator(folder: Path, tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'own.db'}", artifacts=tmp_path / "artifacts")
    try:
        with pytest.raises(InvalidInput, match=r"space.yaml:\d+: quality.from: a submitted study cannot name files"):
            check_space(store, SPACE)
    finally:
        store.close()
