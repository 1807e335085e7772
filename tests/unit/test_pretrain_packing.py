from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pretrain_lab import LAYOUT, SETTINGS, alone, write_corpus, write_tokenizer
from tokenizers import Tokenizer, normalizers

from nas.core.errors import InvalidInput, UnknownName
from nas.model.nn.model import Model
from nas.model.text.documents import read_sources
from nas.train.pretrain.data import MIN_HELD_OUT, Tokens, Vocabulary, cut_for_fim, tokenise
from nas.train.pretrain.member_training import MemberToTrain
from nas.train.pretrain.next_token import Packed, PretrainingRequest, bits_of, held_out_windows, window_nats
from nas.train.pretrain.recipe import Fim

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def tokenizer(tmp_path: Path, corpus: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer.json", corpus)


def numbered(count: int, name: str = "numbers", first: int = 0) -> Tokens:
    ids = np.arange(first, first + count, dtype=np.uint16)
    return Tokens(name, name, ids, ids, count)


def test_an_epoch_takes_every_window_once() -> None:
    packed = Packed("s", [numbered(500), numbered(501, first=500)], length=100, sequences=2, seed=0)
    starts = []
    for step in range(packed.windows // 2):
        inputs, labels = packed.batch(step)
        assert torch.equal(inputs[:, 1:], labels[:, :-1])
        assert torch.equal(inputs + 1, labels)  # windows cross the end of a source
        starts += inputs[:, 0].tolist()
    assert len(starts) == 10
    assert sorted(starts) == list(range(min(starts), min(starts) + 1000, 100))
    again = Packed("s", [numbered(500), numbered(501, first=500)], length=100, sequences=2, seed=0)
    assert torch.equal(again.batch(7)[0], packed.batch(7)[0])  # of the second epoch, without the steps before
    assert [packed.batch(step)[0][0, 0].item() for step in range(5, 10)] != starts[::2]


def test_workers_share_a_step() -> None:
    packed = Packed("s", [numbered(1001)], length=10, sequences=5, seed=3)
    whole = packed.batch(4)[0]
    parts = [packed.batch(4, rank, 2)[0] for rank in (0, 1)]
    assert torch.equal(parts[0], whole[::2]) and torch.equal(parts[1], whole[1::2])


def test_a_corpus_smaller_than_a_sequence_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"numbers: 100 tokens.*sequence of stage 'long' takes 101"):
        Packed("long", [numbered(100)], length=100, sequences=1, seed=0)


def test_held_out_windows_label_every_token_once() -> None:
    labels = [label for _, rows in held_out_windows(np.arange(25, dtype=np.uint16), 10) for label in rows[0].tolist()]
    assert labels == list(range(1, 25))


def test_tokens_are_the_documents_with_marks_and_are_kept(corpus: Path, tokenizer: Path) -> None:
    (source,) = read_sources([corpus], 0.1)
    vocabulary = Vocabulary(tokenizer, 320)
    tokens = tokenise(source, vocabulary, None, 0, 1 << 20)
    assert tokens.train.dtype == np.uint16
    assert tokens.held_out_bytes == sum(len(document.held_out.encode()) for document in source.documents)
    back = Tokenizer.from_file(str(tokenizer)).decode(tokens.train.tolist(), skip_special_tokens=False)
    trained = [f"<|startoftext|>{document.train}<|endoftext|>" for document in source.documents if document.train_size]
    assert back == "".join(trained)
    again = tokenise(source, vocabulary, None, 0, 1 << 20)
    assert np.array_equal(again.train, tokens.train)
    assert len(tokenise(source, vocabulary, None, 0, 1100).held_out) < len(tokens.held_out)


def test_code_is_cut_for_the_middle_and_nothing_is_lost(corpus: Path, tokenizer: Path) -> None:
    (source,) = read_sources([corpus], 0.05)
    vocabulary = Vocabulary(tokenizer, 320, fim=True)
    plain = tokenise(source, vocabulary, None, 0, 1 << 20)
    filled = tokenise(source, vocabulary, Fim(share=1.0, suffixes=(".py",)), 0, 1 << 20)
    marks = [int(Tokenizer.from_file(str(tokenizer)).token_to_id(f"<|fim_{part}|>")) for part in ("pre", "suf", "mid")]
    assert [int((filled.train == mark).sum()) for mark in marks] == [1, 1, 1]  # one .py file
    assert not np.isin(plain.train, marks).any() and not np.isin(filled.held_out, marks).any()
    parts = cut_for_fim("abcdefgh", np.random.default_rng(0))
    assert parts.prefix + parts.middle + parts.suffix == "abcdefgh"


def test_text_that_spells_a_mark_stays_text(tokenizer: Path) -> None:
    vocabulary = Vocabulary(tokenizer, 320)
    assert not np.isin(vocabulary.encode("a <|endoftext|> b"), [vocabulary.start, vocabulary.end]).any()


def test_a_tokenizer_that_does_not_match_is_refused(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"has 320 tokens, but the member's vocabulary is 256"):
        Vocabulary(tokenizer, 256)
    with pytest.raises(InvalidInput, match=r"no tokenizer\.json"):
        Vocabulary(corpus / "1.txt", 320)
    marked = tmp_path / "marked.json"
    marked.write_text(tokenizer.read_text().replace("<|endoftext|>", "<|end_of_text|>"))
    with pytest.raises(UnknownName, match=r"endoftext.*did you mean '<\|end_of_text\|>'"):
        Vocabulary(marked, 320)
    lossy = Tokenizer.from_file(str(tokenizer))
    lossy.normalizer = normalizers.Lowercase()
    lossy.save(str(tmp_path / "lossy.json"))
    (source,) = read_sources([corpus], 0.1)
    with pytest.raises(InvalidInput, match="loses text"):
        tokenise(source, Vocabulary(tmp_path / "lossy.json", 320), None, 0, 1 << 20)


def test_a_held_out_part_of_a_few_bytes_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "t").write_text("short " * 100)
    (source,) = read_sources([tmp_path / "t"], 0.05)
    with pytest.raises(InvalidInput, match="30 bytes would be held out; at least 1,024"):
        tokenise(source, Vocabulary(tokenizer, 320), None, 0, 1 << 20)


