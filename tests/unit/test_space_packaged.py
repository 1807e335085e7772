"""The spaces that ship with hilnas, and when two spaces are the same."""

from __future__ import annotations

import json

import pytest

from nas.core.space import SearchSpace
from nas.runtimes.llama_cpp.support import supports
from nas.search import Sampler, make_proposer
from nas.search_spaces import list_spaces, load_space, space_difference, space_json, space_key


@pytest.mark.parametrize("name", list_spaces())
def test_packaged_space_is_whole(name: str) -> None:
    space = load_space(name)
    assert space.name == name
    assert list_spaces()[name]
    published, attention = space.references.layouts().values()
    assert Sampler(space).contains(published) == []
    assert all(layer.mixers[0].kind == "gqa" for layer in attention.layers)
    assert attention.params.non_embedding == pytest.approx(published.params.non_embedding, rel=0.01)


@pytest.mark.parametrize("name", ["lfm2", "lfm2-demo"])
def test_stock_llama_cpp_carries_references_and_what_is_proposed(name: str) -> None:
    space = load_space(name)
    sampler = Sampler(space, lambda layout: supports(layout).verdict == "stock")
    assert all(supports(layout).verdict == "stock" for layout in space.references.layouts().values())
    for proposer in ("random", "ehvi"):
        asked = make_proposer(sampler, proposer).ask(20)
        assert [supports(proposal.layout).verdict for proposal in asked] == ["stock"] * 20


def test_spaces_say_what_build_they_need() -> None:
    spaces = map(load_space, list_spaces())
    assert {space.name: space.runtimes[0].build for space in spaces} == {
        "lfm2": "stock",
        "lfm2-demo": "stock",
        "lfm2-mixed": "any",
    }


def test_the_mixed_space_is_searched_over_all_its_mixers() -> None:
    space = load_space("lfm2-mixed")
    sampler = Sampler(space, lambda layout: supports(layout).verdict != "no")
    assert space.references == load_space("lfm2").references
    for proposer in ("random", "ehvi", "evolution"):
        asked = [proposal.layout for proposal in make_proposer(sampler, proposer).ask(20)]
        assert {block.kind for layout in asked for layer in layout.layers for block in layer.blocks} == {
            "conv", "gqa", "swa", "mamba2", "swiglu", "moe"
        }  # fmt: skip
        assert {supports(layout).verdict for layout in asked} <= {"stock", "patched"}


def test_lfm2_is_what_the_report_says() -> None:
    published = load_space("lfm2").references.layouts()["published"]
    assert published.params.total == 354_483_968
    assert [layer.mixers[0].kind for layer in published.layers].count("gqa") == 6


def test_space_survives_json() -> None:
    space = load_space("lfm2")
    again = SearchSpace.model_validate(json.loads(space.model_dump_json()))
    assert again == space
    assert space_key(again) == space_key(space)


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
        'mixers.conv: removed (was {"kernel": {"choices": [3, 4], "scope": "model"}})',
        'limits.conv: removed (was {"min": 1, "max": null})',
    ]
    assert space_key(changed) != space_key(space)
