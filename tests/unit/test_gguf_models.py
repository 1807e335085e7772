"""GGUF files are imported with weights and tokenizer; bad ones are refused in one line, and nothing is written."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from cli_runner import nas
from safetensors.torch import load_file
from tokenizer_lab import FORMS, TEXT, write_model_tokenizer, write_sentencepiece_form

from nas.core.canonical import sha256_of
from nas.core.errors import InvalidInput, NasError, Unsupported
from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.llama_cpp.gguf_file import RETRIEVAL, GgufFile, StoredTensor
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.writer import PROJECTION
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights
from nas.train.adapt.checkpoints import import_model, read_model
from nas.train.adapt.gguf_model import _ARCHITECTURES, GgufModel
from nas.train.release.found_tokenizer import beside, found_tokenizer
from nas.train.release.gguf_tokenizer import tokenizer_of_gguf
from nas.train.release.model_tokenizer import read_model_tokenizer
from nas.train.retrieval.gguf import GgufEncoder

LAYOUTS = {
    "llama": "d64 v300 untied ffn=swiglu:96 [A4/2(qk_norm=0,rope_theta=50000)*2]",
    "qwen3": "d64 v300 ffn=swiglu:96 [A4/2:32*2]",
    "lfm2": "d64 v300 ffn=swiglu:96 [C3 A4/2 C3]",
    "lfm2-part": "d64 v300 ffn=swiglu:96 [C3 A4/2(rope_dim=8) C3]",
    "qwen3-linear": "d64 v300 ffn=swiglu:96 [A4/2:32(rope_factor=4)*2]",
    "arcee": "d64 v300 ffn=relu2:96 [A4/2(qk_norm=0)*2]",
    "gemma": "d64 v300 ffn=geglu:96 [A4/1:32(qk_norm=0,rope_theta=10000)*2]",
    "gemma2": "d64 v300 norms=both softcap=3 ffn=geglu:96 [W4/2@8(qk_norm=0,softcap=2) A4/2(qk_norm=0,softcap=2)]",
    "gemma3": "d64 v300 norms=both ffn=geglu:96 [W4/1@8:32(rope_theta=100)*2 A4/1:32(rope_factor=8)]",
    "gemma3-whole": "d64 v300 untied norms=both softcap=4 ffn=geglu:96 [A4/1:32*2]",
    "exaone4": "d64 v300 norms=behind ffn=swiglu:96 [A4/2*2]",
    "olmo2": "d64 v300 untied norms=behind ffn=swiglu:96 [A4/4(qk_norm_wide=1)*2]",
    "olmo2-windows": (
        "d64 v300 untied norms=behind ffn=swiglu:96 [W4/4@8(qk_norm_wide=1) A4/4(qk_norm_wide=1,rope_factor=4)]"
    ),
    "phi3": "d64 v300 untied ffn=swiglu:96 [A4/4(qk_norm=0,rope_dim=8)*2]",
    "phi3-long": "d64 v300 ffn=swiglu:96 [A4/2(qk_norm=0,rope_dim=8,rope_long=64)*2]",
    "lfm2moe": "d64 v300 ffn=moe:4x2:32 [C3+swiglu:96 A4/2 C3]",
}


def saved(layout: Layout, folder: Path) -> Checkpoint:
    path = folder / "w.safetensors"
    model = Model(layout, seed=3)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel()))
    save_weights(model, path)
    return Checkpoint(path, sha256_of(path))


@pytest.mark.parametrize("arch", LAYOUTS)
@pytest.mark.parametrize("quantisation", ["f32", "f16"])
def test_what_is_exported_comes_in_again(arch: str, quantisation: Any, tmp_path: Path) -> None:
    layout = Layout.parse(LAYOUTS[arch])
    checkpoint = saved(layout, tmp_path)
    assert LLAMA_CPP.export(layout, quantisation, checkpoint, tmp_path / "m.gguf").arch == arch.partition("-")[0]
    assert import_model(tmp_path / "m.gguf", tmp_path / "again.safetensors").layout == layout
    before, after = load_file(checkpoint.path), load_file(tmp_path / "again.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name == "embed.weight" and arch.startswith("gemma"):  # the file's are divided by the root of the width
            assert torch.allclose(after[name], tensor, rtol=1e-6 if quantisation == "f32" else 2**-10, atol=1e-6)
            continue
        rounded = tensor.half().float() if quantisation == "f16" and tensor.dim() > 1 else tensor
        assert torch.equal(after[name], rounded) or torch.equal(after[name], tensor), name


def write(
    path: Path,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    queries: tuple[int, ...] = (64, 64),
    **options: Any,
) -> Path:
    """Writes a llama of one layer as its format has it; `change` adds keys and tensors."""
    writer = gguf.GGUFWriter(str(path), "llama", **options)
    for name, value in {"embedding_length": 64, "block_count": 1, "feed_forward_length": 96,
                        "attention.head_count": 4}.items():  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    change(writer)
    shapes = {"attn_q": queries, "attn_k": (64, 64), "attn_v": (64, 64), "attn_output": (64, 64),
              "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96), "attn_norm": (64,),
              "ffn_norm": (64,)}  # fmt: skip
    tensors = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    for number, (name, shape) in enumerate(
        {"token_embd.weight": (300, 64), **tensors, "output_norm.weight": (64,)}.items()
    ):
        writer.add_tensor(name, np.random.default_rng(number).standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_shards_are_one_model(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf")
    write(tmp_path / "s.gguf", split_max_tensors=5)
    first, *others = sorted(tmp_path.glob("s-*.gguf"))
    assert len(others) == 2
    import_model(whole, tmp_path / "a.safetensors")
    import_model(first, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    with pytest.raises(InvalidInput, match="name the first one"):
        GgufFile.read(first.rename(tmp_path / "renamed.gguf"))
    (tmp_path / "renamed.gguf").rename(first)
    last = others[-1].read_bytes()
    others[-1].write_bytes(first.read_bytes())
    with pytest.raises(InvalidInput, match="is not shard 3 of 3"):
        GgufFile.read(first)
    others[-1].write_bytes(last[:-100])
    with pytest.raises(InvalidInput, match="behind the end"):
        GgufFile.read(first)
    others[-1].unlink()
    with pytest.raises(InvalidInput, match="no such file"):
        GgufFile.read(first)
    others[-1].symlink_to(others[-1])
    with pytest.raises(InvalidInput, match=r"no such file|levels of symbolic links"):
        GgufFile.read(first)


def head(tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"GGML" + bytes(4096), "does not begin with GGUF"),
        (head(1 << 60, 1 << 60), "tensors and"),
        (head(1 << 16, 1 << 11), "ends early"),
        (head(0, 1, struct.pack("<Q", 1 << 62)), "ends early"),
        (head(0, 1, text("a") + struct.pack("<IIQ", 9, 8, 1 << 50)), "an array of"),
        (head(0, 1, text("a") + struct.pack("<IIQ", 9, 5, 1 << 21)), "ends early"),
        (head(0, 1, text("a") + struct.pack("<IIQIQ", 9, 9, 1, 9, 1)), "an array of"),
        (head(0, 1, text("a") + struct.pack("<I", 77)), "unknown type 77"),
        (head(1, 0, text("t") + struct.pack("<I", 1 << 30)), "dimensions"),
        (head(1, 0, text("t") + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0)), "behind the end"),
        (head(1, 0, text("t") + struct.pack("<IQIQ", 1, 32, 0, 1 << 63)), "behind the end"),
        (head(1, 0, text("t") + struct.pack("<IQIQ", 1, 33, 2, 0)), "no multiple of 32"),
        (head(0, 1, text("a") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"), "no UTF-8"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "byte order"),
    ],
)
def test_bad_headers_cost_a_line(content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    start = time.process_time()
    done = nas("import", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "out.safetensors"))
    assert done.code == 3 and problem in done.err and len(done.err.strip().splitlines()) == 1, done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf"]
    assert time.process_time() - start < 60


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda writer: writer.add_block_count(0), "block_count must be in"),
        (lambda writer: writer.add_uint32("llama.mystery", 1), "llama.mystery"),
        (
            lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "original_max_position_embeddings",
        ),
        (lambda writer: writer.add_rope_dimension_count(8), "part of each head"),
        (lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32)), "biases"),
        (lambda writer: writer.add_tensor("blk.0.extra.weight", np.zeros(64, np.float32)), "blk.0.extra.weight"),
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", np.array([9, 1, 5, 2, 1, 1, 1, 1], np.float32)),
            "factors",
        ),
    ],
)
def test_what_is_not_read_is_named(change: Callable[[gguf.GGUFWriter], None], problem: str, tmp_path: Path) -> None:
    def changed(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.block_count", None) if problem.startswith("block") else None
        change(writer)

    write(tmp_path / "m.gguf", changed)
    done = nas("import", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "out.safetensors"))
    assert done.code == 3 and problem in done.err, done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf"]


@pytest.mark.parametrize(
    ("arch", "keys"),
    [
        ("llama", {"embedding_length": "64"}),
        ("lfm2", {}),
        ("granitehybrid", {"attention.head_count_kv": [], "ssm.inner_size": 128}),
    ],
)
def test_keys_of_the_wrong_kind_are_refused(arch: str, keys: dict[str, Any]) -> None:
    usual = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4}
    fields = {"general.architecture": arch} | {f"{arch}.{name}": value for name, value in (usual | keys).items()}
    path = Path("m.gguf")
    tensors = {"token_embd.weight": StoredTensor(path, 0, (300, 64), 0, 0)}
    with pytest.raises(InvalidInput, match=r"m\.gguf: has keys of the wrong kind"):
        GgufModel(GgufFile((path,), fields, tensors))


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "rwkv7")
    writer.add_tensor("token_embd.weight", np.ones((8, 8), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(Unsupported, match="'rwkv7' is not read"):
        read_model(tmp_path / "m.gguf")


def test_weights_that_are_no_number(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    stored = GgufFile.read(path).tensors["blk.0.ffn_up.weight"]
    content = bytearray(path.read_bytes())
    content[stored.offset : stored.offset + 4] = struct.pack("<f", float("nan"))
    path.write_bytes(content)
    done = nas("import", str(path), "-o", str(tmp_path / "out.safetensors"))
    assert done.code == 3 and "holds NaN or infinity" in done.err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["m.gguf"]


@pytest.mark.parametrize("shape", [(64,), (4096,), (4, 16, 64)])
def test_a_tensor_of_another_rank_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", queries=shape)
    with pytest.raises(InvalidInput, match=r"m\.gguf: .*q_proj"):
        import_model(path, tmp_path / "out.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("form", FORMS)
def test_a_tokenizer_goes_out_and_comes_in(form: str, tmp_path: Path) -> None:
    layout = Layout.parse("d64 v420 ffn=swiglu:96 [A4/2*2]")
    original = read_model_tokenizer(write_model_tokenizer(tmp_path / "in", FORMS[form], TEXT, 400))
    checkpoint = saved(layout, tmp_path)
    LLAMA_CPP.export_trained(layout, "f32", checkpoint, tmp_path / "m.gguf", "m", original.vocabulary(420), 1024)
    bundle = found_tokenizer(tmp_path / "m.gguf")
    again = bundle.tokenizer
    for sample in (*TEXT, "<|im_start|>user\nHi 12345<|im_end|>", "<think> a </think>", "a\u0301 \x00 \U0001f600"):
        if "\u0301" not in sample or not FORMS[form].nfc:
            assert again.tokenizer.encode(sample).ids == original.tokenizer.encode(sample).ids, sample
    assert again.chat_templates == original.chat_templates and again.ids() == original.ids()
    assert bundle.context == 1024


@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece_goes_out_and_comes_in(prefix: bool, tmp_path: Path) -> None:
    layout = Layout.parse("d64 v420 ffn=swiglu:96 [A4/2*2]")
    path = write_sentencepiece_form(tmp_path / "in", prefix)
    about = json.loads(path.read_text())
    about["added_tokens"].append(about["added_tokens"][0] | {"id": 340, "content": 9 * "▁", "special": False})
    path.write_text(json.dumps(about))
    original = read_model_tokenizer(path)
    LLAMA_CPP.export_trained(
        layout, "f32", saved(layout, tmp_path), tmp_path / "m.gguf", "m", original.vocabulary(420), 1024
    )
    assert GgufFile.read(tmp_path / "m.gguf").fields["tokenizer.ggml.model"] == "llama"
    again = found_tokenizer(tmp_path / "m.gguf").tokenizer
    for sample in (*TEXT, "größer 😀 \x07", "a<eos>b", ""):
        expected = original.tokenizer.encode(sample).ids
        assert again.tokenizer.encode(sample).ids == expected, sample
        assert again.tokenizer.decode(expected) == original.tokenizer.decode(expected)
    blanks = again.tokenizer.encode(f"<eos>{9 * ' '}<eos>").ids
    assert blanks == [1, 340, 1], "an added token is found before blanks are marked"
    assert again.ids() == original.ids()


def test_sentencepiece_with_scores_and_bytes(tmp_path: Path) -> None:
    reference = read_model_tokenizer(write_sentencepiece_form(tmp_path / "in"))
    ids = reference.tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [
        gguf.TokenType.BYTE if token.startswith("<0x") else gguf.TokenType.UNKNOWN if token == "<unk>"
        else gguf.TokenType.CONTROL if token in ("<pad>", "<eos>", "<bos>") else gguf.TokenType.NORMAL
        for token in tokens
    ]  # fmt: skip

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(ids["<bos>"])
        writer.add_eos_token_id(ids["<eos>"])
        writer.add_add_space_prefix(False)

    read = tokenizer_of_gguf(GgufFile.read(write(tmp_path / "m.gguf", add)))
    for sample in (*TEXT, "größer 😀 \x07"):
        expected = reference.tokenizer.encode(sample, add_special_tokens=False).ids
        assert read.tokenizer.encode(sample).ids == [ids["<bos>"], *expected]
        assert read.tokenizer.decode(expected) == sample


def test_ids_and_ends_that_a_file_does_not_name_are_those_of_llama_cpp(tmp_path: Path) -> None:
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "<|eom_id|>", "<|end|>"]
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", *words]
    types = [2, 3, 3, 1, 1, *[6] * 256, 3, 1]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_token_types(types)

    read = tokenizer_of_gguf(GgufFile.read(write(tmp_path / "m.gguf", add)))
    assert read.tokenizer.encode("a").ids[0] == 1
    assert read.ids()["eos"] == 2 and set(read.ends) == {2, tokens.index("<|eom_id|>")}


def test_texts_that_begin_with_an_unused_token_are_refused(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", "a"])
        writer.add_token_scores([0.0, -1.0, -2.0, -3.0])
        writer.add_token_types([2, 5, 3, 1])

    with pytest.raises(InvalidInput, match=r"m\.gguf: its tokenizer begins texts with '<s>', which is an unused token"):
        tokenizer_of_gguf(GgufFile.read(write(tmp_path / "m.gguf", add)))


def test_a_token_whose_parts_take_long_to_try_is_refused(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "a", "a" * 2000])
        writer.add_token_scores([0.0, -1.0, -2.0])
        writer.add_token_types([2, 1, 1])

    with pytest.raises(InvalidInput, match=r"its tokenizer is damaged: a token has more than 1,024 characters"):
        tokenizer_of_gguf(GgufFile.read(write(tmp_path / "m.gguf", add)))


@pytest.mark.parametrize(("settings", "rows"), [("[" * 100_000, (300, 64)), ("{}", (300,))])
def test_a_damaged_late_interaction_model_is_refused_in_a_line(
    settings: str, rows: tuple[int, ...], tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_string(RETRIEVAL, settings)
    writer.add_array(PROJECTION, [1.0] * 64)
    writer.add_tensor("token_embd.weight", np.ones(rows, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(InvalidInput, match=r"m\.gguf: it is damaged"):
        GgufEncoder(tmp_path / "m.gguf")


def test_a_first_token_that_no_text_can_begin_with_is_refused_in_a_line(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "a:b", "</s>", "a"])
        writer.add_token_scores([0.0, -1.0, -2.0, -3.0])
        writer.add_token_types([2, 3, 3, 1])

    with pytest.raises(InvalidInput, match=r"m\.gguf: its tokenizer is damaged: .*a:b"):
        tokenizer_of_gguf(GgufFile.read(write(tmp_path / "m.gguf", add)))


@pytest.mark.parametrize(
    ("arch", "depth", "size"), [("gemma2", 46, 64), ("gemma2", 42, 128), ("gemma3", 62, 64), ("gemma3", 48, 128)]
)
def test_scores_of_the_largest_gemma_are_divided_by_another_size(arch: str, depth: int, size: int) -> None:
    config = {"num_hidden_layers": depth, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 128}
    keys: dict[str, Any] = {}
    settings = _ARCHITECTURES[arch].settings(keys.get, config | {"rope_parameters": {"rope_theta": 1e4}})
    assert settings["query_pre_attn_scalar"] == size


def test_import_keeps_the_tokenizer_and_export_takes_it(tmp_path: Path) -> None:
    layout = Layout.parse("d64 v420 ffn=swiglu:96 [A4/2*2]")
    original = read_model_tokenizer(write_model_tokenizer(tmp_path / "in", FORMS["qwen3"], TEXT, 400))
    checkpoint = saved(layout, tmp_path)
    LLAMA_CPP.export_trained(layout, "f32", checkpoint, tmp_path / "m.gguf", "m", original.vocabulary(420), 2048)
    done = nas("import", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "c.safetensors"))
    assert done.code == 0 and "chat template default, of" in done.err, done.err
    assert beside(tmp_path / "c.safetensors").is_dir() and "c.tokenizer" in done.out
    done = nas("export", layout.format(), "--checkpoint", str(tmp_path / "c.safetensors"), "-q", "f32", "-o",
               str(tmp_path / "n.gguf"))  # fmt: skip
    assert done.code == 0 and "c.tokenizer" in done.err, done.err
    first, second = GgufFile.read(tmp_path / "m.gguf"), GgufFile.read(tmp_path / "n.gguf")
    assert dict(first.fields) | {"general.name": "n"} == dict(second.fields)
    done = nas(
        "export", layout.format(), "--checkpoint", str(checkpoint.path), "-q", "f32", "-o", str(tmp_path / "o.gguf")
    )
    assert done.code == 0 and "none: the file knows token ids only" in done.out


def test_a_tokenizer_that_is_not_read_does_not_stop_an_import(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")

    done = nas("import", str(write(tmp_path / "m.gguf", add)), "-o", str(tmp_path / "c.safetensors"))
    assert done.code == 0 and "of the kind 't5'" in done.out
    with pytest.raises(NasError, match="t5"):
        found_tokenizer(tmp_path / "m.gguf")
