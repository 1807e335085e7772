"""Late-interaction models as GGUF files: llama.cpp's vectors are torch's, and the file indexes and searches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_runner import nas
from retrieval_lab import LAYOUT, texts, write_lines, write_model
from safetensors.torch import load_file, save_file
from upstream_converter import Converter

from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.train.retrieval.gguf import open_encoder, write_gguf_retriever

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["the cat", "", "größer " * 40, "  on the mat <|im_end|>\n\tx", "日本語"]
LAYOUTS = {
    "lfm2": LAYOUT,
    "qwen3": Layout.parse("d64 v320 untied ffn=swiglu:96 [A4/2 A4/2]"),
    "hilnas": Layout.parse("d64 v320 ffn=swiglu:96 [C3 M8(expand=1,heads=4) W4/2@8]"),
}
STOCK = """
import json, sys
import llama_cpp

model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
print(json.dumps([model.tokenize(text.encode(), add_bos=True, special=True) for text in json.load(sys.stdin)]))
"""


@pytest.mark.parametrize(("arch", "bidirectional"), [*((arch, False) for arch in LAYOUTS), ("lfm2", True)])
def test_vectors_are_those_of_torch(
    arch: str, bidirectional: bool, tmp_path: Path, llama_build: Build, patched_build: Build
) -> None:
    write_model(tmp_path / "model", LAYOUTS[arch], lengths=(32, 64), bidirectional=bidirectional)
    torchs = open_encoder(tmp_path / "model")
    for quantisation in ("f32", "f16"):
        path = tmp_path / f"{quantisation}.gguf"
        write_gguf_retriever(tmp_path / "model", quantisation, path, "finder")
        file, encoder = GgufFile.read(path), open_encoder(path)
        assert file.fields["general.architecture"] == arch and ("dense_2.weight" in file.tensors) == (arch == "lfm2")
        assert (encoder.width, encoder.tokens.lengths) == (16, (32, 64))
        for candidate, reference in ((encoder.queries, torchs.queries), (encoder.documents, torchs.documents)):
            for rows, expected in zip(candidate(TEXTS), reference(TEXTS), strict=True):
                np.testing.assert_allclose(rows, expected, atol=1e-3)


def test_a_quantised_file_has_near_vectors(tmp_path: Path, llama_build: Build) -> None:
    write_model(tmp_path / "model")
    expected = np.concatenate(open_encoder(tmp_path / "model").documents(TEXTS))
    nearness = {}
    for quantisation in ("q4_0", "q8_0"):
        path = tmp_path / f"{quantisation}.gguf"
        write_gguf_retriever(tmp_path / "model", quantisation, path, "finder")
        nearness[quantisation] = (np.concatenate(open_encoder(path).documents(TEXTS)) * expected).sum(1).min()
    assert 0.9 < nearness["q4_0"] < 0.999 < nearness["q8_0"]


def test_llama_cpp_reads_the_same_tokens(tmp_path: Path, llama_build: Build) -> None:
    _, tokens = write_model(tmp_path / "model")
    write_gguf_retriever(tmp_path / "model", "f32", tmp_path / "m.gguf", "finder")
    plain = [text for text in TEXTS if "<|" not in text]  # it reads all special tokens, not the markers alone
    done = subprocess.run(
        [sys.executable, "-c", STOCK, str(tmp_path / "m.gguf")],
        env=os.environ | {"LLAMA_CPP_LIB_PATH": str(llama_build.folder)},
        input=json.dumps([f"[D] {text}" for text in plain]),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=120,
    )
    batch = tokens.documents(plain)
    assert json.loads(done.stdout) == [row[mask].tolist() for row, mask in zip(*batch, strict=True)]


def test_the_file_is_that_of_the_converter(tmp_path: Path, llama_build: Build) -> None:
    """Upstream converts a folder that names the class without a head, its tensors without that class's prefix."""
    write_model(tmp_path / "model")
    write_gguf_retriever(tmp_path / "model", "f32", tmp_path / "ours.gguf", "finder")
    config, weights = tmp_path / "model" / "config.json", tmp_path / "model" / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["Lfm2Model"]}))
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(weights).items()}, weights)
    with Converter(tmp_path / "converter") as converter:
        converter.convert(tmp_path / "model", tmp_path / "theirs.gguf", pre="qwen2")
    candidate, reference = GgufFile.read(tmp_path / "ours.gguf"), GgufFile.read(tmp_path / "theirs.gguf")
    assert candidate.tensors.keys() == reference.tensors.keys()
    for name in candidate.tensors:
        np.testing.assert_array_equal(candidate.values(name), reference.values(name), err_msg=name)
    assert candidate.fields["lfm2.embedding_length_out"] == reference.fields["lfm2.embedding_length_out"] == 16


def test_the_commands_write_index_and_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", lengths=(16, 64))
    write_lines(tmp_path / "documents.jsonl", [{"id": f"d{i}", "text": text} for i, text in enumerate(texts(300))])
    assert nas("family", "gguf", "model", "-o", "m.gguf", "-q", "f16").code == 0
    assert nas("family", "gguf", "model", "-o", "m2.gguf", "-q", "q9").code != 0
    hits = {}
    for model, index in (("model", "index"), ("m.gguf", "gguf-index")):
        assert nas("family", "index", model, "documents.jsonl", "-o", index).code == 0
        hits[index] = json.loads(nas("family", "search", index, "cat on the mat", "--json").out)["hits"]
    for torch_hit, gguf_hit in zip(*hits.values(), strict=True):
        np.testing.assert_allclose(torch_hit["score"], gguf_hit["score"], atol=0.02)
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:-1] + b"x")
    assert "not the model" in nas("family", "search", "gguf-index", "cat").err


def test_only_lfm2_is_bidirectional(tmp_path: Path, llama_build: Build) -> None:
    write_model(tmp_path / "model", LAYOUTS["qwen3"], bidirectional=True)
    with pytest.raises(Unsupported, match="bidirectional qwen3"):
        write_gguf_retriever(tmp_path / "model", "f32", tmp_path / "m.gguf", "finder")


def test_other_files_are_refused(tmp_path: Path, llama_build: Build) -> None:
    write_model(tmp_path / "model")
    path = tmp_path / "m.gguf"
    write_gguf_retriever(tmp_path / "model", "f32", path, "finder")
    content = path.read_bytes()
    for old, new, problem in (
        (b"hilnas.retrieval", b"hilnas.retrieved", "no late-interaction model"),
        (b'"skiplist_words": []', b'"skiplist_words": 00', "damaged"),
        (b'"skiplist_words": []', b'"skiplist_words":100', "words that are skipped"),
        (b"dense_2.weight", b"dense_7.weight", "damaged"),
    ):
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))
        with pytest.raises(InvalidInput, match=problem):
            open_encoder(path)
