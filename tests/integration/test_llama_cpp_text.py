"""Text of real files on the real library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nas.core.layout import Layout
from nas.nn.model import Model
from nas.nn.weights import load_weights
from nas.runtimes.llama_cpp.binding import generate
from nas.runtimes.llama_cpp.builds import Build
from nas.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.testing.planted_faults import checkpoint

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


def test_command_prints_text_without_control_characters(llama_build: Build, tmp_path: Path) -> None:
    layout = Layout.parse(STOCK)
    LLAMA_CPP.export(layout, "q4_0", checkpoint(layout, tmp_path / "weights"), tmp_path / "m.gguf")
    start = "from nas.cli.main import main; main()"
    argv = [sys.executable, "-c", start, "generate", str(tmp_path / "m.gguf"), "--prompt", "Once", "--tokens", "80"]
    plain = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    assert plain.startswith("Once")
    assert all(c.isprintable() or c in "\n\t" for c in plain)
    shown = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=60, check=True).stdout
    again = json.loads(shown)
    assert again["prompt"] == "Once" and 0 < len(again["text"]) <= 80
