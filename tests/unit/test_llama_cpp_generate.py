"""`nas generate` says what it cannot use before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runner import nas

from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP

pytestmark = pytest.mark.usefixtures("home")


def model(folder: Path, vocab: int, mixers: str = "C3 A4/2") -> str:
    layout = Layout.parse(f"d64 v{vocab} ffn=swiglu:96 [{mixers}]")
    LLAMA_CPP.export(layout, "f32", RandomWeights(), folder / "m.gguf")
    return str(folder / "m.gguf")


def test_missing_file(tmp_path: Path) -> None:
    done = nas("generate", str(tmp_path / "nothing.gguf"))
    assert done.code == 3 and "no such file" in done.err


@pytest.mark.parametrize("content", [b"", b"hello, world", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16])
def test_file_that_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    done = nas("generate", str(tmp_path / "m.gguf"))
    assert done.code == 3 and "not a GGUF file" in done.err


def test_tokens_that_are_no_bytes(tmp_path: Path) -> None:
    done = nas("generate", model(tmp_path, 512))
    assert done.code == 3 and "holds no tokenizer, and its tokens are no bytes (512)" in done.err


def test_empty_prompt(tmp_path: Path) -> None:
    done = nas("generate", model(tmp_path, 256), "--prompt", "")
    assert done.code == 3 and "--prompt" in done.err


@pytest.mark.parametrize(("mixers", "command"), [("C3 A4/2", "llama.cpp`"), ("C3 M16", "llama.cpp --patched`")])
def test_missing_build_names_the_command(tmp_path: Path, mixers: str, command: str) -> None:
    done = nas("generate", model(tmp_path, 256, mixers))
    assert done.code == 4 and f"nas runtime build {command}" in done.err
