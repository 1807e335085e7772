"""Documents of text: the same content gives the same documents, split and ids in every format and command."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from adapt_lab import LAYOUT as TEACHER
from adapt_lab import adaptation
from pretrain_lab import LAYOUT, SETTINGS, write_corpus, write_tokenizer
from pyarrow import parquet

from nas.core.errors import InvalidInput
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights
from nas.model.text.bpe import encoded
from nas.model.text.corpus import open_corpus, refer
from nas.model.text.documents import read_sources
from nas.model.text.reader import read_texts
from nas.search.spaces.problems import read_model
from nas.train.pretrain.data import open_tokens
from nas.train.pretrain.member_training import MemberToTrain
from nas.train.pretrain.next_token import PretrainingRequest
from nas.train.pretrain.tokenizer_training import train_tokenizer
from nas.train.recipe import PostTrainingRecipe

pytestmark = pytest.mark.usefixtures("home")

TEXTS = [f"Grüße Nummer {n}, sagte die Nummer {n * n}. " * 30 + "\n" for n in range(100)]


def lines(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)).encode()


def table(texts: Sequence[str]) -> Any:
    return pyarrow.Table.from_pylist([{"id": number, "text": text} for number, text in enumerate(texts)])


def write_text_files(folder: Path) -> None:
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)


def write_compressed_texts(folder: Path) -> None:
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.md.gz").write_bytes(gzip.compress(text.encode()))


def write_json(folder: Path) -> None:
    (folder / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS], indent=1))


def write_arrow(folder: Path) -> None:
    rows = table(TEXTS)
    with pyarrow.OSFile(str(folder / "a.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, rows.schema) as stream:
        stream.write_table(rows, max_chunksize=50)


def write_parquet_gz(folder: Path) -> None:
    parquet.write_table(table(TEXTS), folder / "a")
    (folder / "a.parquet.gz").write_bytes(gzip.compress((folder / "a").read_bytes()))
    (folder / "a").unlink()


def write_mixture(folder: Path) -> None:
    """Text files, JSON lines and Parquet below one folder, some texts twice."""
    (folder / "more").mkdir()
    for number, text in enumerate(TEXTS[:20]):
        (folder / f"{number}.txt").write_text(text)
    (folder / "more" / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[15:60])))
    parquet.write_table(table(TEXTS[60:]), folder / "more" / "b.parquet")
    (folder / "picture.png").write_bytes(b"\x89PNG")


FORMATS: dict[str, Callable[[Path], object]] = {
    "*.gz": write_compressed_texts,
    "a.jsonl": lambda folder: (folder / "a.jsonl").write_bytes(lines(TEXTS)),
    "a.jsonl.gz": lambda folder: (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS))),
    "a.jsonl.zst": lambda folder: (folder / "a.jsonl.zst").write_bytes(
        pyarrow.compress(lines(TEXTS), "zstd", asbytes=True)
    ),
    "a.json": write_json,
    "a.parquet": lambda folder: parquet.write_table(table(TEXTS), folder / "a.parquet"),
    "a.parquet.gz": write_parquet_gz,
    "a.arrow": write_arrow,
    ".": write_mixture,
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, start weights, and the content of `TEXTS` as text files."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "text").mkdir()
    write_text_files(folder / "text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAS_CACHE", str(folder / "cache"))
        write_tokenizer(folder / "tokenizer.json", folder / "text")
    save_weights(Model(TEACHER, seed=1), folder / "teacher.safetensors")
    return folder


def launched(folder: Path, entry: str) -> tuple[list[bytes], list[list[int]]]:
    """Bytes and tokens of the corpus of `nas launch`."""
    corpus = open_corpus(refer([entry], folder))
    (domain,), (tokens,) = corpus.domains.values(), encoded(corpus, 512).values()
    return (
        [domain.train.tobytes(), domain.heldout.tobytes()],
        [tokens.train.tolist(), tokens.heldout.tolist()],
    )


def pretrained(request: Any, lab: Path) -> list[tuple[str, list[int], list[int]]]:
    """Keys and ids of the sources of a planned training."""
    plan = request.plan(MemberToTrain(lab, LAYOUT, lab / "tokenizer.json", ()), lambda line: None)
    tokens = [open_tokens(name, key) for sources in plan.sources for name, key in sources]
    return [(source.key, source.train.tolist(), source.held_out.tolist()) for source in tokens]


@pytest.mark.parametrize("entry", FORMATS)
def test_every_format_gives_the_same_documents_in_every_command(entry: str, lab: Path, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    FORMATS[entry](folder)
    path, expected = folder / entry, lab / "text"

    (source,), (reference,) = read_sources([path], 0.2), read_sources([expected], 0.2)
    assert [document.parts() for document in source.documents] == [document.parts() for document in reference.documents]
    assert source.hash == reference.hash

    assert launched(folder, entry) == launched(expected, "*.txt")

    request = PretrainingRequest((path,), SETTINGS)
    by_train = pretrained(request, lab)
    assert by_train == pretrained(PretrainingRequest((expected,), SETTINGS), lab)
    recipe = tmp_path / "recipe.yaml"
    settings = json.dumps(SETTINGS.model_dump(mode="json"))
    recipe.write_text(f"stages:\n  - {{kind: pretrain, corpus: ['text/{entry}'], settings: {settings}}}\n")
    (stage,) = read_model(recipe, PostTrainingRecipe).requests(tmp_path)
    assert pretrained(stage, lab) == by_train

    train_tokenizer([path], 300, tmp_path / "a.json", lambda line: None)
    train_tokenizer([expected], 300, tmp_path / "b.json", lambda line: None)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize("entry", ["a.jsonl.gz", "a.parquet", "."])
def test_an_adaptation_reads_the_same(entry: str, lab: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    FORMATS[entry](tmp_path / "text")
    for name in ("tokenizer.json", "teacher.safetensors"):
        (tmp_path / name).symlink_to(lab / name)
    (source,) = adaptation(tmp_path, tmp_path / "out", tmp_path / "library").sources
    (reference,) = adaptation(lab, tmp_path / "expected", tmp_path / "expected-library").sources
    assert source.key == reference.key
    assert np.array_equal(source.train, reference.train) and np.array_equal(source.held_out, reference.held_out)


def test_the_end_of_a_source_is_held_out_whatever_its_files_are_called(corpus: Path, tmp_path: Path) -> None:
    (source,) = read_sources([corpus], 0.1)
    size = sum(file.stat().st_size for file in corpus.iterdir())
    held_out = sum(len(document.held_out.encode()) for document in source.documents)
    assert abs(held_out - 0.1 * size) <= 1
    for document in source.documents:
        assert document.train + document.held_out == document.path.read_text()
    other = tmp_path / "other"
    other.mkdir()
    for file in corpus.iterdir():
        (other / f"z{file.name}").write_bytes(file.read_bytes())
    (other / "copy").write_bytes((corpus / "1.txt").read_bytes())
    assert read_sources([other], 0.1)[0].hash == source.hash


def test_what_one_source_holds_out_no_other_trains_on(corpus: Path) -> None:
    whole, part = read_sources([corpus, corpus / "1.txt"], 0.3)
    cuts = {document.sha256: document.train_size for document in whole.documents}
    (document,) = part.documents
    assert document.train_size == cuts[document.sha256]


def test_characters_are_not_cut(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("ü€" * 1000)
    (source,) = read_sources([tmp_path / "t"], 0.0777)
    assert source.documents[0].train + source.documents[0].held_out == "ü€" * 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe\x00", "not UTF-8 text"), (b" \n", "is empty"), (None, "no such file or folder")],
)
def test_text_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "t").write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        read_sources([tmp_path / "t"], 0.1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"id": 1, "body": "x"}', r"a\.jsonl:1: has no 'text', only 'body', 'id'"),
        ("a.json", b'[{"text": "x"}, {"body": "x"}]', r"a\.json, record 2: has no 'text', only 'body'"),
        ("a.json", b'{"text": 1}\n', r"a\.json:1: 'text' is int, not text"),
        ("a.txt.gz", gzip.compress(b"\xff", mtime=0), r"a\.txt\.gz: is not UTF-8 text \(byte 0\)"),
        ("a.txt.gz", b"no gzip", r"a\.txt\.gz: cannot be read"),
        ("a.jsonl", b'\n{"text": " "}\n', r"a\.jsonl: is empty"),
    ],
)
def test_a_bad_file_is_named_with_its_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        read_sources([tmp_path / name], 0.1)


def test_a_file_that_changes_while_it_is_read_is_refused(corpus: Path) -> None:
    (source,) = read_sources([corpus], 0.1)
    (corpus / "1.txt").write_text("something else")
    with pytest.raises(InvalidInput, match=r"1\.txt: has changed while it was read"):
        [document.train for document in source.documents]


def test_records_are_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    (first,) = read_sources([tmp_path / "a.jsonl"], 0.1)
    monkeypatch.setattr("nas.model.text.documents.read_texts", None)
    (tmp_path / "moved").mkdir()
    (tmp_path / "a.jsonl").rename(tmp_path / "moved" / "b.jsonl")
    (again,) = read_sources([tmp_path / "moved"], 0.1)
    assert again.documents == first.documents
    with pytest.raises(InvalidInput, match="at most 1,000 bytes are read"):
        read_sources([tmp_path / "moved"], 0.1, most=1000)


def test_arrow_columns_are_read_whatever_they_hold(tmp_path: Path) -> None:
    buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
    broken = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)})
    parquet.write_table(broken, tmp_path / "a.parquet")
    with pytest.raises(InvalidInput, match=r"a.parquet, row 1: 'text' is not UTF-8 text \(byte 0\)"):
        read_sources([tmp_path / "a.parquet"], 0.1)
    twice = pyarrow.Table.from_arrays([pyarrow.array(["first"]), pyarrow.array(["second"])], names=["text", "text"])
    with pyarrow.OSFile(str(tmp_path / "b.arrow"), "wb") as file, pyarrow.ipc.new_file(file, twice.schema) as stream:
        stream.write_table(twice)
    (source,) = read_sources([tmp_path / "b.arrow"], 0.0)
    assert source.documents[0].train == "first"


def test_a_pattern_is_what_was_written_and_not_the_folder_it_is_in(tmp_path: Path) -> None:
    folder = tmp_path / "[old] texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (source,) = read_sources(["*.txt"], 0.0, base=folder)
    assert [document.train for document in source.documents] == ["a"]


def test_a_pattern_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--corpus: .*a\*\*: Invalid pattern"):
        read_sources([tmp_path / "a**"], 0.1)


def test_paths_that_are_none_or_the_same_are_refused(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="--corpus: a path holds a null character"):
        read_sources(["a\0b"], 0.1)
    monkeypatch.setenv("HOME", str(corpus.parent))
    with pytest.raises(InvalidInput, match="a path is named twice"):
        read_sources([corpus, f"~/{corpus.name}"], 0.1)


def test_a_list_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}]', encoding="utf-8-sig")
    assert list(read_texts(tmp_path / "a.json", "text")) == [b"a"]
