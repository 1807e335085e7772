"""Corpora: what is held out, what a hash covers, which files are refused."""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import Distribution, PackagePath
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from nas.core.errors import InfrastructureFailed, InvalidInput, StudyChanged
from nas.core.quality_config import CorpusFiles, QualityConfig
from nas.model.text import corpus as corpus_module
from nas.model.text import installed, reader
from nas.model.text.corpus import (
    MIN_BYTES,
    CorpusRef,
    Domain,
    build_corpus,
    made_of,
    open_corpus,
    refer,
    refer_again,
)
from nas.model.text.default import split_source

pytestmark = pytest.mark.usefixtures("home")

LINE = b"the quick brown fox jumps over the lazy dog\n"


def write(path: Path, size: int = MIN_BYTES) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((LINE * (size // len(LINE) + 1))[:size])
    return path


def test_the_last_twentieth_of_a_source_is_held_out(tmp_path: Path) -> None:
    content = bytes([1] * 95 + [2] * 5) * (MIN_BYTES // 100 + 1)
    (tmp_path / "a.txt").write_bytes(content)
    domain = build_corpus(["a.txt"], tmp_path).domains["a.txt"]
    assert domain.heldout.size == round(0.05 * len(content))
    assert domain.train.tobytes() + domain.heldout.tobytes() == content


def test_unigram_entropy_is_in_bits_per_byte() -> None:
    heldout = np.array([0, 0, 1, 2], dtype=np.uint8)
    assert Domain(heldout, heldout).unigram_entropy == pytest.approx(1.5)
    uniform = np.arange(256, dtype=np.uint8)
    assert Domain(uniform, uniform).unigram_entropy == pytest.approx(math.log2(256))


def test_each_entry_is_a_domain(tmp_path: Path) -> None:
    write(tmp_path / "books/a.txt")
    write(tmp_path / "books/b.txt", 2 * MIN_BYTES)
    notes = write(tmp_path / "notes.md")
    notes.write_bytes(notes.read_bytes().upper())
    corpus = build_corpus(["notes.md", "books/*.txt"], tmp_path)
    assert list(corpus.domains) == ["books/*.txt", "notes.md"]
    assert corpus.domains["books/*.txt"].train.size == pytest.approx(0.95 * 3 * MIN_BYTES, abs=4)


def test_the_hash_follows_the_bytes_and_nothing_else(tmp_path: Path) -> None:
    first = build_corpus([write(tmp_path / "one/a.txt").name], tmp_path / "one")
    same = build_corpus([write(tmp_path / "two/a.txt").name], tmp_path / "two")
    assert first.hash == same.hash
    changed = write(tmp_path / "three/a.txt")
    changed.write_bytes(changed.read_bytes()[:-1] + b"!")
    assert build_corpus(["a.txt"], tmp_path / "three").hash != first.hash


def test_a_reference_opens_the_same_corpus_from_the_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt")
    corpus = build_corpus(["a.txt"], tmp_path)
    ref = refer(["a.txt"], tmp_path)
    path.unlink()
    again = open_corpus(CorpusRef.model_validate_json(ref.model_dump_json()))
    assert again.hash == corpus.hash
    assert np.array_equal(again.domains["a.txt"].heldout, corpus.domains["a.txt"].heldout)


def test_a_damaged_cache_is_built_anew(tmp_path: Path) -> None:
    write(tmp_path / "a.txt")
    corpus = build_corpus(["a.txt"], tmp_path)
    ref = refer(["a.txt"], tmp_path)
    cached = tmp_path / "cache/corpora" / corpus.hash
    cached.write_bytes(cached.read_bytes().replace(b"fox", b"cat"))
    assert open_corpus(ref).hash == corpus.hash


def test_files_that_changed_since_the_study_began_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt")
    ref = refer(["a.txt"], tmp_path)
    (tmp_path / "cache/corpora" / ref.hash).unlink()
    write(path, 2 * MIN_BYTES)
    with pytest.raises(InfrastructureFailed, match="files changed"):
        open_corpus(ref)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b" \n" * MIN_BYTES, "is empty"), (b"\xff\xfe\x00", "not UTF-8 text"), (b"short", "needs at")],
)
def test_unusable_files_are_refused_by_path(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(InvalidInput, match=message) as raised:
        build_corpus(["bad.txt"], tmp_path)
    assert "bad.txt" in str(raised.value)


@pytest.mark.parametrize("entry", ["gone.txt", "gone/*.txt", "/nowhere/at/all.txt"])
def test_an_entry_without_files_is_refused(tmp_path: Path, entry: str) -> None:
    with pytest.raises(InvalidInput, match=r"\.txt: (no such file or folder|the pattern matches no)"):
        build_corpus([entry], tmp_path)


def test_a_corpus_beyond_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "MAX_BYTES", 1000)
    write(tmp_path / "a.txt")
    with pytest.raises(InvalidInput, match="at most 1,000"):
        build_corpus(["a.txt"], tmp_path)


def test_an_entry_whose_texts_an_earlier_one_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    for number in range(4):
        (tmp_path / f"books/{number}.txt").write_text(f"{number} " * MIN_BYTES)
    with pytest.raises(InvalidInput, match=r"split with an entry before it, which leaves .* name each text once"):
        build_corpus(["books", *(f"books/{number}.txt" for number in range(4))], tmp_path)


def test_a_folder_is_read_with_all_below_it(tmp_path: Path) -> None:
    write(tmp_path / "books/a.txt")
    write(tmp_path / "books/old/b.md", 2 * MIN_BYTES)
    (tmp_path / "books/LICENSE").write_text("No suffix.")
    write(tmp_path / "books/.hidden/c.txt")
    write(tmp_path / "books/picture.png")
    (tmp_path / "books/empty.txt").touch()
    domain = build_corpus(["books"], tmp_path).domains["books"]
    assert domain.train.size + domain.heldout.size == 3 * MIN_BYTES + len("No suffix.") + 2 * len("\n\n")
    (tmp_path / "void").mkdir()
    with pytest.raises(InvalidInput, match="holds no file of text"):
        build_corpus(["void"], tmp_path)


def test_of_small_files_whole_ones_are_held_out_whatever_their_names(tmp_path: Path) -> None:
    for folder, names in (("one", "abcdefgh"), ("two", "hgfedcba")):
        for number, name in enumerate(names):
            path = write(tmp_path / folder / f"{name}.txt", MIN_BYTES // 4)
            path.write_bytes(bytes([ord("0") + number]) * (MIN_BYTES // 4))
    one, two = (build_corpus(["."], tmp_path / folder) for folder in ("one", "two"))
    assert one.domains["."].train.tobytes() == two.domains["."].train.tobytes()
    assert len(set(one.domains["."].heldout.tolist())) == 1


RECORDS = [{"id": n, "body": f"Grüße Nummer {n}. " * 40} for n in range(120)]
TEXT = b"\n\n".join(sorted((str(r["body"]).encode() for r in RECORDS), key=lambda text: sha256(text).digest()))


def write_json_lines(path: Path) -> None:
    lines = "".join(json.dumps(record) + "\n\n" for record in RECORDS).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        path.write_bytes(pyarrow.compress(lines, "zstd", asbytes=True))
    else:
        path.write_bytes(lines)


def write_parquet(path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=50)


def write_arrow(path: Path) -> None:
    """Writes a stream, as `datasets` does."""
    table = pyarrow.Table.from_pylist(RECORDS)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=50)


def write_arrow_file(path: Path) -> None:
    table = pyarrow.Table.from_pylist(RECORDS)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as target:
        target.write_table(table, max_chunksize=50)


def write_saved_dataset(path: Path) -> None:
    """Writes a folder as `datasets.DatasetDict.save_to_disk` does."""
    folder = path / "train"
    folder.mkdir(parents=True)
    (path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    write_arrow(folder / "data-00000-of-00001.arrow")
    (folder / "cache-1.arrow").write_bytes(b"left by a map()")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("a.jsonl", write_json_lines),
        ("a.jsonl.gz", write_json_lines),
        ("a.jsonl.zst", write_json_lines),
        ("a.parquet", write_parquet),
        ("a.arrow", write_arrow),
        ("file.arrow", write_arrow_file),
    ],
)
def test_records_give_the_text_of_their_column(name: str, written: Callable[[Path], None], tmp_path: Path) -> None:
    written(tmp_path / name)
    for entry in (name, "*"):
        corpus = build_corpus(CorpusFiles(files=(entry,), text="body"), tmp_path)
        domain = corpus.domains[entry]
        assert domain.train.tobytes() + domain.heldout.tobytes() == TEXT
    with pytest.raises(InvalidInput, match=rf"{name}.*has no 'text', only 'body', 'id'"):
        build_corpus([name], tmp_path)
    with pytest.raises(InvalidInput, match=rf"{name}.*'id' is int, not text"):
        build_corpus(CorpusFiles(files=(name,), text="id"), tmp_path)


def test_a_saved_data_set_is_read_by_its_state(tmp_path: Path) -> None:
    write_saved_dataset(tmp_path / "books")
    domain = build_corpus(CorpusFiles(files=("books",), text="body"), tmp_path).domains["books"]
    assert domain.train.tobytes() + domain.heldout.tobytes() == TEXT
    (tmp_path / "books/train/state.json").write_text('{"_data_files": [{"filename": "../../secret.arrow"}]}')
    with pytest.raises(InvalidInput, match=r"state\.json: names .*no file of the folder"):
        build_corpus(CorpusFiles(files=("books",), text="body"), tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"bad\.jsonl:2: is not JSON"),
        ("[" * 100_000, r"bad\.jsonl:2: is not JSON"),
        ("[]", r"bad\.jsonl:2: is a list, not an object with 'text'"),
        ('{"text": null}', r"bad\.jsonl:2: 'text' is NoneType, not text"),
        ('{"text": "\\ud800"}', r"bad\.jsonl:2: 'text' holds half of a surrogate pair"),
        ('{"text": "' + "x" * 200 + '"}', r"bad\.jsonl:2: is longer than 128 bytes"),
    ],
)
def test_bad_lines_are_told_by_number(line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "longer" in message:
        monkeypatch.setattr(reader, "MAX_RECORD", 128)
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(InvalidInput, match=message):
        build_corpus(["bad.jsonl"], tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_damaged_files_are_refused_by_path(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"neither one nor the other" * 10)
    with pytest.raises(InvalidInput, match=rf"{name}.*cannot be read"):
        build_corpus([name], tmp_path)


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "MAX_BYTES", 1 << 20)
    record = json.dumps({"text": "0" * (1 << 16)}).encode() + b"\n"
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(record * 1000))
    assert (tmp_path / "bomb.jsonl.gz").stat().st_size < 1 << 20
    with pytest.raises(InvalidInput, match="at most 1,048,576 bytes"):
        build_corpus(["bomb.jsonl.gz"], tmp_path)


