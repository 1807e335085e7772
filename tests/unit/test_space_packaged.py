"""The spaces that ship with hilnas, and when two spaces are the same."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from exhaustive import mostly_exhaustive

from nas.cli.space import draw_layouts, support_by_layout, survey
from nas.core.layout import Layout
from nas.core.quality_config import Rung, TaskStage
from nas.core.space import SearchSpace
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.llama_cpp.support import supports
from nas.model.text.corpus import CorpusRef
from nas.search.proposers import Sampler, make_proposer
from nas.search.proposers.membership import values
from nas.search.proxy.job import exported_layout
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.train import train
from nas.search.spaces import (
    list_spaces,
    load_space,
    parse_space,
    space_difference,
    space_json,
    space_key,
    space_text,
    space_yaml,
)
from nas.search.spaces.yaml_text import dump_yaml, read_yaml
from nas.search.study.check import support_filter

SPACES = list_spaces()
KINDS = ("conv", "gqa", "swa", "mamba2", "swiglu", "moe")
MIXED = {"lfm2-mixed": KINDS, "lfm2-mixed-demo": KINDS, "lfm2-full": (*KINDS, "gla", "gdn", "mla", "mlstm")}
XLSTM = ("mlstm", "swa", "gqa", "swiglu")


def kinds_of(layout: Layout) -> set[str]:
    return {block.kind for layer in layout.layers for block in layer.blocks}


@cache
def seeds_of(name: str) -> list[Layout]:
    """Layouts that are proposed before the surrogate has data."""
    space = load_space(name)
    proposals = make_proposer(Sampler(space, support_filter(space))).ask(space.search.seeds)
    assert {proposal.operator for proposal in proposals} == {"seed"}
    return [proposal.layout for proposal in proposals]


@pytest.mark.parametrize("name", SPACES)
def test_packaged_space_is_whole(name: str) -> None:
    space = load_space(name)
    assert space.name == name
    assert list_spaces()[name]
    published, attention, *further = space.references.layouts().values()
    assert [reason for layout in (published, *further) for reason in Sampler(space).contains(layout)] == []
    convolutions = 1 if space.model.vectors.choices != (0,) else 0  # llama.cpp gives vectors with one at least
    assert all(layer.mixers[0].kind in ("gqa", "swa") for layer in attention.layers[convolutions:])
    for layout in (attention, *further):
        assert layout.params.non_embedding == pytest.approx(published.params.non_embedding, rel=0.01)


@pytest.mark.parametrize("name", SPACES)
def test_runtimes_carry_references_and_what_is_proposed(name: str) -> None:
    """Each on the build that the space asks for; references on llama.cpp's stock one where it has their blocks."""
    space = load_space(name)
    sampler = Sampler(space, support_filter(space))
    references = list(space.references.layouts().values())
    stock = [not {"mla", "relu2", "mlstm"} & kinds_of(layout) and name != "lfm3" for layout in references]
    assert [supports(layout).verdict == "stock" for layout in references] == stock
    for proposer in ("random", "ehvi"):
        layouts = [proposal.layout for proposal in make_proposer(sampler, proposer).ask(20)]
        for runtime in space.runtimes:
            verdicts = {RUNTIMES[runtime.name].supports(layout).verdict for layout in layouts}
            assert verdicts <= ({"stock"} if runtime.build == "stock" else {"stock", "patched"})


@pytest.mark.parametrize("name", SPACES)
def test_every_kind_and_every_choice_of_a_space_is_drawn(name: str) -> None:
    space = load_space(name)
    sampler, rng = Sampler(space, support_filter(space)), np.random.default_rng(0)
    knobs = {
        (block.kind, name): set(knob.choices)
        for block in space.mixers + space.ffn
        for name, knob in block.knobs.items()
    }
    drawn: dict[tuple[str, str], set[object]] = {knob: set() for knob in knobs}
    for _ in range(200):
        layout = sampler.draw(rng)
        for kind, name in knobs:
            drawn[kind, name] |= values(layout, kind, name)
        if drawn == knobs:
            break
    assert drawn == knobs


@pytest.mark.parametrize("name", MIXED)
def test_mixed_space_proposes_every_kind_and_patched_llama_cpp_refuses_none(name: str) -> None:
    space = load_space(name)
    assert set().union(*map(kinds_of, seeds_of(name))) == set(MIXED[name])
    (support,) = survey(space, draw_layouts(space))
    assert support.admitted == support.stock + support.patched == support.sampled
    assert support.patched > 0 and set(support.blocks) == set(MIXED[name])


def test_xlstm_proposes_every_kind_pairs_included_and_both_runtimes_refuse_none() -> None:
    text = space_text("xlstm")
    runtimes = "  - {name: llama.cpp, quantisation: q4_0, build: any}\n"
    assert runtimes.rstrip() in text
    space = parse_space(
        text.replace(runtimes.rstrip(), f"{runtimes}  - {{name: executorch, quantisation: 8da4w}}"), "both"
    )
    assert set().union(*map(kinds_of, seeds_of("xlstm"))) == set(XLSTM)
    drawn = draw_layouts(space)
    for support in survey(space, drawn):
        assert support.admitted == support.sampled == len(drawn)
    pairs = [layer for layout in drawn for layer in layout.layers if len(layer.mixers) > 1]
    assert {tuple(block.kind for block in layer.mixers) for layer in pairs} == {("mlstm", "swa")}
    hybrid = space.references.layouts()["hybrid"]
    assert {layer.mixers for layer in hybrid.layers} == {
        Layout.parse("d64 v9 ffn=swiglu:32 [X4&W16/4@512(sink=1)]").layers[0].mixers
    }
    last = len(space.quality.rungs) - 1
    proxy = exported_layout(rung_jobs(space.quality, last, hybrid, CorpusRef(source="default", hash="0" * 64))[-1])
    assert all(len(layer.mixers) == 2 for layer in proxy.layers)
    assert all(row["admitted"] for row in support_by_layout(space, [proxy]))


