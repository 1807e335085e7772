"""What ends llama.cpp's processes, and the predictions that files are compared by. No model is run."""

from __future__ import annotations

import ctypes
import errno
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from nas.core.errors import CandidateFailed, InfrastructureFailed, NasError
from nas.measure.runtimes.llama_cpp import binding


@pytest.mark.parametrize(
    ("code", "output", "failure"),
    [
        (-9, "", InfrastructureFailed),
        (-7, "", InfrastructureFailed),
        (1, "OSError: [Errno 28] No space left on device", InfrastructureFailed),
        (1, "llama_model_quantize: failed to quantize: basic_ios::clear: iostream error", InfrastructureFailed),
        (-6, "terminate called after throwing an instance of 'std::bad_alloc'", InfrastructureFailed),
        (1, "no context for this model: llama_init: failed to allocate buffer for kv cache", InfrastructureFailed),
        (127, "python: error while loading shared libraries: libpython3.11.so.1.0: cannot open", InfrastructureFailed),
        (1, "RuntimeError: Failed to load shared library '/build/libllama.so': no symbol", InfrastructureFailed),
        (1, "ModuleNotFoundError: No module named 'llama_cpp'", InfrastructureFailed),
        (-6, "GGML_ASSERT(nelements % block_size == 0) failed", CandidateFailed),
        (-11, "", CandidateFailed),
        (1, "llama_model_quantize: failed to quantize: quantized data validation failed", CandidateFailed),
    ],
)
def test_a_lack_of_memory_disk_time_or_libraries_is_no_property_of_a_file(
    code: int, output: str, failure: type[NasError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "stream", lambda *_, **__: (code, output))
    monkeypatch.setattr(binding, "_environment", lambda build: {})
    with pytest.raises(failure, match=rf"a\.gguf \(exit code {code}\)"):
        binding.run_command(cast(Any, None), "quantise", Path("a.gguf"))


def test_a_request_that_cannot_be_written_is_no_property_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(binding, "_environment", lambda build: {})
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InfrastructureFailed, match=r"with a\.gguf: .*No space left"):
        binding.run_command(cast(Any, None), "bits", Path("a.gguf"))


class NearlyEqual:
    """A session whose likeliest token, 1, is so by less than float16 can tell. The nth byte of a text is token n."""

    vocab = 5001

    def __init__(self, *_: object, **__: object) -> None: ...

    def reset(self) -> None: ...

    def tokens(self, text: bytes) -> list[int]:
        return list(range(len(text)))

    def text_of(self, token: int) -> bytes:
        return b"x"

    def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        logits = np.zeros((len(ids), self.vocab), np.float32)
        logits[:, 1] = 1e-5
        return logits


def test_windows_are_spread_over_the_text_and_equal_models_have_the_same_likeliest_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "Session", NearlyEqual)
    assert binding._predict("model", "\0" * 5001, 4, 1, str(tmp_path)) == 5001
    assert np.load(tmp_path / "ids.npy")[:, 0].tolist() == [0, 1250, 2500, 3750]
    assert binding._diverge("model", str(tmp_path), 1)["same_top"] == [1.0] * 4


class NeverWritten(NearlyEqual):
    """One whose token 2 has the least logit of float32, as llama.cpp gives it to tokens that are not text."""

    def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        logits = super().feed(ids)
        logits[:, 2] = np.finfo(np.float32).min
        return logits


def test_tokens_that_are_never_written_are_no_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "Session", NeverWritten)
    binding._predict("model", "\0" * 1000, 2, 1, str(tmp_path))
    assert binding._diverge("model", str(tmp_path), 1)["kl"] == pytest.approx([0.0, 0.0], abs=1e-2)


@pytest.mark.parametrize("ends_texts", [False, True])
def test_the_token_that_ends_a_text_is_left_out(ends_texts: bool) -> None:
    """A file may put ids 1 in front of a text and 2 behind it; a blank becomes a token of its own."""

    def tokenize(words: object, text: bytes, size: int, ids: Any, most: int, special: bool, parse: bool) -> int:
        whole = [1, 9, *text, *[2] * ends_texts]
        if len(whole) > most:
            return -len(whole)
        ids[: len(whole)] = whole
        return len(whole)

    session = object.__new__(binding.Session)
    session._words = None
    session._lib = SimpleNamespace(
        llama_token=ctypes.c_int32,
        llama_tokenize=tokenize,
        llama_vocab_eos=lambda words: 2,
        llama_vocab_get_add_eos=lambda words: ends_texts,
    )
    assert session.tokens(b"ab") == [1, 9, *b"ab"]
    assert session.tokens(b"\x02") == [1, 9, 2]


