"""Conversations that a chat model writes itself, as text of an adaptation."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from adapt_lab import LAYOUT, QUICK, alone, work_of, write_lab
from cli_runner import nas
from tokenizers import Tokenizer
from tokenizers.models import BPE

from benchmarks.adapt import ArithmeticBench
from nas.core.errors import InvalidInput
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights
from nas.train.adapt import own_text
from nas.train.adapt.library import TrainedTeacher
from nas.train.adapt.own_text import Turn, written_by
from nas.train.adapt.prepare import prepare
from nas.train.adapt.request import AdaptRequest
from nas.train.posttrain.conversations import ChatTokenizer, Message
from nas.train.pretrain.data import Tokens, Vocabulary
from nas.train.release.model_tokenizer import read_member_tokenizer
from nas.train.release.tokenizer import MemberTokenizer


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, a tokenizer, and a model that ends messages: its ids are about equally likely."""
    lab = write_lab(tmp_path_factory.mktemp("own-text"))
    model = Model(LAYOUT, seed=3)
    model.embed.weight.data.mul_(0.1)
    save_weights(model, lab / "model.safetensors")
    return lab


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(own_text, "_MESSAGE", 96)
    monkeypatch.setattr(own_text, "_ANSWER", 32)
    monkeypatch.setattr(own_text, "_CPU_ROWS", 48)
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def turn(lab: Path) -> Turn:
    return Turn.of(read_member_tokenizer(lab / "tokenizer.json"), "tokenizer.json")


def written(lab: Path, turn: Turn, tokens: int = 5000, seed: int = 0) -> Tokens:
    teacher = TrainedTeacher.load(lab / "model.safetensors", torch.device("cpu"))
    vocabulary = Vocabulary(lab / "tokenizer.json", LAYOUT.vocab)
    return written_by(teacher, turn, vocabulary, tokens, 0.2, alone(), "float32", seed)


def test_a_turn_is_the_chat_template_around_a_message(lab: Path, turn: Turn) -> None:
    chat = ChatTokenizer.read(lab / "tokenizer.json")
    message = chat.encode("words")
    assert [*turn.before, *message, *turn.between] == chat.question([Message(role="user", content="words")])
    assert turn.ends == chat.ends


def test_conversations_are_in_the_template(lab: Path, turn: Turn) -> None:
    text = written(lab, turn)
    assert len(text.train) + len(text.held_out) >= 5000
    assert 0.1 < len(text.held_out) / (len(text.train) + len(text.held_out)) < 0.3
    assert text.held_out_bytes > 0
    before, between = list(turn.before), list(turn.between)
    ids = text.train.tolist()
    starts = [at for at in range(len(ids)) if ids[at : at + len(before)] == before]
    assert starts[0] == 0 and len(starts) > 9
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        conversation = ids[start + len(before) : end]
        places = [at for at in range(len(conversation)) if conversation[at : at + len(between)] == between]
        assert places and 0 < places[0] < own_text._MESSAGE, "a message, then an answer"
        assert 0 < len(conversation) - places[0] - len(between) <= own_text._ANSWER


def test_ids_are_drawn_with_the_models_probabilities(turn: Turn) -> None:
    """The first id of a message has the softmax of the logits after the template at the temperature."""
    model, rows = Model(LAYOUT, seed=3).eval(), 4000
    with torch.no_grad():
        logits = model(torch.tensor([list(turn.before)]))[0, -1].double()
        first = {turn.between[0], *turn.ends}
        generator = torch.Generator().manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(own_text, "_MESSAGE", 2)
            patch.setattr(own_text, "_ANSWER", 1)
            patch.setattr(Model, "step", lambda self, token, state: (_ends(len(token), turn), state))
            conversations = list(own_text._conversations(model, turn, rows, generator, alone()))
    expected = torch.softmax(logits / own_text._TEMPERATURE, -1)
    expected[sorted(first)] = 0
    counts = torch.zeros(LAYOUT.vocab, dtype=torch.float64)
    for ids in conversations:
        counts[ids[len(turn.before)]] += 1
    assert len(conversations) > rows / 2
    expected *= len(conversations) / expected.sum()
    likely = expected > 5
    chi_squared = float(((counts - expected) ** 2 / expected)[likely].sum())
    assert chi_squared < int(likely.sum()) + 4 * (2 * int(likely.sum())) ** 0.5


def _ends(rows: int, turn: Turn) -> torch.Tensor:
    logits = torch.full((rows, LAYOUT.vocab), -torch.inf)
    logits[:, turn.between[0]] = 0.0
    return logits


def test_a_killed_writer_continues_and_writes_the_same(
    lab: Path, turn: Turn, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = written(lab, turn, 5000)
    batches = sorted((cache / "own-text").iterdir())
    assert len(batches) > 1
    batches[0].unlink()
    again = written(lab, turn, 5000)
    assert again.key == text.key and np.array_equal(again.train, text.train)
    monkeypatch.setattr(Model, "step", None)  # nothing is computed
    assert written(lab, turn, 5000).key == text.key
    with pytest.raises(TypeError):
        written(lab, turn, 5000, seed=1)


def test_conversations_that_occur_twice_count_once(lab: Path, turn: Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = count()
    monkeypatch.setattr(own_text, "_conversations", lambda *_: [[next(batches), *range(20, 300)]] * 8)
    text = written(lab, turn, 20_000)
    assert len(text.train) + len(text.held_out) >= 20_000


def test_a_model_whose_messages_do_not_end_is_refused(lab: Path, turn: Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_text, "_MESSAGE", 3)
    endless = Turn(turn.before, [LAYOUT.vocab], [LAYOUT.vocab])
    with pytest.raises(InvalidInput, match="no further messages that end within 3 tokens"):
        written(lab, endless)


def test_too_little_text_to_hold_some_out_is_refused(lab: Path, turn: Turn) -> None:
    with pytest.raises(InvalidInput, match="at least 1,024 are needed"):
        written(lab, turn, 100)


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    with pytest.raises(InvalidInput, match="has no chat template"):
        Turn.of(MemberTokenizer(Tokenizer(BPE()).to_str().encode()), "tokenizer.json")


def test_a_model_is_adapted_on_its_own_text_alone(lab: Path, tmp_path: Path) -> None:
    request = AdaptRequest(
        **dict(QUICK) | {"own_text": 5000, "held_out": 0.2},
        model=lab / "model.safetensors",
        tokenizer=lab / "tokenizer.json",
        budget=("decode_p50<=0.8x",),
        output=tmp_path / "out",
        library_folder=tmp_path / "library",
        device="arithmetic",
    )
    report = prepare(request, lambda layouts: ArithmeticBench(work_of), alone()).run()
    assert report["text"] == [own_text.SOURCE]
    assert report["child"]["measured"]["decode_p50"] < report["teacher"]["measured"]["decode_p50"]


def test_text_or_own_text_is_required(lab: Path, tmp_path: Path) -> None:
    done = nas("adapt", str(lab / "teacher.safetensors"), "-b", "decode_p50<=0.8x", "-o", str(tmp_path / "out"))
    assert done.code == 3 and "--corpus" in done.err