def test_a_path_within_another_has_its_share_held_out_there(tmp_path: Path, tokenizer: Path) -> None:
    whole, vocabulary = tmp_path / "whole", Vocabulary(tokenizer, 320)
    (whole / "books").mkdir(parents=True)
    texts = sorted((f"text {number} " * 400 for number in range(8)), key=lambda text: sha256(text.encode()).digest())
    for number, text in enumerate(texts):
        (whole / f"{number}.txt").write_text(text)
    held_out = whole / "7.txt"  # the last by hash
    (whole / "0.txt").rename(whole / "books" / "0.txt")
    outer, books, file = read_sources([whole, whole / "books", held_out], 1 / 8)
    assert [outer.shared, books.shared, file.shared] == [False, True, True]
    corpora = [tokenise(source, vocabulary, None, 0, 1 << 20) for source in (outer, books, file)]
    assert [len(tokens.train) > 0 for tokens in corpora] == [True, True, False]
    assert [tokens.held_out_bytes >= MIN_HELD_OUT for tokens in corpora] == [True, False, True]
    request = PretrainingRequest((whole / "books",), SETTINGS, alongside=(whole, whole / "books"))
    plan = request.plan(MemberToTrain(tmp_path, LAYOUT, tokenizer, ()), lambda line: None)
    assert plan.scores(Model(LAYOUT, 0).eval(), alone()) == {}, "nothing of it is held out"


def test_long_and_many_texts_are_encoded_a_limited_amount_at_a_time(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nas.model.text.documents._PIECE", 8)
    monkeypatch.setattr("nas.train.pretrain.data._AT_ONCE", 100)
    vocabulary, text = Vocabulary(tokenizer, 320), "some words\n" * 100
    batches: list[int] = []

    class Counted:
        def encode_batch_fast(self, pieces: list[str], add_special_tokens: bool) -> list[SimpleNamespace]:
            batches.append(sum(map(len, pieces)))
            return [SimpleNamespace(ids=list(piece.encode())) for piece in pieces]

    monkeypatch.setattr(vocabulary, "_tokenizer", Counted())
    assert bytes(vocabulary.encode(text).tolist()).decode() == text
    assert max(batches) < 108 and sum(batches) == len(text)
    assert vocabulary.encode("").shape == (0,)
    batches.clear()
    documents = [(1, "abc" * 20, 2), (1, "", 2), (3, "some", 4, " words", 5)] * 9
    for document, ids in zip(documents, vocabulary.encode_documents(documents), strict=True):
        assert ids.tolist() == [
            number for part in document for number in ([part] if isinstance(part, int) else part.encode())
        ]
    assert max(batches) < 108


def test_bits_per_byte_of_a_guess(corpus: Path, tokenizer: Path) -> None:
    (source,) = read_sources([corpus], 0.1)
    vocabulary = Vocabulary(tokenizer, 320)
    tokens = tokenise(source, vocabulary, None, 0, 1 << 20)
    nats = window_nats(lambda ids: torch.zeros(ids.shape[1], 320), [tokens], vocabulary, length=50)
    bits = bits_of(nats, [tokens])
    text = int((~np.isin(tokens.held_out, [vocabulary.start, vocabulary.end])).sum())
    assert bits[str(corpus)] == pytest.approx(text * np.log2(320) / tokens.held_out_bytes)
    assert bits["all"] == bits[str(corpus)]
