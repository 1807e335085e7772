"""What ends llama.cpp's processes, and the predictions that files are compared by. No model is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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
        (-6, "GGML_ASSERT(nelements % block_size == 0) failed", CandidateFailed),
        (-11, "", CandidateFailed),
        (1, "llama_model_quantize: failed to quantize: quantized data validation failed", CandidateFailed),
    ],
)
def test_a_lack_of_memory_disk_or_time_is_no_property_of_a_file(
    code: int, output: str, failure: type[NasError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "stream", lambda *_, **__: (code, output))
    monkeypatch.setattr(binding, "_environment", lambda build: {})
    with pytest.raises(failure, match=rf"a\.gguf \(exit code {code}\)"):
        binding.run_command(cast(Any, None), "quantise", Path("a.gguf"))


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