def test_without_pyarrow_the_message_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidInput, match=r"a\.parquet needs pyarrow: pip install '\.\[corpora\]' in a checkout"):
        build_corpus(["a.parquet"], tmp_path)


def test_a_space_names_files_by_list_or_by_keys() -> None:
    assert QualityConfig.model_validate({"corpus": ["a", "b"]}).corpus == ("a", "b")
    named = QualityConfig.model_validate({"corpus": {"files": ["a"], "text": "body"}})
    assert named.corpus == CorpusFiles(files=("a",), text="body")
    assert QualityConfig.model_validate_json(named.model_dump_json()) == named
    for wrong in ([], {"files": []}, {"file": ["a"]}, "instaled"):
        with pytest.raises(ValidationError):
            QualityConfig.model_validate({"corpus": wrong})


class Package:
    """An installed package of made-up files."""

    name = "thing"
    version = "1.0"

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self._folder = folder
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.files = [PackagePath(name) for name in files]
        for path in self.files:
            path.size = None

    def locate_file(self, path: object) -> Path:
        return self._folder / str(path)


def test_installed_packages_give_code_and_prose(tmp_path: Path) -> None:
    prose = "Explains at length what the module does and why anybody would want to have that done."
    package = Package(
        tmp_path,
        {
            "thing/core.py": f'"""{prose}"""\nX = """no docstring"""\n\ndef f():\n    """Short."""\n    return X\n',
            "thing/copy.py": f'"""{prose}"""\nX = """no docstring"""\n\ndef f():\n    """Short."""\n    return X\n',
            "thing/tests/test_core.py": "left_out = 1\n",
            "thing/made_pb2.py": "left_out = 2\n",
            "thing-1.0.dist-info/README.md": "left out",
            "docs/guide.rst": "A guide\n=======\n",
            "../../bin/thing.py": "left_out = 3\n",
        },
    )
    (tmp_path / "domains").mkdir()
    installed.write_domains([cast(Distribution, package)], tmp_path / "domains")
    code, text = ((tmp_path / "domains" / f"{name}.txt").read_text() for name in ("code", "prose"))
    assert code == 'X = """no docstring"""\n\ndef f():\n    return X\n'
    assert sorted(text.split("\n\n")) == sorted([prose, "A guide\n======="])


