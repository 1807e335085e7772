"""`nas quantise`: what is refused at the start, the texts that it takes, and what it says of budgets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import nas

from nas.cli.quantise import _gguf
from nas.core.errors import InvalidInput
from nas.measure.runtimes.llama_cpp.binding import Divergence
from nas.train.adapt.quantise import MOST_BYTES, KlLimit, Quantised, QuantiseRequest, Score, Slot


@pytest.fixture(autouse=True)
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[QuantiseRequest]:
    """Replaces the quantiser by one whose file has a divergence of 0.25; returns what it was asked for."""
    requests: list[QuantiseRequest] = []

    class FakeQuantiser:
        def __init__(self, request: QuantiseRequest, *_: object) -> None:
            requests.append(request)

        def choose(self, destination: Path) -> Quantised:
            divergence = Divergence([0.1875, 0.3125] * 4, [1.0], [1], [1.0])
            score = Score.of("chosen", 100, divergence)
            checks = [KlLimit("kl", requests[-1].kl or 1.0).check(divergence)]
            return Quantised({Slot("attn_q", 0): "q4_0"}, {"kl": 0.1}, score, [], checks)

    monkeypatch.setattr("nas.train.adapt.quantise.Quantiser", FakeQuantiser)
    monkeypatch.setattr("nas.cli.quantise._gguf", lambda model, *_: model)
    monkeypatch.setattr("nas.measure.runtimes.built_runtime.BuiltRuntime.build", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    for name in ("alpha", "omega"):
        Path(name).write_text(f"{name} " * (MOST_BYTES // 2))
    return requests


def quantise(*options: str) -> tuple[int, str, str]:
    done = nas("quantise", "m.gguf", "-o", "out.gguf", "-c", "alpha", "-c", "omega", *options)
    return done.code, done.out, done.err


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("-b", "kl<=1", "-b", "kl<=2", "--minimise", "file_size"), "--budget: kl has two budgets"),
        (("-b", "file_size<=1MB", "-b", "file_size<=2MB"), "--budget: file_size has two budgets"),
        (("-b", "image_encoding<=9ms"), "--budget: image_encoding is not measured by a request of 512 tokens in"),
        (("-b", "kl<=1", "--minimise", "encoding"), "--minimise: encoding is not measured"),
        (("-b", "file_size<=1MB", "--types", "q4_k_m"), "did you mean 'q4_k'?"),
    ],
)
def test_what_cannot_be_done_is_refused_at_the_start(
    options: tuple[str, ...], error: str, requests: list[QuantiseRequest]
) -> None:
    code, _, message = quantise(*options)
    assert code == 3 and error in message and not requests


@pytest.mark.parametrize(
    ("name", "error"),
    [("model.safetensors", "is a file: name a GGUF file, or a folder"), ("none", "name a folder of transformers")],
)
def test_what_is_no_model_is_not_taken_for_a_tokenizer(name: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    with pytest.raises(InvalidInput, match=error):
        _gguf(tmp_path / name, tmp_path, print)


def test_texts_have_as_much_of_every_source(requests: list[QuantiseRequest]) -> None:
    assert quantise("-b", "file_size<=1MB")[0] == 0
    (request,) = requests
    for text in (request.importance_from, request.chosen_on, request.decided_on, request.reported_on):
        counts = [text.count(name) for name in ("alpha", "omega")]
        assert len(text) == pytest.approx(MOST_BYTES, rel=1e-3) and counts[0] == pytest.approx(counts[1], rel=1e-3)


@pytest.mark.parametrize("entry", ["text", "text/*/*.txt"])
def test_no_text_that_is_read_is_overwritten(entry: str) -> None:
    path = Path("text/more/a.txt")
    path.parent.mkdir(parents=True)
    path.write_text("alpha " * 1000)
    done = nas("quantise", "m.gguf", "-o", str(path), "-c", entry, "-b", "file_size<=1MB")
    assert done.code == 3 and "is a file that this command reads" in done.err


def test_a_budget_of_divergence_is_told_as_any_other(requests: list[QuantiseRequest]) -> None:
    options = ("-b", "kl<=0.1", "--minimise", "file_size")
    _, output, warnings = quantise(*options)
    assert "broken: 0.25" in output and "it breaks kl <= 0.1 nats/token" in warnings
    (budget,) = json.loads(quantise(*options, "--json")[1])["budgets"]
    assert (budget["budget"], budget["verdict"], budget["value"]) == ("kl <= 0.1 nats/token", "broken", 0.25)