def test_long_tokens_have_their_whole_text() -> None:
    def token_to_piece(words: object, token: int, piece: Any, size: int, lstrip: int, special: bool) -> int:
        text = b"" if token == 0 else b"=" * 5000
        if len(text) > size:
            return -len(text)
        piece[: len(text)] = text
        return len(text)

    session = object.__new__(binding.Session)
    session._words, session._lib = None, SimpleNamespace(llama_token_to_piece=token_to_piece)
    assert session.text_of(1) == b"=" * 5000 and session.text_of(0) == b""


def test_texts_of_the_importance_matrix_are_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: list[str] = []

    def stream(argv: Sequence[str], **_: object) -> tuple[int, str]:
        arguments.extend(argv)
        Path(argv[argv.index("-o") + 1]).touch()
        return 0, ""

    monkeypatch.setattr(binding, "stream", stream)
    build = cast(Any, SimpleNamespace(folder=tmp_path))
    binding.write_importance(build, Path("a.gguf"), "text", tmp_path / "matrix", 1)
    assert arguments[arguments.index("--override-kv") + 1] == "tokenizer.ggml.add_eos_token=bool:false"


def test_texts_of_first_tokens_alone_have_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "Session", NearlyEqual)
    assert binding._bits("model", ["a"], 1) is None
    assert binding._bits("model", ["ab"], 1) == pytest.approx(np.log2(5001), rel=1e-5)


@pytest.mark.parametrize("starts", [False, True])
def test_the_blank_that_sentencepiece_puts_in_front_is_no_byte_of_the_text(
    starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blank(NearlyEqual):
        def tokens(self, text: bytes) -> list[int]:
            return [*[0] * starts, 2, *[3] * (len(text) - 1)]

        def text_of(self, token: int) -> bytes:
            return (b"", b"", b" x", b"y")[token]

    monkeypatch.setattr(binding, "Session", Blank)
    assert binding._bits("model", ["xyy"], 1) == pytest.approx(np.log2(5001), rel=1e-5)


def test_a_long_prompt_is_fed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[tuple[int, int]] = []

    class Parts(NearlyEqual):
        def __init__(self, model: str, length: int, chunk: int) -> None:
            self.chunk = chunk

        def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
            parts.append((len(ids), self.chunk))
            return super().feed(ids)

    monkeypatch.setattr(binding, "Session", Parts)
    assert binding._decode("model", [0] * 1200, 3, 0.0, 0) == [1, 1, 1]
    assert parts == [(512, 512), (512, 512), (176, 512), (1, 512), (1, 512)]


def test_bits_take_little_more_memory_than_the_logits_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "Session", NearlyEqual)
    tracemalloc.start()
    try:
        bits = binding._bits("model", ["a" * 513], 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bits == pytest.approx(np.log2(5001), rel=1e-5) and peak < 2 * 512 * 4 * NearlyEqual.vocab


def test_libraries_are_those_of_the_build_wherever_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    build = cast(Any, SimpleNamespace(folder=Path("/build")))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/python/lib:/opt/llama.cpp/lib")
    assert binding._environment(build)["LD_LIBRARY_PATH"] == "/build:/opt/python/lib:/opt/llama.cpp/lib"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert "LD_LIBRARY_PATH" not in binding._environment(build)


def test_a_model_is_refused_with_what_llama_cpp_says_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks: list[Any] = []

    def load(path: bytes, params: object) -> None:
        for level, text in (2, b"loading\n"), (4, b"load_model: unknown model architecture: 'x'\n"), (4, b"failed\n"):
            callbacks[0](level, text, None)

    library = SimpleNamespace(
        llama_log_callback=lambda function: function,
        llama_log_set=lambda callback, data: callbacks.append(callback),
        llama_backend_init=lambda: None,
        llama_model_default_params=lambda: None,
        llama_model_load_from_file=load,
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", cast(Any, library))
    with pytest.raises(SystemExit) as end:
        binding.Session("a.gguf", 8, 8)
    assert end.value.code == "the model file was refused: a.gguf: load_model: unknown model architecture: 'x'\nfailed"