def test_installed_packages_are_those_that_hilnas_requires() -> None:
    names = [package.name.lower().replace("_", "-").replace(".", "-") for package in installed.distributions()]
    assert {"torch", "numpy", "pydantic-core"} <= set(names)
    assert "hilnas" not in names
    assert names == sorted(names)


def test_an_installed_corpus_states_versions_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    package = Package(folder, {"a.py": "x = 1\n" * MIN_BYTES, "a.rst": "prose\n" * MIN_BYTES})
    monkeypatch.setattr(installed, "distributions", lambda: [package])
    first = refer("installed", tmp_path)
    assert made_of(first)["thing"] == "1.0"
    monkeypatch.setattr(installed, "write_domains", None)
    assert refer("installed", tmp_path) == first
    (tmp_path / "cache/corpora" / first.hash).unlink()
    monkeypatch.undo()
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    package.version = "1.1"
    (folder / "a.py").write_text("x = 2\n" * MIN_BYTES)
    monkeypatch.setattr(installed, "distributions", lambda: [package])
    with pytest.raises(StudyChanged, match=r"thing was 1\.0, is 1\.1"):
        refer_again("installed", tmp_path, first.hash)


def test_code_and_prose_are_told_apart() -> None:
    source = '''"""Module docs."""
import os  # why

# first
# second
def f(x):
    """Does it.

        Indented.
    """
    return "kept # string"
'''
    code, prose = split_source(source)
    assert code == 'import os\n\ndef f(x):\n    return "kept # string"\n'
    assert prose == "Module docs.\n\nwhy\n\nfirst\nsecond\n\nDoes it.\n\nIndented."


def test_the_default_corpus_has_four_domains_and_one_hash() -> None:
    corpus = build_corpus("default", Path("/"))
    assert list(corpus.domains) == ["code", "generated", "languages", "prose"]
    assert all(domain.heldout.size > 25_000 for domain in corpus.domains.values())
    assert all(4 < domain.unigram_entropy < 6 for domain in corpus.domains.values())
    assert build_corpus("default", Path("/")).hash == corpus.hash
    assert made_of(refer("default", Path("/")))["python"] == sys.version.split()[0]
