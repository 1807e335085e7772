"""`nas adapt` with several quantisations: blocks and bits are chosen together, and files are as chosen."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from adapt_lab import FEW, LAYOUT, adaptation, write_lab
from gguf import GGMLQuantizationType

from nas.core import paths
from nas.core.block import Block
from nas.core.canonical import sha256_of
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError, UnknownName
from nas.core.layout import Layout
from nas.core.quantisation import Quantisation
from nas.core.replacement import Slot, Stored, block_name, parsed, with_blocks
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights
from nas.train.adapt.adapt import write_child
from nas.train.adapt.costs import replaced_by
from nas.train.adapt.device import FileBench
from nas.train.adapt.request import AdaptRequest
from nas.train.adapt.selection import select, total

BENCH = FileBench(cast(Any, SimpleNamespace(runtime="llama.cpp", deploy_quantisation="q8_0")))


def test_a_name_gives_parts_of_a_model_their_own_quantisation() -> None:
    mixed = Quantisation.parse("q8_0+embedding:f16+ffn:q4_0+ffn.0-1.5:f32")
    assert [mixed.at("ffn", layer) for layer in range(6)] == ["f32", "f32", "q4_0", "q4_0", "q4_0", "f32"]
    shares = Quantisation.parse("q8_0+ffn.1/3.3/3:q4_0+ffn.5:f16")
    kinds = [shares.at("ffn", layer, 6) for layer in range(6)]
    assert kinds == ["q4_0", "q4_0", "q8_0", "q8_0", "q4_0", "f16"] and shares.names == {"q8_0", "q4_0", "f16"}
    assert [shares.at("ffn", layer, 2) for layer in range(2)] == ["q4_0", "q8_0"]
    assert mixed.at("mixers", 1) == "q8_0" and mixed.at("embedding") == "f16"
    assert mixed.names == {"q8_0", "f16", "q4_0", "f32"} and mixed.depth == 6
    parts = {("embedding", None): "q8_0"} | {("ffn", layer): "q4_0" for layer in range(3)}
    parts |= {("mixers", layer): name for layer, name in enumerate(("q4_0", "q8_0", "q4_0"))}
    assert Quantisation.of("q8_0", parts) == "q8_0+mixers.0.2:q4_0+ffn:q4_0"
    assert Quantisation.of("q4_0", parts) == "q4_0+embedding:q8_0+mixers.1:q8_0"
    assert Quantisation.of("q8_0", {("ffn", layer): "q8_0" for layer in range(3)}) == "q8_0"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("q8_0+norms:q4_0", "unknown role of tensors"),
        ("q8_0+ffn", "names no quantisation"),
        ("q8_0+ffn.a:q4_0", "no layer or range of layers"),
        ("q8_0+ffn.3-1:q4_0", "no range"),
        ("q8_0+ffn.0-9999:q4_0", "no range"),
        ("q8_0+ffn.0.0-1:q4_0", "ffn.0 is named twice"),
        ("q8_0+embedding.0:q4_0", "is in no layer"),
        ("q8_0+ffn.0/3:q4_0", "counted from 1"),
        ("q8_0+ffn.1/:q4_0", "no share of the depth"),
        ("q8_0+ffn.1/2:q4_0+ffn.1/2:f16", "named twice"),
    ],
)
def test_parts_that_cannot_be_read_are_named(name: str, message: str) -> None:
    with pytest.raises(NasError, match=message):
        Quantisation.parse(name)
    with pytest.raises(NasError, match=message):
        Layout.parse(LAYOUT.format().replace("v320", f"v320 q={name}"))


def test_a_layout_has_the_layers_that_its_quantisation_names() -> None:
    assert Layout.parse("d64 v320 q=q8_0+ffn.2:q4_0 ffn=swiglu:128 [C3*3]").quantisation == "q8_0+ffn.2:q4_0"
    with pytest.raises(InvalidInput, match="names layer 3: the layout has 3 layers"):
        Layout.parse("d64 v320 q=q8_0+ffn.3:q4_0 ffn=swiglu:128 [C3*3]")
    with pytest.raises(UnknownName, match="q9"):
        LLAMA_CPP.require_quantisation("q8_0+ffn.2:q9")


def test_bits_move_with_their_blocks_where_a_layer_is_left_out() -> None:
    layout = Layout.parse("d64 v320 q=q8_0 ffn=swiglu:128 [A4/4:16*2 C3]")
    ffn = Slot(2, "ffn").block(layout)
    assert ffn is not None
    narrow = Stored(Block.parse("swiglu:64", "ffn"), "q4_0")
    choice = {Slot(0, "mixer"): None, Slot(0, "ffn"): None, Slot(1, "ffn"): Stored(ffn, "q4_0"), Slot(2, "ffn"): narrow}
    child, depths = with_blocks(layout, choice)
    assert depths == [1, 2] and child.quantisation == "q8_0+ffn:q4_0"
    child, _ = with_blocks(layout, {Slot(2, "ffn"): narrow})
    assert child.format() == "d64 v320 q=q8_0+ffn.2:q4_0 ffn=swiglu:128 [A4/4*2 C3+swiglu:64]"
    assert [parsed(block_name(one), "ffn") for one in (narrow, narrow.block, None)] == [narrow, narrow.block, None]


@pytest.mark.parametrize("text", ["A4/2:16", "C3", "M16", "swiglu:96", "moe:4x2:32"])
def test_a_block_is_rounded_as_in_a_file_of_the_model(text: str, tmp_path: Path, llama_build: Build) -> None:
    role = "ffn" if text.startswith(("swiglu", "moe")) else "mixer"
    body = f"[A4/2:16 A4/2:16+{text}]" if role == "ffn" else f"[A4/2:16 {text}]"
    model = Model(Layout.parse(f"d64 v320 ffn=swiglu:128 {body}"), seed=1)
    save_weights(model, tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model", sha256_of(tmp_path / "model"))
    whole = LLAMA_CPP.rounded(model.layout, "f32+mixers.1:q4_0+ffn.2/2:q4_k", checkpoint)
    prefix = "layers.1.ffn." if role == "ffn" else "layers.1.mixers.0."
    expected = {name: tensor for name, tensor in whole.state_dict().items() if name.startswith(prefix)}
    weights = {name.removeprefix(prefix): tensor for name, tensor in model.state_dict().items() if name in expected}
    block = Slot(1, "ffn" if role == "ffn" else "mixer").block(model.layout)
    assert block is not None
    rounded = LLAMA_CPP.rounded_block(model.layout, block, "q4_k" if role == "ffn" else "q4_0", weights)
    assert {prefix + name for name in rounded} == expected.keys()
    for name, tensor in rounded.items():
        assert torch.equal(tensor, expected[prefix + name])
    assert any(not torch.equal(tensor, weights[name]) for name, tensor in rounded.items())
    first = {name for name, tensor in whole.state_dict().items() if name.startswith("layers.0.")}
    assert first and all(torch.equal(whole.state_dict()[name], model.state_dict()[name]) for name in first)


def test_blocks_and_bits_are_chosen_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama_build: Build
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/runtimes").symlink_to(paths.cache() / "runtimes")
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    lab, names = write_lab(tmp_path / "lab"), ("q8_0", "q4_0")
    sizes = {q: BENCH.measure(Layout.parse(f"{LAYOUT}".replace("v320", f"v320 q={q}"))) for q in names}
    least, most = (sizes[name].figures["file_size"].value or 0.0 for name in ("q4_0", "q8_0"))
    assert least < most
    one = adaptation(
        lab,
        tmp_path / "out",
        tmp_path / "library",
        budget=f"file_size<={0.5 * (least + most)}MB",
        settings=FEW,
        bench=BENCH,
        quantisation=names,
    )
    report = one.run()
    child = Layout.parse(report["child"]["layout"])
    assert Layout.parse(report["teacher"]["layout"]).quantisation == "q8_0"
    assert "q4_0" in child.quantisation and report["child"]["measured"]["file_size"] <= 0.5 * (least + most)
    assert report["child"]["stored"]["bits_per_byte"] != report["child"]["bits_per_byte"]
    problem = one.choices.problem()
    for options in problem.options.values():
        original, lower = options[0], options[1]
        assert original.name.endswith(" q8_0") and lower.name == original.name.replace("q8_0", "q4_0")
        assert lower.loss > original.loss and lower.costs["file_size"] < 0
    picked = select(problem.options, problem.base, {"file_size": report["child"]["measured"]["file_size"]})
    assert picked is not None
    blocks_only = {
        slot: [option for option in options if option.name.endswith((" q8_0", "-", "no layer"))]
        for slot, options in problem.options.items()
    }
    apart = select(blocks_only, problem.base, {"file_size": report["child"]["measured"]["file_size"]})
    assert apart is not None and total(picked, problem.base)["loss"] < total(apart, problem.base)["loss"]
    assert with_blocks(one.layout, replaced_by(one.layout, picked))[0].quantisation
    written = write_child(one, report)
    (chosen,) = (Path(path) for path in written if "q8_0" in path.lower() and path.endswith(".gguf"))
    kinds = {tensor.kind for name, tensor in GgufFile.read(chosen).tensors.items() if name.startswith("blk.")}
    assert kinds >= {
        GGMLQuantizationType[name.upper()] for name in Quantisation.parse(child.quantisation).parts.values()
    }
    assert json.loads((tmp_path / "out/request.json").read_text())["quantisation"] == ["q8_0", "q4_0"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quantisation": ["q8_0", "q8_0"]}, "names one twice"),
        ({"quantisation": ["q8_0", "q4_0+ffn:q8_0"]}, "plain names"),
        ({"quantisation": ["q8_0+ffn:q4_0", "q4_0"]}, "plain names"),
        ({"quantisation": ["q8_0+ffn.1/3:q4_0", "q4_0"]}, "plain names"),
        ({"quantisation": ["q9"]}, "unknown quantisation of llama.cpp 'q9'"),
        ({"quantisation": ["q8_0", "q9"]}, "unknown quantisation of llama.cpp 'q9'"),
        ({"quantisation": ["q8_0", "q4_0"], "pairs": 4}, "not combined with pairs"),
    ],
)
def test_choices_that_cannot_be_are_refused(keys: dict[str, Any], message: str) -> None:
    paths = {"model": Path("m"), "corpus": (Path("c"),), "output": Path("o"), "budget": ("file_size<=1MB",)}
    with pytest.raises(NasError, match=message):
        AdaptRequest(**paths, **keys).bits  # noqa: B018 - the property checks


def test_no_build_to_round_with_is_named_before_anything_is_trained(tmp_path: Path, home: Path) -> None:
    lab, library = write_lab(tmp_path / "lab"), tmp_path / "library"
    with pytest.raises(InfrastructureFailed, match=r"nas runtime build llama\.cpp"):
        adaptation(lab, tmp_path / "out", library, settings=FEW, bench=BENCH, quantisation=("q8_0", "q4_0"))
    assert not list(library.rglob("*.safetensors"))


def test_one_quantisation_chooses_nothing() -> None:
    paths = {"model": Path("m"), "corpus": (Path("c"),), "output": Path("o"), "budget": ("file_size<=1MB",)}
    assert AdaptRequest(**paths, quantisation="q8_0").quantisation == ("q8_0",)
    assert AdaptRequest(**paths).quantisation is None
    assert AdaptRequest(**paths, quantisation="q8_0").bits == AdaptRequest(**paths).bits == ()
    assert AdaptRequest(**paths, quantisation=("q8_0+embedding:q4_0", "q4_0")).bits == ("q8_0", "q4_0")
