"""The arithmetic of layouts: published counts to the weight, caches and states by hand."""

from __future__ import annotations

import pytest

from nas.core.layout import Layout
from nas.core.published import LFM2, PLM, ZEBRA_LLAMA


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("LFM2-350M", 354_483_968, 354_483_968),
        ("LFM2-700M", 742_489_344, 742_489_344),
        ("LFM2-1.2B", 1_170_340_608, 1_170_340_608),
        ("LFM2-2.6B", 2_569_272_320, 2_569_272_320),
        ("LFM2-8B-A1B", 8_339_929_856, 1_557_740_288),
    ],
)
def test_published_counts(name: str, total: int, active: int) -> None:
    params = Layout.parse(LFM2[name]).params
    assert (params.total, params.active) == (total, active)


def test_plm_has_the_weights_and_the_cache_of_its_paper() -> None:
    """1.83B weights, 0.31B of them the embedding; equation 7: 512 + 64 numbers per token and layer."""
    layout = Layout.parse(PLM)
    assert (layout.params.total, layout.params.non_embedding) == (1_825_458_176, 1_514_293_248)
    assert layout.kv_bytes(4096) == 32 * (512 + 64) * 4096 * 2


@pytest.mark.parametrize(
    ("name", "stated", "share"),
    [
        ("Zebra-Llama-1B-8MLA", 1.27e9, 7.81),
        ("Zebra-Llama-1B-6MLA", 1.28e9, 5.86),
        ("Zebra-Llama-1B-4MLA", 1.28e9, 3.91),
        ("Zebra-Llama-3B-14MLA", 3.27e9, 4.69),
        ("Zebra-Llama-3B-8MLA", 3.36e9, 2.68),
        ("Zebra-Llama-3B-6MLA", 3.39e9, 2.01),
    ],
)
def test_zebra_llama_has_the_sizes_of_its_paper(name: str, stated: float, share: float) -> None:
    """Table 1: weights, and the cache in percent of Llama 3.2's, which has 8 key-value heads in every layer."""
    layout = Layout.parse(ZEBRA_LLAMA[name])
    assert layout.params.total == pytest.approx(stated, rel=0.01)
    head_dim = {2048: 64, 3072: 128}[layout.d_model]
    llama = 2 * 8 * head_dim * layout.depth * 4096 * 2
    assert round(100 * layout.kv_bytes(4096) / llama, 2) == share


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("LFM2-350M", [2, 5, 8, 10, 12, 14]),
        ("LFM2-700M", [2, 5, 8, 10, 12, 14]),
        ("LFM2-1.2B", [2, 5, 8, 10, 12, 14]),
        ("LFM2-2.6B", [2, 5, 9, 13, 17, 21, 25, 28]),
        ("LFM2-8B-A1B", [2, 6, 10, 14, 18, 21]),
    ],
)
def test_published_layouts_are_canonical_and_in_order(name: str, attention: list[int]) -> None:
    layout = Layout.parse(LFM2[name])
    assert layout.format() == LFM2[name]
    mixers = {i: layer.mixer.resolve(layout.d_model) for i, layer in enumerate(layout.layers) if layer.mixer}
    assert [i for i, mixer in mixers.items() if mixer.kind == "gqa"] == attention
    assert {mixers[i].int("head_dim") for i in attention} == {64}


def test_the_id_of_a_layout_never_changes() -> None:
    assert Layout.parse(LFM2["LFM2-350M"]).id == "813157173544ac9d322b194d99f21655017b9cc269956cdc76da87314560bfd7"
    assert Layout.parse(LFM2["LFM2-8B-A1B"]).id == "9ea30de6076b7795a77810f42201b59ed6c116f9e7d3ac983c9db16a9c9f24d2"


def test_caches_and_states() -> None:
    layout = Layout.parse(LFM2["LFM2-350M"])
    assert layout.kv_bytes(4096) == 6 * 2 * 8 * 64 * 4096 * 2
    assert layout.kv_bytes(4096, element=1.0625) == 6 * 2 * 8 * 64 * 4096 * 1.0625
    assert layout.state_bytes() == 10 * 2 * 1024 * 4


def test_shared_layers_count_once_in_memory_and_twice_in_work() -> None:
    plain = Layout.parse("d64 v256 ffn=swiglu:96 [C3 A4/2]")
    shared = Layout.parse("d64 v256 ffn=swiglu:96 [C3 A4/2 ^0 ^1]")
    assert shared.params.total == plain.params.total
    assert shared.kv_bytes(10) == 2 * plain.kv_bytes(10)
    assert shared.state_bytes() == 2 * plain.state_bytes()
    head = 2.0 * 64 * 256
    assert shared.flops(10) - head == 2 * (plain.flops(10) - head)


def test_a_cache_reader_has_no_cache_and_no_keys_and_values() -> None:
    owner = Layout.parse("d64 v256 ffn=swiglu:96 [A4/2 A4/2]")
    reader = Layout.parse("d64 v256 ffn=swiglu:96 [A4/2 A4/2(kv=0)]")
    assert reader.kv_bytes(10) == owner.kv_bytes(10) / 2
    assert owner.params.total - reader.params.total == 2 * 64 * 32 + 16
    assert reader.cache_source(1, 0) == (0, 0)
    assert owner.cache_source(1, 0) is None


def test_a_cache_reader_finds_the_mixer_of_its_shape() -> None:
    layout = Layout.parse("d64 v256 ffn=swiglu:96 [C3&A4/4&A4/2 C3 C3&A8/2:16(kv=0) ^2]")
    assert layout.cache_source(2, 1) == layout.cache_source(3, 1) == (0, 2)
    assert layout.cache_source(2, 0) is None


def test_tied_tables_count_once() -> None:
    tied, untied = (Layout.parse(f"d64 v256 {u}ffn=swiglu:96 [C3]").params for u in ("", "untied "))
    assert untied.total - tied.total == 64 * 256
    assert untied.non_embedding == tied.non_embedding == tied.total - 64 * 256
