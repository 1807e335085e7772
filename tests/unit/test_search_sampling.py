"""Sampled, edited and crossed layouts are inside their space, whatever the space."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from exhaustive import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nas.core.errors import InvalidInput
from nas.core.layout import Layer, Layout
from nas.core.model_choices import Frames, choice_of, ffn_width, span
from nas.core.space import SearchSpace
from nas.search.proposers import Sampler, crossover, mutate, seed_layouts
from nas.search.proposers.mutation import draft_of

REST: dict[str, Any] = {
    "name": "test",
    "runtimes": [{"name": "llama.cpp", "quantisation": "q4_0"}],
    "workloads": {"chat": {"prompt": 64, "gen": 16}},
    "objectives": [
        {"name": "quality", "metric": "quality"},
        {"name": "latency", "metric": "latency", "workload": "chat"},
    ],
    "references": {
        "published": "d256 v1024 ffn=swiglu:512 [C3*2 A8/4]",
        "attention": "d256 v1024 ffn=swiglu:512 [A8/4*3]",
    },
}


HEADS = {"mixers": {"gqa": {"heads": {"choices": [4, 8], "scope": "layer"}, "kv_heads": "heads"}}}


PARALLEL: dict[str, Any] = {
    "swa": {"heads": 8, "kv_heads": 4, "window": [8, 64], "sink": {"choices": [0, 1], "scope": "layer"}},
    "mamba2": {"state": {"choices": [16, 128], "scope": "layer"}},
}


def space(**changes: Any) -> SearchSpace:
    """A space of 256 wide layouts, 3 to 6 deep; `changes` replace keys of its parts."""
    data: dict[str, Any] = {
        "model": {"d_model": 256, "depth": {"min": 3, "max": 6}, "vocab": 1024},
        "mixers": {"conv": {"kernel": [3, 4]}, "gqa": {"heads": 8, "kv_heads": {"choices": [2, 4], "scope": "layer"}}},
        "ffn": {"swiglu": {"width": [256, 512]}, "moe": {"experts": 4, "top_k": 2, "width": [64, 128]}},
    }
    for part, change in changes.items():
        data[part] = {**data.get(part, {}), **change} if isinstance(change, dict) else change
    return SearchSpace.model_validate(data | REST)


SPACES = {
    "plain": space(),
    "as many key-value heads as heads": space(**HEADS),
    "a few key-value heads or all": space(mixers={"gqa": {"heads": [4, 8], "kv_heads": [2, "heads"]}}),
    "limits": space(limits={"gqa": {"min": 2, "max": 2}, "conv": {"min": 1}}),
    "period": space(pattern={"period": [2, 3]}),
    "period with lead": space(pattern={"period": 2}, model={"leading_dense": [1, 2]}),
    "own feed-forwards": space(
        model={"ffn_scope": "layer", "leading_dense": 1},
        ffn={"swiglu": {"width": {"choices": [256, 512], "scope": "layer"}}},
    ),
    "three feed-forwards": space(
        model={"ffn_scope": "layer", "leading_dense": [1, 2]}, ffn={"geglu": {"width": [256, 512]}}
    ),
    "own feed-forwards that repeat": space(
        model={"ffn_scope": "layer", "leading_dense": [0, 1]}, pattern={"period": [2, 3]}
    ),
    "expansion": space(model={"d_model": [128, 256]}, ffn={"swiglu": {"expansion": [1.5, 2, 3]}}),
    "tight total": space(model={"params": {"total": {"min": 3_000_000, "max": 3_100_000}}}),
    "tight active": space(model={"params": {"active": {"max": "1.6M"}, "total": {"min": "1.8M"}}}),
    "all budgets": space(
        model={"params": {"total": {"max": "4M"}, "active": {"min": "1M"}, "non_embedding": {"min": "1.5M"}}}
    ),
    "untied": space(model={"tied": False}),
    "norms on both sides": space(model={"norms": "both", "params": {"total": {"min": 3_000_000, "max": 3_100_000}}}),
    "all mixers": space(
        mixers={
            "swa": {"heads": 8, "kv_heads": {"choices": [2, 4], "scope": "layer"}, "window": [8, 64], "sink": [0, 1]},
            "mamba2": {"state": {"choices": [16, 128], "scope": "layer"}, "heads": [4, 8]},
        },
        limits={"swa": {"max": 3}},
    ),
    "parallel mixers": space(mixers=PARALLEL, parallel=[["mamba2", "gqa"], ["mamba2", "swa"]]),
    "parallel mixers alone": space(
        mixers=PARALLEL,
        parallel=[["mamba2", "swa"]],
        limits={"mamba2": {"max": 0}, "swa": {"max": 0}, "mamba2&swa": {"min": 1, "max": 4}},
        model={"params": {"total": {"max": "4M"}}},
    ),
    "parallel mixers that repeat": space(mixers=PARALLEL, parallel=[["gqa", "mamba2"]], pattern={"period": [2, 3]}),
}
samplers = {name: Sampler(space) for name, space in SPACES.items()}


@given(st.sampled_from(sorted(SPACES)), st.integers(0, 2**32))
@settings(max_examples=examples(150), deadline=None)
def test_drawn_edited_and_crossed_layouts_are_inside(name: str, seed: int) -> None:
    sampler, rng = samplers[name], np.random.default_rng(seed)
    first, second = sampler.draw(rng), sampler.draw(rng)
    edited, _ = mutate(first, sampler, rng)
    child, _ = crossover(first, second, sampler, rng)
    for layout in (first, second, edited, child):
        assert sampler.contains(layout) == []
        assert Layout.parse(layout.format()) == layout
    assert edited != first or len(SPACES[name].model.depth.choices) == 1


@given(st.sampled_from(sorted(SPACES)), st.integers(0, 2**32))
@settings(max_examples=examples(100), deadline=None)
def test_draft_of_a_layout_unfolds_into_it(name: str, seed: int) -> None:
    sampler, rng = samplers[name], np.random.default_rng(seed)
    layout = sampler.draw(rng)
    assert draft_of(layout, sampler, rng).layout(SPACES[name].model) == layout


@pytest.mark.parametrize("name", SPACES)
def test_every_seed_is_inside_and_comes_once(name: str) -> None:
    seeds = seed_layouts(samplers[name], 6)
    assert len({layout.id for layout in seeds}) == len(seeds) == 6
    assert [reason for layout in seeds for reason in samplers[name].contains(layout)] == []
    assert seeds == seed_layouts(samplers[name], 6)


def test_seeds_begin_with_references_and_mix_local_and_global() -> None:
    seeds = seed_layouts(samplers["plain"], 8)
    assert seeds[0].format() == REST["references"]["published"]
    hybrids = [{block.kind for layer in layout.layers for block in layer.mixers} for layout in seeds]
    assert hybrids.count({"conv", "gqa"}) >= 6
    assert len({layout.depth for layout in seeds}) >= 3


def test_leading_layers_are_dense_before_experts_alone() -> None:
    gated = space(model={"leading_dense": [1, 2]}, ffn={"geglu": {"width": [256, 512]}})
    sampler, rng = Sampler(gated), np.random.default_rng(0)
    layouts = [sampler.draw(rng) for _ in range(40)]
    kinds = {tuple(dict.fromkeys(layer.ffn.kind for layer in layout.layers if layer.ffn)) for layout in layouts}
    assert kinds == {("swiglu",), ("geglu",), ("swiglu", "moe")}


def test_few_seeds_pair_every_mixer_that_needs_no_growing_cache_with_attention() -> None:
    seeds = seed_layouts(samplers["all mixers"], 5)  # two of them are the references
    kinds = [{block.kind for layer in layout.layers for block in layer.mixers} for layout in seeds]
    assert all({"gqa", local} in kinds for local in ("conv", "swa", "mamba2"))


def test_seeds_have_a_mixer_that_the_space_requires_beside_each_pair() -> None:
    mixers = {"conv": {"kernel": 3}, "gqa": {"heads": 8, "kv_heads": 4}, "mla": {"heads": 8, "latent": 64}}
    sampler = Sampler(space(mixers=mixers, limits={"gqa": {"min": 1}}))
    seeds = seed_layouts(sampler, 8)
    kinds = [{block.kind for layer in layout.layers for block in layer.mixers} for layout in seeds]
    assert {"conv", "mla", "gqa"} in kinds
    assert all("gqa" in stack for stack in kinds)


def test_each_local_mixer_of_the_seeds_meets_several_depths_shares_and_feed_forwards() -> None:
    met: dict[str, set[tuple[int, int, str]]] = {"conv": set(), "swa": set(), "mamba2": set()}
    for layout in seed_layouts(samplers["all mixers"], 20)[2:]:
        kinds = [layer.mixers[0].kind for layer in layout.layers]
        (local,) = set(kinds) - {"gqa"}
        met[local].add((layout.depth, kinds.count("gqa"), layout.layers[-1].ffn.kind if layout.layers[-1].ffn else ""))
    for combinations in met.values():
        assert [len(set(values)) > 1 for values in zip(*combinations, strict=True)] == [True] * 3


def test_all_layouts_of_a_small_space_are_drawn() -> None:
    small = space(model={"depth": 3}, mixers={"conv": {"kernel": 3}, "gqa": {"heads": 8, "kv_heads": 4}})
    sampler, rng = Sampler(small), np.random.default_rng(0)
    drawn = {sampler.draw(rng).format() for _ in range(2000)}
    everything = set()
    for mixers in itertools.product(["C3", "A8/4"], repeat=3):
        for ffn in ("swiglu:256", "swiglu:512", "moe:4x2:64", "moe:4x2:128"):
            everything.add(Layout.parse(f"d256 v1024 ffn={ffn} [{' '.join(mixers)}]").format())
    assert drawn == everything


@pytest.mark.parametrize("name", SPACES)
def test_reach_holds_every_layout_and_is_attained(name: str) -> None:
    sampler, rng = samplers[name], np.random.default_rng(0)
    frames = Frames(SPACES[name])
    for _ in range(40):
        layout = sampler.draw(rng)
        reach = span(frames, draft_of(layout, sampler, rng).frame, layout.depth)
        assert reach is not None
        counts = (layout.params.total, layout.params.active, layout.params.non_embedding)
        assert all(low <= count <= high for low, count, high in zip(reach.low, counts, reach.high, strict=True))


def test_reach_is_exact_where_nothing_repeats() -> None:
    limited = space(limits={"gqa": {"min": 1, "max": 2}}, model={"leading_dense": 1})
    frames = Frames(limited)
    frame = next(frame for frame in frames.all() if frame.ffn == "moe")
    (dense,), (routed,), (conv,) = (frames.blocks(frame, kind) for kind in ("swiglu", "moe", "conv"))
    totals = []
    for mixers in itertools.product([conv, *frames.blocks(frame, "gqa")], repeat=4):
        if 1 <= sum(mixer.kind == "gqa" for mixer in mixers) <= 2:
            layers = [Layer((mixer,), routed if index else dense) for index, mixer in enumerate(mixers)]
            totals.append(Layout.of(256, 1024, layers).params.total)
    reach = span(frames, frame, 4)
    assert reach is not None
    assert (min(totals), max(totals)) == (reach.low[0], reach.high[0])


def _kernel(layout: Layout) -> tuple[tuple[str, object], ...]:
    kernels = {block.int("kernel") for layer in layout.layers for block in layer.mixers if block.kind == "conv"}
    return tuple(("kernel", kernel) for kernel in kernels)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("d128 v1024 ffn=swiglu:512 [C3 A8/4 C3]", "d_model 128 is none of [256]"),
        ("d256 v1024 untied ffn=swiglu:512 [C3 A8/4 C3]", "embeddings are not tied"),
        ("d256 v1024 norms=both ffn=swiglu:512 [C3 A8/4 C3]", "norms=both is not before"),
        ("d256 v1024 softcap=30 ffn=swiglu:512 [C3 A8/4 C3]", "bounded logits (softcap)"),
        ("d256 v1024 ffn=swiglu:512 [C3 A8/4]", "depth 2 is none of [3, 4, 5, 6]"),
        ("d256 v1024 ffn=swiglu:512 [C3 C4 A8/4]", "conv: kernel must be the same in all layers"),
        ("d256 v1024 ffn=swiglu:512 [C5 A8/4*2]", "layer 0: C5: kernel 5 is none of [3, 4]"),
        ("d256 v1024 ffn=swiglu:512 [C3 A8/8*2]", "layer 1 and 1 more: A8/8: kv_heads 8 is none of [2, 4]"),
        (
            "d256 v1024 ffn=swiglu:512 [C3 A8/4(qk_norm=0) C3]",
            "layer 1: A8/4(qk_norm=0): the space does not vary qk_norm",
        ),
        ("d256 v1024 ffn=swiglu:512 [C3 - A8/4]", "layer 1: a layer of a space has a mixer, one feed-forward"),
        ("d256 v1024 ffn=swiglu:512 [C3 ^0 A8/4]", "layer 1: a layer of a space has a mixer, one feed-forward"),
        ("d256 v1024 ffn=swiglu:512 [C3 C3+moe:4x2:64 A8/4]", "the feed-forward kind must be the same in all layers"),
    ],
)
def test_reasons_name_the_rule(text: str, reason: str) -> None:
    assert any(problem.startswith(reason) for problem in samplers["plain"].contains(Layout.parse(text)))


def test_a_layer_chooses_parallel_mixers_as_it_chooses_one() -> None:
    sampler, rng = samplers["parallel mixers"], np.random.default_rng(0)
    drawn = [sampler.draw(rng) for _ in range(60)]
    chosen = {choice_of(layer.mixers) for layout in drawn for layer in layout.layers}
    assert chosen == {"conv", "gqa", "swa", "mamba2", "mamba2&gqa", "mamba2&swa"}
    assert sampler.contains(Layout.parse("d256 v1024 ffn=swiglu:512 [C3 W8/4@8&M16 C3]")) == [
        "layer 1: swa&mamba2 is none of conv, gqa, swa, mamba2, mamba2&gqa, mamba2&swa"
    ]
    assert sampler.contains(Layout.parse("d256 v1024 ffn=swiglu:512 [C3 M64&W8/4@8 C3]")) == [
        "layer 1: M64: state 64 is none of [16, 128]"
    ]
    inside = Layout.parse("d256 v1024 ffn=swiglu:512 [C3 M16&W8/4@8 C3]")
    assert sampler.contains(inside) == []


def test_limits_count_parallel_mixers_by_themselves() -> None:
    sampler = samplers["parallel mixers alone"]
    assert sampler.contains(Layout.parse("d256 v1024 ffn=swiglu:256 [C3 M16&W8/4@8 A8/4]")) == []
    assert sampler.contains(Layout.parse("d256 v1024 ffn=swiglu:256 [C3 M16 A8/4]")) == [
        "1 mamba2 layers, allowed are 0 to 0",
        "0 mamba2&swa layers, allowed are 1 to 4",
    ]


def test_an_edit_adds_a_parallel_mixer_to_the_one_that_a_layer_has() -> None:
    limits = {"conv": {"max": 0}, "gqa": {"max": 0}}
    sampler = Sampler(space(mixers=PARALLEL, parallel=[["mamba2", "swa"]], limits=limits))
    layout = Layout.parse("d256 v1024 ffn=swiglu:512 [M16 M M16]")
    rng, outcomes = np.random.default_rng(0), set()
    for _ in range(200):
        edited, name = mutate(layout, sampler, rng)
        if name == "mixer_kind":
            changed = [layer.mixers for layer, base in zip(edited.layers, layout.layers, strict=True) if layer != base]
            outcomes |= {(choice_of(mixers), mixers[0].format()) for mixers in changed}
    assert {("mamba2&swa", "M16"), ("mamba2&swa", "M")} <= outcomes


@pytest.mark.parametrize(
    ("parallel", "place", "message"),
    [
        ([["mamba2", "swaa"]], ("parallel", 0, 1), "unknown mixer of this space 'swaa'"),
        ([["mamba2"]], ("parallel", 0), "must be two kinds of mixers or more, each once"),
        ([["mamba2", "mamba2"]], ("parallel", 0), "must be two kinds of mixers or more, each once"),
        ([["mamba2", "swa"], ["swa", "mamba2"]], ("parallel", 1), "swa&mamba2 occurs twice"),
    ],
)
def test_impossible_parallel_mixers_are_refused_at_their_place(parallel: Any, place: Any, message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        space(mixers=PARALLEL, parallel=parallel)
    (error,) = refused.value.errors()
    assert error["loc"] == place
    assert message in error["msg"]


def test_too_many_pairs_of_parallel_mixers_are_refused() -> None:
    wide = {"heads": 8, "kv_heads": 4, "window": {"min": 1, "max": 512, "scope": "layer"}}
    states = {"state": {"min": 1, "max": 64, "scope": "layer"}}
    with pytest.raises(ValidationError, match="mamba2&swa: a layer would have more than 4096 different pairs"):
        space(mixers={"swa": wide, "mamba2": states}, parallel=[["mamba2", "swa"]])


def test_impossible_budget_is_refused_with_the_range() -> None:
    with pytest.raises(InvalidInput, match=r"the choices reach 1,\d+,\d+ to \d,\d+,\d+ weights \(total\)"):
        Sampler(space(model={"params": {"total": {"min": "90M"}}}))
    with pytest.raises(InvalidInput, match="no layout meets the limits"):
        Sampler(space(limits={"gqa": {"min": 7}}))


def test_unsupported_space_is_refused_and_partly_supported_one_constrains() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InvalidInput, match="no runtime carries one"):
        Sampler(space(), lambda layout: False).draw(rng)
    kernel_space = space(mixers={"conv": {"kernel": {"choices": [3, 4, 5, 6], "scope": "layer"}}})

    def one_kernel(layout: Layout) -> bool:
        return len(_kernel(layout)) == 1

    sampler = Sampler(kernel_space, one_kernel)
    layout = sampler.draw(rng)
    assert one_kernel(layout)
    assert one_kernel(mutate(layout, sampler, rng)[0])
    assert sampler.contains(Layout.parse("d256 v1024 ffn=swiglu:512 [C3 C4 A8/4]")) == [
        "no runtime of the space carries it"
    ]


def test_expansion_gives_quantisable_widths() -> None:
    assert [ffn_width(x, 1024) for x in (4.5, 2.67, 0.1)] == [4608, 2816, 256]
    assert [ffn_width(x, 512) for x in (3, 2.67, 0.01)] == [1536, 1376, 32]


def test_key_value_heads_may_be_as_many_as_heads() -> None:
    sampler, rng = Sampler(space(**HEADS)), np.random.default_rng(0)
    blocks = {block for _ in range(40) for layer in sampler.draw(rng).layers for block in layer.mixers}
    mixers = {block.format() for block in blocks if block.kind == "gqa"}
    assert mixers == {"A4/4", "A8/8"}
    assert sampler.contains(Layout.parse("d256 v1024 ffn=swiglu:512 [C3 A8/4 C3]"))
    assert not sampler.contains(Layout.parse("d256 v1024 ffn=swiglu:512 [C3 A8/8 A4/4]"))


LISTED = [
    "d256 v1024 ffn=swiglu:512 [C3*2 A8/4]",
    "d256 v1024 ffn=swiglu:256 [C3*2 A8/8]",
    "d128 v1024 ffn=swiglu:256 [A8/4&C3 C3 ^1]",
    "d128 v1024 ffn=swiglu:256 [A8/4 A8/4(kv=0) C4+none]",
    "d128 v1024 untied ffn=swiglu:256 [M16 C4]",
]
"""Two of one width, and three that no space of choices holds."""


def listed(supported: Any = lambda layout: True) -> Sampler:
    return Sampler.of(map(Layout.parse, LISTED), space(), supported)


def test_a_list_is_the_whole_space() -> None:
    sampler, rng = listed(), np.random.default_rng(0)
    assert {sampler.draw(rng).format() for _ in range(60)} == set(LISTED)
    first, second = map(Layout.parse, LISTED[:2])
    assert mutate(first, sampler, rng)[0] != first
    assert crossover(first, second, sampler, rng)[0] not in (first, second)
    assert sampler.contains(Layout.parse("d256 v1024 ffn=swiglu:512 [C3*3 A8/4]"))
    assert seed_layouts(sampler, 9)[0].format() == LISTED[0]  # a reference
    assert {layout.format() for layout in seed_layouts(sampler, 9)} == set(LISTED)


def test_neighbours_in_a_list_are_alike() -> None:
    sampler, rng = listed(), np.random.default_rng(0)
    neighbours = [mutate(Layout.parse(LISTED[0]), sampler, rng)[0].format() for _ in range(80)]
    assert max(set(neighbours), key=neighbours.count) == LISTED[1]


def test_what_no_runtime_carries_is_not_in_the_list() -> None:
    sampler = listed(lambda layout: layout.d_model == 256)
    assert sampler.listed is not None and len(sampler.listed.layouts) == 2
    assert sampler.contains(Layout.parse(LISTED[2]))
    with pytest.raises(InvalidInput, match="carries any of its 5 layouts"):
        listed(lambda layout: False)
