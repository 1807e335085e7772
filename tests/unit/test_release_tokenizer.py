"""Tokenizers of members: what training gives, and which files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from nas.cli.family.training import tokenizer as command
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.train.pretrain.tokenizer_training import train_tokenizer
from nas.train.release.tokenizer import LEAST, SPECIAL, MemberTokenizer, byte_tokenizer, read_tokenizer, require_fit

TEXT = "the cat sat on the mat; 12345 cats don't sit.\n" * 40 + "def add(a, b):\n    return a + b\n" * 40
LAYOUT = Layout.parse("d64 v300 ffn=swiglu:96 [C3 A4/2]")


def quiet(_: str) -> None:
    pass


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXT, "utf-8")
    (folder / "more" / "b.txt").write_text("größer als das Meer\n" * 20, "utf-8")
    return folder


@pytest.fixture
def trained(corpus: Path, tmp_path: Path) -> MemberTokenizer:
    return train_tokenizer([corpus], 300, tmp_path / "tokenizer.json", quiet)


def test_same_text_gives_the_same_file(corpus: Path, trained: MemberTokenizer, tmp_path: Path) -> None:
    again = train_tokenizer([corpus], 300, tmp_path / "again.json", quiet)
    assert again.content == trained.content == (tmp_path / "again.json").read_bytes()


def test_special_tokens_come_first_and_texts_begin_with_one(trained: MemberTokenizer) -> None:
    assert trained.tokens[: len(SPECIAL)] == SPECIAL
    ids = trained.tokenizer.encode("<|im_start|>the cat<|im_end|>").ids
    assert [ids[0], ids[1], ids[-1]] == [
        trained.special[name] for name in ("<|startoftext|>", "<|im_start|>", "<|im_end|>")
    ]
    assert len(ids) == 5, "'the' and ' cat' are tokens"
    assert trained.ids() == {"bos": 1, "eos": 7, "eot": 7, "pad": 0, "fim_pre": 3, "fim_suf": 5, "fim_mid": 4}


def test_tokens_that_a_small_corpus_lacks_are_reserved(corpus: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    tokenizer = train_tokenizer([corpus], 2048, tmp_path / "t.json", messages.append)
    assert len(tokenizer.tokens) == 2048
    reserved = tokenizer.vocabulary(2048).unused
    assert f"{len(reserved):,} more are reserved" in messages[0]
    assert min(reserved) + len(reserved) == 2048, "they are the last"
    text = f"<|reserved_{min(reserved)}|>"
    assert not reserved & set(tokenizer.tokenizer.encode(text).ids)
    assert tokenizer.tokenizer.decode(tokenizer.tokenizer.encode(text).ids) == text


def test_hidden_files_of_a_repository_are_no_text(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "index").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="repository holds no file of text"):
        train_tokenizer([folder], 300, tmp_path / "none.json", quiet)
    (corpus / "a.txt").rename(folder / "a.txt")
    assert len(train_tokenizer([folder], 300, tmp_path / "some.json", quiet).tokens) == 300


@pytest.mark.parametrize("vocab", [256, 300])
@given(text=st.text())
def test_every_text_comes_back_from_bytes(vocab: int, text: str) -> None:
    tokenizer = byte_tokenizer(vocab).tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == list(text.encode()) or "<|" in text
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_bytes_have_special_tokens_where_there_is_room() -> None:
    assert byte_tokenizer(256).special == {}
    assert list(byte_tokenizer(LEAST).special) == list(SPECIAL)
    assert len(byte_tokenizer(300).tokens) == 300
    with pytest.raises(InvalidInput, match="no token for every byte"):
        byte_tokenizer(255)


def test_a_trained_tokenizer_is_read_back(trained: MemberTokenizer, tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path / "tokenizer.json") == trained
    require_fit(trained, LAYOUT, "tokenizer.json")


@pytest.mark.parametrize("vocab", [299, 301, 65536])
def test_another_vocabulary_is_refused(trained: MemberTokenizer, vocab: int) -> None:
    layout = Layout.parse(f"d64 v{vocab} ffn=swiglu:96 [C3 A4/2]")
    with pytest.raises(InvalidInput, match=rf"tokenizer\.json: 300 tokens, but .* v{vocab}: .* --vocab {vocab}`, or"):
        require_fit(trained, layout, "tokenizer.json")


Change = Callable[[dict[str, Any]], object]
CHANGES: dict[str, Change] = {
    r"lacks the special tokens <\|im_end\|>": lambda about: about["added_tokens"][7].update(special=False),
    "splits text in another way": lambda about: about.update(pre_tokenizer=None),
    "splits text in another": lambda about: about.update(normalizer={"type": "NFC"}),
    "ignore_merges is off": lambda about: about["model"].update(ignore_merges=False),
    "no byte-level BPE, but BPE": lambda about: about["model"].update(byte_fallback=True),
}


@pytest.mark.parametrize("message", CHANGES)
def test_tokenizers_of_another_kind_are_refused(trained: MemberTokenizer, tmp_path: Path, message: str) -> None:
    about = json.loads(trained.content)
    CHANGES[message](about)
    (tmp_path / "other.json").write_text(json.dumps(about))
    with pytest.raises(InvalidInput, match=rf"other\.json: .*{message}.*nas family tokenizer"):
        read_tokenizer(tmp_path / "other.json")


def test_words_in_place_of_bytes_are_refused(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1}, unk_token="[UNK]")).save(str(tmp_path / "words.json"))
    with pytest.raises(InvalidInput, match="no byte-level BPE, but WordLevel"):
        read_tokenizer(tmp_path / "words.json")
    Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(tmp_path / "letters.json"))
    with pytest.raises(InvalidInput, match="254 of 256 bytes have no token"):
        read_tokenizer(tmp_path / "letters.json")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"model": 3}'])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"x\.json: no tokenizer\.json"):
        read_tokenizer(tmp_path / "x.json")
    with pytest.raises(InvalidInput, match=r"gone\.json: cannot read it"):
        read_tokenizer(tmp_path / "gone.json")


def test_corpora_that_cannot_be_used_are_refused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    with pytest.raises(InvalidInput, match=f"{LEAST} hold all bytes"):
        train_tokenizer([corpus], LEAST - 1, out, quiet)
    (corpus / "c.txt").write_bytes(b"abc\xff")
    with pytest.raises(InvalidInput, match=r"c\.txt: is not UTF-8 text \(byte 3\)"):
        train_tokenizer([corpus], 300, out, quiet)
    with pytest.raises(InvalidInput, match=r"gone: no such file or folder"):
        train_tokenizer([tmp_path / "gone"], 300, out, quiet)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="holds no file of text"):
        train_tokenizer([tmp_path / "empty"], 300, out, quiet)
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(InvalidInput, match="needs more text"):
        train_tokenizer([tmp_path / "short.txt"], 300, out, quiet)
    assert not out.exists()


def test_the_command_writes_a_tokenizer(corpus: Path, tmp_path: Path) -> None:
    app, out = typer.Typer(), tmp_path / "t.json"
    app.command()(command)
    done = CliRunner().invoke(app, ["--vocab", "300", "--corpus", str(corpus), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "300 tokens, including 14 special tokens" in done.output
    assert len(read_tokenizer(out).tokens) == 300


def test_the_command_overwrites_no_text_that_it_reads(corpus: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    for entry, output in ((corpus, corpus / "more" / "b.txt"), (corpus / "*.txt", corpus / "a.txt")):
        text = output.read_bytes()
        done = CliRunner().invoke(app, ["--vocab", "300", "--corpus", str(entry), "-o", str(output)])
        assert "is a file that this command reads" in str(done.exception) and output.read_bytes() == text
    for _ in range(2):  # what is beside the text is not read
        done = CliRunner().invoke(app, ["--vocab", "300", "--corpus", str(corpus), "-o", str(corpus / "t.json")])
        assert done.exit_code == 0, done.output
