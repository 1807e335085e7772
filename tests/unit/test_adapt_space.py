"""`nas adapt --write-space`: a space of mixes, and the evaluation of mixes by sums and by assembling."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_lab import LAYOUT, RECALLING, adaptation, alone, write_lab
from safetensors.torch import load_file

from nas.core.block import Block
from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput
from nas.core.layout import Layout
from nas.core.replacement import RECALL_GROUP, RECALLABLE_GROUP, TEXT_GROUP, LibraryScores, Slot, with_blocks
from nas.core.space import SearchSpace
from nas.measure.runtimes import RUNTIMES
from nas.model.nn.mixes import compared
from nas.model.nn.model import Model
from nas.model.nn.weights import load_weights
from nas.model.text.corpus import refer_scores
from nas.search.proxy import mixes
from nas.search.proxy.job import TrainResult, weights_file
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.mixes import assembled_mix, evaluate_mix, trained_model
from nas.search.proxy.quality import fix_scale
from nas.search.spaces import load_space
from nas.testing.fake_runtime import FakeRuntime
from nas.train.adapt import space
from nas.train.adapt.adapt import Adaptation
from nas.train.adapt.library import Score
from nas.train.adapt.space import write_space

CPU = torch.device("cpu")


@dataclass
class Written:
    """A library and the space that was written for it."""

    one: Adaptation
    path: Path
    space: SearchSpace
    scores: LibraryScores

    def evaluated(self, layout: Layout, rung: int, folder: Path) -> list[TrainResult | CandidateFailed]:
        assert self.space.quality.library is not None
        jobs = rung_jobs(self.space.quality, rung, layout, refer_scores(self.space.quality.library, self.path.parent))
        return evaluate_mix(jobs, yield_hook=lambda: None, checkpoint_dir=folder, device="cpu", log=lambda line: None)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("space")
    RUNTIMES.add("fake", FakeRuntime(folder / "runners"))
    lab = write_lab(folder / "lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAS_CACHE", str(folder / "cache"))
        one = adaptation(
            lab,
            folder / "out",
            folder / "library",
            alone(),
            device="local",
            runtime="fake",
            prompt=64,
            gen=16,
            settings=RECALLING,
            write_space=folder / "mixes.yaml",
            mixes=8,
        )
        write_space(one)
    path = folder / "mixes.yaml"
    return Written(one, path, load_space(path), LibraryScores.read(folder / "mixes-scores.json"))


def scores_of(results: list[TrainResult | CandidateFailed]) -> list[float]:
    assert not any(isinstance(result, CandidateFailed) for result in results), results
    return [result.scores[TEXT_GROUP] for result in results if isinstance(result, TrainResult)]


def test_the_space_lists_mixes_and_its_references(written: Written) -> None:
    search_space = written.space
    assert len(search_space.layouts) == 7
    assert Layout.parse(search_space.references.published) == LAYOUT
    assert all(written.scores.choice(layout) for layout in search_space.listed())
    assert [budget.name for budget in search_space.budgets] == ["decode_p50@chat"]
    assert [objective.metric for objective in search_space.objectives] == ["quality", "decode_p50"]


def test_the_best_mixes_by_the_sum_are_listed(written: Written) -> None:
    """A brute-force search over mixes of equal depth finds no better one of as few numbers."""
    one, scores = written.one, written.scores
    listed = {layout.id for layout in (*written.space.listed(), Layout.parse(written.space.references.attention))}
    best_two = list(space._best(one, one.alternatives, scores, 2))
    assert len(best_two) == 2
    for layout in best_two:
        assert layout.id in listed or scores.quality(scores.scores(layout)) < 0.5
    few = {
        slot: tuple(
            block for block in blocks
            if block is None or block.kind in ("conv", "gqa") or block.format() in ("swiglu:32", "swiglu:64")
        )
        for slot, blocks in one.alternatives.items()
    }  # fmt: skip
    layouts = list(space._best(one, few, scores, 5))
    assert len(layouts) == 5 and {layout.depth for layout in layouts} == {LAYOUT.depth}
    every = []
    for blocks in product(*((slot.block(LAYOUT), *alternatives) for slot, alternatives in few.items())):
        replaced = {slot: block for slot, block in zip(few, blocks, strict=True) if block != slot.block(LAYOUT)}
        try:
            layout = with_blocks(LAYOUT, replaced)[0]
        except InvalidInput:
            continue
        if layout.depth == LAYOUT.depth:
            every.append((numbers(layout), scores.quality(scores.scores(layout))))
    for layout in layouts:
        best = max(quality for size, quality in every if size <= numbers(layout))
        assert scores.quality(scores.scores(layout)) == pytest.approx(best)


def numbers(layout: Layout) -> float:
    return sum(space._numbers(block, layout.d_model, 80) for layer in layout.layers for block in layer.blocks)


def test_a_reader_reads_as_much_cache_as_its_lender() -> None:
    blocks = [Block.parse(text, "mixer") for text in ("A4/4:16", "A4/4:16(kv=0)")]
    assert [space._numbers(block, 64, 80) - block.spec.count(block, 64).active for block in blocks] == [2 * 64 * 80] * 2


def test_writing_again_writes_the_same(written: Written) -> None:
    files = [written.path.with_name(f"mixes{end}") for end in (".yaml", "-scores.json", "-text.safetensors")]
    before = [path.read_bytes() for path in files]
    write_space(written.one)
    assert [path.read_bytes() for path in files] == before


def test_alternatives_whose_scores_are_not_finite_are_left_out(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, slot = written.one.library, Slot(0, "ffn")
    blocks = tuple(Block.parse(name, "ffn") for name in ("swiglu:96", "swiglu:64"))
    scores = {(slot, block): Score({TEXT_GROUP: kl}, (kl,)) for block, kl in zip(blocks, (math.nan, 0.1), strict=True)}
    monkeypatch.setattr(library, "scores", lambda alternatives: scores)
    assert space._with_finite_scores(library, {slot: blocks}) == {slot: blocks[1:]}


@pytest.mark.parametrize(("count", "most", "last"), [(8, 8, 7), (13, 12, 11), (23, 12, 21), (35, 12, 32), (48, 12, 44)])
def test_assembled_mixes_are_from_the_worst_to_the_best(
    count: int, most: int, last: int, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled: list[int] = []
    monkeypatch.setattr(space, "_quality", lambda scores, layout: layout)
    monkeypatch.setattr(space, "assembled_mix", lambda scores, model, layout: assembled.append(layout))
    monkeypatch.setattr(space, "_qualities", lambda *arguments: dict.fromkeys(range(4), 0.5))
    listed: Any = range(count)
    assert space._deviations(written.one, written.scores, listed)[2] == most
    assert len(set(assembled)) == most and (assembled[0], assembled[-1]) == (0, last)


def test_without_alternatives_the_model_itself_is_drawn(written: Written) -> None:
    scores = written.scores.model_copy(update={"blocks": ()})
    assert list(space._drawn(written.one, {}, scores, 2)) == [LAYOUT, LAYOUT]


def test_an_assembled_mix_has_the_divergence_that_the_library_computes(written: Written, tmp_path: Path) -> None:
    for layout in written.space.listed()[:3]:
        evaluated = written.evaluated(layout, 1, tmp_path)
        parts = scores_of(evaluated)
        assert len(parts) == 4
        losses = [result.losses[TEXT_GROUP] for result in evaluated if isinstance(result, TrainResult)]
        model = assembled_mix(written.scores, trained_model(written.scores, CPU), layout)
        expected = written.scores.uniform[TEXT_GROUP] - written.one.library.divergence(model)
        assert sum(parts) / 4 == pytest.approx(expected, abs=1e-5)
        assert sum(losses) / 4 == pytest.approx(written.one.library.divergence(model), abs=1e-5)
        assert min(losses) >= 0, "divergences of parts of the text"
        (summed,) = scores_of(written.evaluated(layout, 0, tmp_path))
        assert summed == pytest.approx(written.scores.scores(layout)[TEXT_GROUP])


def test_one_replacement_assembled_has_the_score_of_its_block(written: Written, tmp_path: Path) -> None:
    narrow = Layout.parse("d64 v320 ffn=swiglu:128 [A4/4:16+swiglu:64 A4/4:16 C3]")
    (summed,) = scores_of(written.evaluated(narrow, 0, tmp_path))
    assert sum(scores_of(written.evaluated(narrow, 1, tmp_path))) / 4 == pytest.approx(summed, abs=1e-4)
    assert summed < written.scores.uniform[TEXT_GROUP]


def test_the_trained_model_loses_nothing(written: Written, tmp_path: Path) -> None:
    (summed,) = scores_of(written.evaluated(LAYOUT, 0, tmp_path))
    parts = scores_of(written.evaluated(LAYOUT, 1, tmp_path))
    assert summed == written.scores.uniform[TEXT_GROUP] == pytest.approx(sum(parts) / 4)


def test_a_mix_without_finite_scores_fails(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*options: Any) -> Any:
        comparison = compared(*options)
        return comparison._replace(kl=comparison.kl * math.nan)

    monkeypatch.setattr(mixes, "compared", broken)
    for outcome in written.evaluated(LAYOUT, 1, tmp_path):
        assert isinstance(outcome, CandidateFailed) and outcome.reason == "not_finite"


def test_the_last_part_leaves_the_weights_for_the_check_of_the_export(written: Written, tmp_path: Path) -> None:
    layout = written.space.listed()[0]
    results = [result for result in written.evaluated(layout, 1, tmp_path) if isinstance(result, TrainResult)]
    assert [bool(result.weights_sha256) for result in results] == [False, False, False, True]
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"weights.safetensors"}
    model = assembled_mix(written.scores, trained_model(written.scores, CPU), layout)
    with pytest.raises(InvalidInput, match="names no layout"):  # as trained proxies': the job says the layout
        load_weights(Model(layout, None), weights_file(tmp_path, results[-1].key))
    tensors = load_file(weights_file(tmp_path, results[-1].key))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


def test_recall_has_a_score_of_its_own(written: Written, tmp_path: Path) -> None:
    """Its group is what `quality.recall` reads; recallable positions of the text are a part, which counts nowhere."""
    layout = written.space.listed()[0]
    library, kl = written.one.library, written.scores.uniform
    assert {TEXT_GROUP, RECALL_GROUP} <= kl.keys() <= {TEXT_GROUP, RECALL_GROUP, RECALLABLE_GROUP}
    text = library.text.means(
        compared(library.teacher.model, assembled_mix(written.scores, library.teacher.model, layout), library.text).kl
    )
    results = [result for result in written.evaluated(layout, 1, tmp_path) if isinstance(result, TrainResult)]
    per_part = [result.losses[RECALL_GROUP] for result in results]
    counts = [int(library.text.part(part, 4).groups[RECALL_GROUP].sum()) for part in range(4)]
    whole = sum(a * b for a, b in zip(per_part, counts, strict=True)) / sum(counts)
    assert whole == pytest.approx(text[RECALL_GROUP], abs=1e-5)
    (summed,) = [result for result in written.evaluated(layout, 0, tmp_path) if isinstance(result, TrainResult)]
    assert summed.scores == pytest.approx(written.scores.scores(layout))
    scale = fix_scale("assembled", {number: run.scores for number, run in enumerate(results)}, minimum=0.0)
    assert set(scale.reference) == {TEXT_GROUP, RECALL_GROUP}
    quality = scale.quality({number: run.scores for number, run in enumerate(results)})
    assert quality.recall == pytest.approx(1.0)


def test_a_layout_of_another_library_is_not_evaluated(written: Written, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="the library has no swiglu:160"):
        written.evaluated(Layout.parse("d64 v320 ffn=swiglu:160 [A4/4:16*2 C3]"), 0, tmp_path)


def test_a_missing_block_and_changed_scores_are_no_fault_of_the_candidate(written: Written, tmp_path: Path) -> None:
    narrow = Layout.parse("d64 v320 ffn=swiglu:128 [A4/4:16+swiglu:64 A4/4:16 C3]")
    (block,) = written.scores.choice(narrow).values()
    path = Path(written.scores.library) / "blocks" / f"{block.key}.safetensors"
    moved = path.rename(tmp_path / "block")
    try:
        with pytest.raises(InfrastructureFailed, match=r"No such file.*--write-space"):
            written.evaluated(narrow, 1, tmp_path)
        path.write_bytes(b"other")
        with pytest.raises(InfrastructureFailed, match="is not what the scores were computed with"):
            written.evaluated(narrow, 1, tmp_path)
    finally:
        moved.rename(path)
    assert written.space.quality.library is not None
    jobs = rung_jobs(written.space.quality, 0, narrow, refer_scores(written.space.quality.library, written.path.parent))
    scores = written.path.with_name("mixes-scores.json")
    before = scores.read_bytes()
    scores.write_text(json.dumps(json.loads(before)))
    try:
        with pytest.raises(InfrastructureFailed, match="is not what the scores were computed with"):
            evaluate_mix(jobs, yield_hook=lambda: None, checkpoint_dir=tmp_path, device="cpu", log=lambda line: None)
    finally:
        scores.write_bytes(before)
