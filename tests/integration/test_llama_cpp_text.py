"""Text of real files on the real library."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.measure.runtimes.llama_cpp.binding import generate
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.model.nn.model import Model
from nas.model.nn.weights import load_weights
from nas.testing.planted_faults import checkpoint
from nas.train.release.files import write_files
from nas.train.release.options import FileOptions
from nas.train.release.tokenizer import byte_tokenizer

STOCK = "d64 v256 ffn=swiglu:96 [C3 A4/2]"
PATCHED = "d64 v256 ffn=swiglu:96 [C3 M16 A4/2]"


@pytest.mark.parametrize("text", [STOCK, PATCHED])
def test_likeliest_bytes_are_pytorchs(llama_build: Build, patched_build: Build, tmp_path: Path, text: str) -> None:
    layout = Layout.parse(text)
    trained = checkpoint(layout, tmp_path / "weights")
    LLAMA_CPP.export(layout, "f32", trained, tmp_path / "m.gguf")
    written = generate(tmp_path / "m.gguf", b"The ", 24, temperature=0)
    model = Model(layout, seed=None).eval()
    load_weights(model, tmp_path / "weights")
    ids = list(b"The ")
    with torch.no_grad():
        while len(ids) < 28:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert written == bytes(ids[4:])


@torch.no_grad()
def test_bits_per_byte_are_pytorchs(llama_build: Build, tmp_path: Path) -> None:
    layout = Layout.parse("d64 v300 ffn=swiglu:96 [C3 A4/2]")
    trained, tokenizer = checkpoint(layout, tmp_path / "weights"), byte_tokenizer(layout.vocab)
    options = FileOptions(name="m", gguf=("f32",), transformers=False, dtype="float32")
    write_files(tmp_path / "out", layout, trained, options, print)
    texts = ["A text of some bytes, größer than a window. " * 20, "short <|im_end|>"]
    scored = LLAMA_CPP.bits_per_byte(tmp_path / "out/gguf/m-F32.gguf", texts, 2)
    model = Model(layout, seed=None).eval()
    load_weights(model, tmp_path / "weights")
    nats = 0.0
    for text in texts:
        ids = torch.tensor([tokenizer.special["<|startoftext|>"], *text.encode()])
        for start in range(0, len(ids) - 1, 512):
            window = ids[start : start + 513]
            nats += float(torch.nn.functional.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum"))
    assert scored == pytest.approx(nats / math.log(2) / sum(len(text.encode()) for text in texts), rel=1e-4)


def test_a_file_for_measuring_alone_has_no_text_to_score(llama_build: Build, tmp_path: Path) -> None:
    layout = Layout.parse(STOCK)
    LLAMA_CPP.export(layout, "f32", checkpoint(layout, tmp_path / "weights"), tmp_path / "m.gguf")
    with pytest.raises(Unsupported, match="holds no tokenizer"):
        LLAMA_CPP.bits_per_byte(tmp_path / "m.gguf", ["text"], 1)


def test_command_prints_text_without_control_characters(llama_build: Build, tmp_path: Path) -> None:
    layout = Layout.parse(STOCK)
    LLAMA_CPP.export(layout, "q4_0", checkpoint(layout, tmp_path / "weights"), tmp_path / "m.gguf")
    start = "from nas.cli.main import main; main()"
    argv = [sys.executable, "-c", start, "generate", str(tmp_path / "m.gguf"), "--prompt", "Once", "--tokens", "80"]
    plain = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    assert plain.startswith("Once")
    assert all(c.isprintable() or c in "\n\t" for c in plain)
    output = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=60, check=True).stdout
    again = json.loads(output)
    assert again["prompt"] == "Once" and 0 < len(again["text"]) <= 80