def test_what_a_space_does_not_use_is_not_in_its_key() -> None:
    data = space_json(load_space("lfm2"))
    assert "parallel" not in data and "further" not in data["references"]
    data = space_json(load_space("xlstm"))
    assert data["parallel"] == [["mlstm", "swa"]] and set(data["references"]["further"]) == {"hybrid"}


def test_two_runtimes_demo_is_the_demo_on_both_and_both_carry_it_proxies_included() -> None:
    demo, dual = load_space("lfm2-demo"), load_space("lfm2-two-runtimes-demo")
    same = ("model", "mixers", "ffn", "limits", "workloads", "references", "quality", "protocol")
    assert [space_json(dual)[part] for part in same] == [space_json(demo)[part] for part in same]
    assert [runtime.name for runtime in dual.runtimes] == ["llama.cpp", "executorch"]
    layouts = [*dual.references.layouts().values(), *draw_layouts(dual)]
    assert all(row["admitted"] for row in support_by_layout(dual, layouts))
    # The gate exports the proxies of what is complete, to both.
    last = len(dual.quality.rungs) - 1
    corpus = CorpusRef(source="default", hash="0" * 64)
    proxies = [exported_layout(rung_jobs(dual.quality, last, layout, corpus)[-1]) for layout in layouts]
    assert all(row["admitted"] for row in support_by_layout(dual, proxies))


# By default the kinds of the largest space, which has those of the others.
@pytest.mark.parametrize("name", mostly_exhaustive(MIXED, "lfm2-full"))
def test_proxies_of_every_kind_train(name: str, tmp_path: Path) -> None:
    space, layouts, kinds = load_space(name), seeds_of(name), set(MIXED[name])
    only = Rung(name="only", tasks={"selcopy": TaskStage(steps=2)})
    config = space.quality.model_copy(update={"rungs": (only,)})
    while kinds:
        layout = max(layouts, key=lambda layout: len(kinds & kinds_of(layout)))
        assert kinds & kinds_of(layout)
        kinds -= kinds_of(layout)
        (job,) = rung_jobs(config, 0, layout, CorpusRef(source="default", hash="0" * 64))
        result = train(job, yield_hook=lambda: None, checkpoint_dir=tmp_path, device="cpu", log=print)
        assert all(math.isfinite(loss) for loss in result.losses.values()), layout.format()


def test_lfm2_is_what_the_report_says() -> None:
    published = load_space("lfm2").references.layouts()["published"]
    assert published.params.total == 354_483_968
    assert [layer.mixers[0].kind for layer in published.layers].count("gqa") == 6


def test_lfm3_is_what_was_published() -> None:
    """tests/unit/test_adapt_checkpoints.py reads this layout from the released configuration."""
    published = load_space("lfm3").references.layouts()["published"]
    assert published.params.total == 1_728_801_536
    kinds = [layer.mixers[0].kind for layer in published.layers]
    assert [kinds.count(kind) for kind in ("conv", "swa", "gqa")] == [13, 5, 6]


def test_space_survives_json() -> None:
    space = load_space("lfm2")
    again = SearchSpace.model_validate(json.loads(space.model_dump_json()))
    assert again == space
    assert space_key(again) == space_key(space)


@pytest.mark.parametrize("name", SPACES)
def test_yaml_of_a_space_gives_it_back(name: str) -> None:
    space = load_space(name)
    again = parse_space(space_yaml(space), "again.yaml")
    assert "doc: |" in space_yaml(space)
    assert again == space


def test_yaml_keeps_texts_that_look_like_numbers() -> None:
    space = load_space("lfm2-demo").model_copy(update={"devices": ("25921e05", "08", "1.5")})
    assert parse_space(space_yaml(space), "again.yaml") == space


@pytest.mark.parametrize("flow", [None, False, True])
def test_values_are_read_as_they_were_written(flow: bool | None) -> None:
    texts = ["08", "1e3", "1.5", "null", "~", "", "yes", "true", "- x", "a: b", "two\nlines", "2026-11-30", "é", "!x"]
    value = {"1e3": texts, "numbers": [8, 1.5, None, True], "nested": {"08": {"x": []}}}
    assert read_yaml(dump_yaml(value, flow=flow), "again.yaml").value == value


def test_difference_names_what_changed() -> None:
    space = load_space("lfm2-demo")
    assert space_difference(space, space.model_copy(update={"doc": "other words"})) == []
    data = space_json(space)
    data["model"]["depth"]["choices"] = [6]
    del data["mixers"]["conv"]
    data["limits"] = {"gqa": {"min": 1}}
    changed = SearchSpace.model_validate(data)
    assert space_difference(space, changed) == [
        "model.depth.choices: [6, 7, 8] -> [6]",
        'mixers.conv: removed (was {"kernel": {"scope": "model", "choices": [3, 4]}})',
        'limits.conv: removed (was {"min": 1, "max": null})',
    ]
    assert space_key(changed) != space_key(space)
