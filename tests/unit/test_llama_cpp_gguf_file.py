"""Headers of GGUF files: what is no model that generates text is refused, with what helps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from nas.core.errors import InvalidInput, Unsupported
from nas.measure.runtimes.llama_cpp import binding
from nas.measure.runtimes.llama_cpp.gguf_file import Header, read_header
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP


def write(path: Path, arch: str, about: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> bytes:
    writer = gguf.GGUFWriter(str(path), arch)
    about(writer)
    writer.add_tensor("token_embd.weight", np.ones((64, 96), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_header_has_what_a_run_needs(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", "llama", lambda writer: writer.add_vocab_size(300))
    assert read_header(tmp_path / "a.gguf") == Header("llama", 300, "none")
    write(tmp_path / "b.gguf", "lfm2", lambda writer: writer.add_tokenizer_model("gpt2"))
    assert read_header(tmp_path / "b.gguf") == Header("lfm2", None, "gpt2")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: content[:-6000], "incomplete or damaged: download it again"),
        (lambda content: content[:100], "incomplete or damaged"),
        (lambda content: b"", "it is empty"),
        (lambda content: bytes(4096), "incomplete or damaged"),
        (lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "git lfs pull"),
        (lambda content: b" <!DOCTYPE html><html></html>", "it is a web page"),
    ],
)
def test_what_a_download_left_is_named(change: Callable[[bytes], bytes], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(change(write(path, "llama")))
    with pytest.raises(InvalidInput, match=rf"a\.gguf: not a GGUF file: .*{problem}"):
        LLAMA_CPP.needs_patched(path)


def test_files_of_something_else_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for arch, about, problem in (
        ("clip", lambda writer: writer.add_type("mmproj"), r"of type mmproj \(clip\)"),
        ("llama", lambda writer: writer.add_type("adapter"), r"of type adapter \(llama\)"),
        ("bert", lambda writer: writer.add_causal_attention(False), "bert generates no text"),
    ):
        write(path, arch, about)
        with pytest.raises(InvalidInput, match=problem):
            read_header(path)


def test_bits_that_are_no_number_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.gguf", "llama", lambda writer: writer.add_tokenizer_model("gpt2"))
    monkeypatch.setattr(binding, "run_command", lambda *_, **__: math.nan)
    build: object = None
    with pytest.raises(Exception, match=r"a\.gguf: its logits of the text hold NaN or infinity"):
        binding.bits_per_byte(build, tmp_path / "a.gguf", ["text"], 1)  # type: ignore[arg-type]


def test_a_text_that_is_too_short_is_no_failure_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.gguf", "llama", lambda writer: writer.add_tokenizer_model("gpt2"))
    monkeypatch.setattr(binding, "run_command", lambda *_, **__: None)
    build: object = None
    with pytest.raises(Unsupported, match="the text is too short"):
        binding.bits_per_byte(build, tmp_path / "a.gguf", ["a"], 1)  # type: ignore[arg-type]
