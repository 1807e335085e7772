"""Reference models: sizes as published, types as in files that llama.cpp's quantiser makes, graphs that run."""

from __future__ import annotations

from pathlib import Path

import pytest
from compare_references_tiny import kinds, tiny
from gguf import GGUFReader

from nas.core.errors import UnknownName
from nas.core.layout import Layout
from nas.core.units import parse_count
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.random_weights import Type
from nas.measure.runtimes.llama_cpp.stock_model import StockModel, write_stock_model
from nas.train.compare.lfm2_report import REPORT
from nas.train.compare.published import REFERENCES, Decoder, ReferenceModel, find_reference

# As the published checkpoints count them: the totals of their safetensors files, or of llama.cpp's own loader.
PUBLISHED = {
    "LFM2-350M": 354_483_968,
    "LFM2-700M": 742_489_344,
    "LFM2-1.2B": 1_170_340_608,
    "LFM2-2.6B": 2_569_272_320,
    "LFM2-8B-A1B": 8_339_929_856,
    "Granite-4.0-350M": 352_379_904,
    "Granite-4.0-1B": 1_631_750_144,
    "Granite-4.0-Micro": 3_402_836_480,
    "Granite-4.0-H-350M": 340_332_224,
    "Granite-4.0-H-Micro": 3_191_396_096,
    "Granite-4.0-H-Tiny": 6_939_037_248,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Gemma-3-1B": 999_885_952,
    "Gemma-3-4B": 3_880_263_168,  # of its text model
    "Gemma-3-270M": 268_098_176,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "SmolLM3-3B": 3_075_098_624,
    "LFM3-1.7B": 1_728_801_536,
    "MiniCPM5-1B": 1_080_632_832,
    "Falcon-H1-0.5B": 521_411_104,
}


def stock(name: str) -> StockModel:
    shape = REFERENCES[name].shape
    assert isinstance(shape, Decoder)
    return shape.model()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_checkpoint(name: str) -> None:
    assert REFERENCES[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize("reference", REFERENCES.values(), ids=lambda reference: reference.name)
def test_parameters_are_near_the_publishers_number(reference: ReferenceModel) -> None:
    assert reference.parameters == pytest.approx(parse_count(reference.stated), rel=0.035)
    assert reference.source.startswith(("https://huggingface.co/", "https://arxiv.org/abs/"))


def test_every_model_of_the_report_is_there() -> None:
    for rows in REPORT.values():
        assert set(rows) <= set(REFERENCES)


def test_active_parameters_leave_out_experts_that_a_token_does_not_use() -> None:
    hybrid = REFERENCES["Granite-4.0-H-Tiny"]
    experts = 40 * 3 * 64 * 512 * 1536
    assert hybrid.active == hybrid.parameters - experts // 64 * (64 - 6)
    assert stock("Qwen3-0.6B").active == stock("Qwen3-0.6B").parameters


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("Granite-4.0-1B", 978),  # ollama.com/sam860/granite-4.0:1b-Q4_0, a file of llama.cpp's quantiser
        ("Granite-4.0-H-Tiny", 4000),  # h-tiny-Q4_0 of the same
    ],
)
def test_a_file_is_as_large_as_the_usual_one(name: str, megabytes: float) -> None:
    """The usual file holds a vocabulary, too."""
    assert stock(name).file_bytes / 1e6 == pytest.approx(megabytes, rel=0.015)


def test_types_of_tensors_are_the_quantisers() -> None:
    types = {tensor.name: storage for tensor, storage in stock("Granite-4.0-H-Tiny").stored()}
    assert types["token_embd.weight"] == Type.Q6_K  # tied: it makes the logits
    assert (
        types["blk.0.ssm_in.weight"] == types["blk.5.attn_v.weight"] == types["blk.0.ffn_down_exps.weight"] == Type.Q4_0
    )
    for part in ("ssm_conv1d.weight", "ssm_a", "ssm_d", "ssm_dt.bias", "ssm_norm.weight", "ffn_gate_inp.weight"):
        assert types[f"blk.0.{part}"] == Type.F32, part
    assert types["output_norm.weight"] == Type.F32
    assert dict(stock("Gemma-3-1B").stored())[stock("Gemma-3-1B").tensors[0]] == Type.Q8_0  # 1152 is no multiple of 256


@pytest.mark.parametrize("name", kinds())
def test_a_recipe_makes_the_same_file(tmp_path: Path, name: str) -> None:
    shape = tiny(kinds()[name]).shape
    assert isinstance(shape, Decoder)
    whole = write_stock_model(shape.model(), RandomWeights(), tmp_path / "whole")
    recipe = write_stock_model(shape.model(), RandomWeights(), tmp_path / "recipe", recipe=True)
    assert recipe.file == whole.file
    assert recipe.recipe is not None
    assert recipe.recipe.size < 50_000


def test_a_file_says_what_the_model_is(tmp_path: Path) -> None:
    shape = tiny(REFERENCES["Granite-4.0-H-350M"]).shape
    assert isinstance(shape, Decoder)
    write_stock_model(shape.model(), RandomWeights(), tmp_path / "model")
    fields = GGUFReader(tmp_path / "model").fields
    assert fields["general.architecture"].contents() == "granitehybrid"
    assert fields["granitehybrid.attention.head_count_kv"].contents() == [0, 2, 0, 2]
    assert fields["granitehybrid.rope.scaling.finetuned"].contents() is False
    assert fields["granitehybrid.residual_scale"].contents() == pytest.approx(0.246)


def test_equal_models_have_equal_ids_and_others_do_not() -> None:
    assert stock("Qwen3-0.6B").id == stock("Qwen3-0.6B").id
    assert len({stock(name).id for name, model in REFERENCES.items() if not isinstance(model.shape, Layout)}) == 24


def test_names_are_found_in_any_case_and_wrong_ones_get_a_suggestion() -> None:
    assert find_reference("qwen3-0.6b").name == "Qwen3-0.6B"
    with pytest.raises(UnknownName, match=r"did you mean 'Qwen3-1\.7B'"):
        find_reference("Qwen-1.7B")


def test_models_of_no_stock_architecture_need_our_build() -> None:
    patched = {name for name, model in REFERENCES.items() if model.patched}
    assert patched == {"PLM-1.8B-latent", "Zebra-Llama-1B-8MLA", "Zebra-Llama-3B-14MLA", "LFM3-1.7B"}
    assert REFERENCES["PLM-1.8B-latent"].parameters == REFERENCES["PLM-1.8B"].parameters
