"""Tokenizers of models that others trained: what files get of them, and what GGUF files cannot hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, TokenType
from tokenizer_lab import CHATML, FORMS, TEXT, write_model_tokenizer, write_sentencepiece_form

from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights
from nas.train.pretrain.data import Vocabulary
from nas.train.pretrain.tokenizer_training import train_tokenizer
from nas.train.release.files import write_files
from nas.train.release.model_tokenizer import ModelTokenizer, read_model_tokenizer
from nas.train.release.options import FileOptions

LAYOUT = Layout.parse("d64 v400 ffn=swiglu:96 [A4/2*2]")


def read(path: Path) -> ModelTokenizer:
    tokenizer = read_model_tokenizer(path)
    assert isinstance(tokenizer, ModelTokenizer)
    return tokenizer


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", FORMS)
def test_the_way_in_which_a_family_splits_text_is_known(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    tokenizer = read(write_model_tokenizer(tmp_path, form))
    vocabulary = tokenizer.vocabulary(400)
    assert vocabulary.pre_tokenizer == form.pre
    assert vocabulary.starts_texts == (form.starts is not None)
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == 400
    assert {vocabulary.tokens[i] for i in vocabulary.special} == set(form.special)
    assert {vocabulary.tokens[i] for i in vocabulary.added} == set(form.added)
    assert vocabulary.unused == set(range(tokenizer.size, 400)), "rows without a token"


def test_ends_and_templates_are_the_models(tmp_path: Path) -> None:
    path = write_model_tokenizer(tmp_path, FORMS["qwen3"])
    qwen = read(path)
    end, turn = qwen.tokenizer.token_to_id("<|endoftext|>"), qwen.tokenizer.token_to_id("<|im_end|>")
    assert qwen.ids() == {"eos": turn, "pad": end}
    assert qwen.ends == (turn,)
    assert qwen.marks == (end, end), "the tokenizer puts nothing in front of a text"
    assert qwen.vocabulary(400).chat_template == CHATML
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn, end]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": end, "bos_token_id": end}))
    assert read(path).ends == (turn, end)
    assert read(path).ids() == {"eos": turn, "pad": end, "bos": end}

    llama = read(write_model_tokenizer(tmp_path / "llama", FORMS["llama"]))
    start, end = (llama.tokenizer.token_to_id(f"<|{name}_of_text|>") for name in ("begin", "end"))
    assert llama.marks == (start, end)
    assert llama.ids()["bos"] == start


def test_documents_lie_between_the_models_marks(tmp_path: Path) -> None:
    for name in ("qwen3", "llama"):
        path = write_model_tokenizer(tmp_path / name, FORMS[name])
        start, end = marks = read(path).marks
        vocabulary = Vocabulary(path, 400, marks=marks)
        (ids,) = map(list, vocabulary.encode_documents([vocabulary.document("the cat")]))
        assert ids[0] == start and ids.count(end) == 1
        assert vocabulary.sha256 != Vocabulary(path, 400, marks=type(marks)(0, 1)).sha256


def test_texts_are_neither_cut_nor_filled_up(tmp_path: Path) -> None:
    path = write_model_tokenizer(tmp_path, FORMS["llama"])
    whole = read(path).tokenizer.encode(TEXT[0]).ids
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|end_of_text|>",
    }  # fmt: skip
    change(path, truncation=cut, padding=fill)
    assert read(path).tokenizer.encode(TEXT[0]).ids == whole
    assert read(path).marks.start == whole[0]


def test_no_text_ends_with_a_token_that_is_not_special(tmp_path: Path) -> None:
    path = write_model_tokenizer(tmp_path, FORMS["llama"])
    tokenizer = read(path).tokenizer
    tokenizer.add_tokens(["<|endoftext|>"])
    path.write_text(tokenizer.to_str())
    assert read(path).marks.end == tokenizer.token_to_id("<|end_of_text|>")


def test_composed_forms_of_letters_are_no_loss(tmp_path: Path) -> None:
    vocabulary = Vocabulary(
        write_model_tokenizer(tmp_path, FORMS["qwen3"]), 400, marks=read(tmp_path / "tokenizer.json").marks
    )
    vocabulary.check_lossless("de\u0301ja\u0300 vu")


def test_files_of_the_tokenizer_are_carried(tmp_path: Path) -> None:
    path = write_model_tokenizer(tmp_path / "in", FORMS["llama"])
    change(path.with_name("tokenizer_config.json"), auto_map={"AutoTokenizer": ["code.Tokenizer", None]}, own=3)
    options = FileOptions(name="m", tokenizer=read(path), gguf=("f16",))
    record = write_files(tmp_path / "out", LAYOUT, RandomWeights(1), options, lambda _: None)
    folder = tmp_path / "out/transformers"
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == path.with_name(name).read_bytes()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["own"] == 3 and "auto_map" not in settings
    start, turn = (read(path).tokenizer.token_to_id(name) for name in ("<|begin_of_text|>", "<|eot_id|>"))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [turn]
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (start, turn, 400)

    assert record.loads["llama.cpp"] == "qwen3"
    fields = GGUFReader(tmp_path / "out/gguf/m-F16.gguf").fields
    got = {key.removeprefix("tokenizer."): field.contents() for key, field in fields.items() if "tokenizer" in key}
    assert got["ggml.pre"] == "llama-bpe" and got["ggml.add_bos_token"] is True
    assert (got["ggml.bos_token_id"], got["ggml.eos_token_id"]) == (start, turn)
    assert got["chat_template"] == FORMS["llama"].template
    types = [TokenType(kind) for kind in got["ggml.token_type"]]
    assert types[start] is TokenType.CONTROL and types[-1] is TokenType.UNUSED and len(types) == 400


def test_where_gguf_cannot_hold_a_tokenizer_the_folder_is_written_alone(tmp_path: Path) -> None:
    change(path := write_sentencepiece_form(tmp_path / "in"), normalizer={"type": "Lowercase"})
    tokenizer = read(path)
    messages: list[str] = []
    options = FileOptions(name="m", tokenizer=tokenizer, gguf=("f16", "q4_0"))
    record = write_files(tmp_path / "out", LAYOUT, RandomWeights(1), options, messages.append)
    reason = (
        "GGUF files cannot hold the tokenizer: text is changed or split before BPE in another way than by SentencePiece"
    )
    assert record.loads["llama.cpp"] == f"none: {reason}"
    assert f"m: F16 is left out: {reason}" in messages
    assert not list(tmp_path.glob("out/gguf/*"))
    assert (tmp_path / "out/transformers/tokenizer.json").is_file()
    assert reason in (tmp_path / "out/README.md").read_text()


CHANGES: dict[str, tuple[str, Any]] = {
    "none of llama.cpp's pre-tokenizers": ("pre_tokenizer", {"type": "Whitespace"}),
    r"changed before it is split \(Lowercase\)": ("normalizer", {"type": "Lowercase"}),
    "gets a token behind it": (
        "post_processor",
        {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [322], "tokens": ["<|im_end|>"]}},
        },
    ),
    "take blanks beside them": (
        "added_tokens",
        [{"id": 305, "content": "<|endoftext|>", "single_word": False, "lstrip": True, "rstrip": False,
          "normalized": False, "special": True}],
    ),
}  # fmt: skip


def test_sentencepiece_is_held_if_scores_give_the_order_of_its_merges(tmp_path: Path) -> None:
    path = write_sentencepiece_form(tmp_path)
    tokenizer, about = read(path), json.loads(path.read_text())
    held = tokenizer.vocabulary(400)
    assert held.pieces is not None and not held.pieces.prefix and len(held.pieces.bytes) == 256
    ids, scores = about["model"]["vocab"], held.pieces.scores
    merged = list(dict.fromkeys(map("".join, about["model"]["merges"])))
    assert [scores[ids[token]] for token in merged] == [-float(place) for place in range(len(merged))]
    assert max(score for i, score in enumerate(scores) if i not in map(ids.get, merged)) < min(
        scores[ids[token]] for token in merged
    )
    assert held.tokens[held.pieces.unknown or 0] == "<unk>"
    merges = about["model"]["merges"]
    for model, reason in (
        ({"merges": merges[1:]}, "no scores of tokens"),  # another split of a token is none
        ({"ignore_merges": True}, "no scores of tokens"),
        ({"vocab": {token: i for token, i in ids.items() if token != "<0x07>"}}, "1 of 256 bytes have no token"),
        ({"vocab": ids | {"a" * 2000: 340}}, "a token has more than 1,024 characters"),
    ):
        change(path, model=about["model"] | model)
        with pytest.raises(Unsupported, match=reason):
            read(path).vocabulary(400)
    more = ["a(", "(b", "a(b"]
    grown = about["model"] | {"vocab": ids | {token: 340 + i for i, token in enumerate(more)}}
    pairs = [*merges, ["a", "("], ["(", "b"]]
    change(path, model=grown | {"merges": [*pairs, ["a(", "b"], ["a", "(b"]]})
    assert read(path).vocabulary(400).pieces is not None
    change(path, model=grown | {"merges": [["a(", "b"], *pairs, ["a", "(b"]]})  # its two halves are apart
    with pytest.raises(Unsupported, match="no scores of tokens"):
        read(path).vocabulary(400)
    change(path, model=about["model"], normalizer=None, pre_tokenizer={"type": "Metaspace", "replacement": "▁",
           "prepend_scheme": "first", "split": False})  # fmt: skip
    pieces = read(path).vocabulary(400).pieces
    assert pieces is not None and pieces.prefix


@pytest.mark.parametrize("reason", CHANGES)
def test_what_gguf_cannot_hold(reason: str, tmp_path: Path) -> None:
    path = write_model_tokenizer(tmp_path, FORMS["qwen3"])
    key, value = CHANGES[reason]
    change(path, **{key: value})
    with pytest.raises(Unsupported, match=reason):
        read(path).vocabulary(400)


def test_whole_words_first_are_part_of_the_name(tmp_path: Path) -> None:
    path = write_model_tokenizer(tmp_path, FORMS["qwen3"])
    about = json.loads(path.read_text())
    change(path, model=about["model"] | {"ignore_merges": True})
    with pytest.raises(Unsupported, match="pre-tokenizers"):
        read(path).vocabulary(400)


def test_a_tokenizer_of_our_own_stays_one(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], 300, tmp_path / "tokenizer.json", lambda _: None)
    assert read_model_tokenizer(tmp_path / "tokenizer.json") == tokenizer
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert read(tmp_path / "tokenizer.json").vocabulary(300).pre_tokenizer == "llama-bpe"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"{", "no JSON"),
        ("tokenizer_config.json", b'{"eos_token": "\\ud800"}', "no JSON"),
        ("config.json", b"[]", "no JSON object"),
        ("chat_template.jinja", b"\xff", "no text"),
        ("generation_config.json", b" " * (1 << 23), "larger than"),
    ],
)
def test_damaged_files_beside_it_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = write_model_tokenizer(tmp_path, FORMS["llama"])
    path.with_name(name).write_bytes(content)
    with pytest.raises(InvalidInput, match=rf"{name}: {message}"):
        read_model_tokenizer(path)


def test_ids_that_are_not_those_of_the_loaded_tokenizer_are_refused(tmp_path: Path) -> None:
    path = write_model_tokenizer(tmp_path, FORMS["qwen3"])
    first, *rest = json.loads(path.read_text())["added_tokens"]
    for id in (first["id"] + 1, 10**9):
        change(path, added_tokens=[{**first, "id": id}, *rest])
        with pytest.raises(InvalidInput, match=rf"has id {id} there, but is {first['id']} when it is loaded"):
            read_model_tokenizer(path)


def test_a_tokenizer_that_names_no_end_is_refused(tmp_path: Path) -> None:
    path = write_model_tokenizer(tmp_path, FORMS["qwen3"])
    change(path, added_tokens=[])
    with pytest.raises(InvalidInput, match="no token ends a text"):
        _ = read(path).marks
