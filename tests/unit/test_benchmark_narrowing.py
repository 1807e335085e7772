"""Proxies keep the proportions of the layouts that they stand for, in every packaged space."""

from __future__ import annotations

import math

import numpy as np
import pytest
from exhaustive import mostly_exhaustive

from benchmarks.quality.narrowing import Narrowing, study
from nas.core.layout import narrow, padded
from nas.measure.runtimes.llama_cpp.support import supports
from nas.search.proposers import Sampler
from nas.search.spaces import list_spaces, load_space

LAYOUTS = 200
SPACES = mostly_exhaustive(list_spaces(), "lfm2-full")  # which has the blocks of the others


@pytest.fixture(scope="module", params=SPACES)
def narrowing(request: pytest.FixtureRequest) -> Narrowing:
    return study(load_space(request.param), LAYOUTS)


def test_weights_keep_their_order(narrowing: Narrowing) -> None:
    for correlations in (narrowing.total, narrowing.active):
        assert all(math.isnan(value) or value >= 0.99 for value in correlations.values()), correlations
        sparse = "moe" in {block.kind for block in load_space(narrowing.space).ffn}
        assert math.isnan(correlations["MoE"]) != sparse, "spaces of dense layers"


def test_references_are_as_far_apart_as_their_proxies(narrowing: Narrowing) -> None:
    published = load_space(narrowing.space).references.layouts()["published"]
    mlstm = any(block.kind == "mlstm" for layer in published.layers for block in layer.blocks)
    # mLSTM has two gates a head: proxies, with smaller heads, have 1 % more weights for them.
    assert abs(narrowing.gap_proxy - narrowing.gap_deploy) <= (0.012 if mlstm else 0.005)


def test_memory_keeps_its_share_of_attentions_cache(narrowing: Narrowing) -> None:
    for kind, (low, high) in narrowing.memory.items():
        # Positions of latent attention have two pairs of numbers at least.
        assert 0.5 <= low <= high <= (2.5 if kind == "mla" else 2.0), kind


@pytest.mark.parametrize("name", SPACES)
def test_a_build_that_carries_a_layout_carries_its_exported_proxy(name: str) -> None:
    space = load_space(name)
    sampler, rng = Sampler(space), np.random.default_rng(0)
    for _ in range(LAYOUTS):
        layout = sampler.draw(rng)
        proxy = padded(narrow(layout, space.quality.proxy_d_model, 256, context=4096, length=128))
        assert supports(proxy).verdict == supports(layout).verdict, layout.format()
