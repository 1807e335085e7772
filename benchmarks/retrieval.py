"""A late-interaction model of a member that was trained here, beside BM25, on descriptions of Debian's packages.

    python -m benchmarks.retrieval FOLDER [--small] [--page docs/measured/retrieval.md]

A query is the synopsis of a package, its answer the long description. Descriptions come from a mirror of Debian's
package lists (apt-get, 16 MB); of packages with the same first paragraph or the same synopsis one is left. 20,000
packages are there to train on, 6,000 others are the collection, and 500 of them are searched for. Manual pages of
commands on this machine (without those of gcloud, which are thousands), from NAME to DESCRIPTION, are a second
collection, which nothing is trained on. FOLDER holds data, family, model and indexes: a stopped run continues. Commands
are those that users have; BM25 is that of `bm25s`. An hour on two cores the first time; the results are in
benchmarks/recorded/retrieval.json.

With --small all is a tenth, minutes from an empty folder, for the speed and the loss of GGUF files alone; the results
are in benchmarks/recorded/retrieval-small.json.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.page import fill, table
from nas.train.retrieval.data import read_documents, read_judgements
from nas.train.retrieval.gguf import open_encoder
from nas.train.retrieval.index import Index, build_index

Row = tuple[str, str, str]
RECORDED = Path(__file__).parent / "recorded"


class Sizes(NamedTuple):
    """Packages to train on, documents, queries, tokens of pre-training, and passes over the pairs."""

    train: int
    documents: int
    queries: int
    tokens: int
    epochs: float


WHOLE, SMALL = Sizes(20_000, 6_000, 500, 1_000_000, 0.4), Sizes(2_000, 600, 200, 100_000, 1.0)
LAYOUT = "d128 v4096 ffn=swiglu:256 [C3 C3 A4/2 C3 C3 A4/2]"
SETTINGS = """\
batch: 32
lr: 0.001
document_length: 96
"""
PACKAGES, PAGES = "packages", "manual-pages"
MOST = 100
"""Documents that are looked at for each query."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of data, family, model and index")
    parser.add_argument("--page", type=Path, help="Markdown page that gets the table")
    parser.add_argument("--small", action="store_true", help="a tenth of everything")
    options = parser.parse_args()
    sizes = SMALL if options.small else WHOLE
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / PACKAGES / "corpus.jsonl").exists():
        write_packages(folder, sizes)
    if not (folder / PAGES / "corpus.jsonl").exists():
        rows = one_of_each(manual_pages(Path("/usr/share/man/man1")))
        write_collection(folder / PAGES, rows[: sizes.queries], rows)
    train(folder, sizes)
    model = json.loads((folder / "model" / "retrieval.json").read_text())
    record = {
        "model": model,
        "collections": {name: results(folder, name) for name in (PACKAGES, PAGES)},
        "encoders": encoders(folder),
    }
    (RECORDED / f"retrieval{'-small' * options.small}.json").write_text(json.dumps(record, indent=1) + "\n")
    if options.page:
        write_page(options.page, record, options.small)
    print(json.dumps(record, indent=1))


def packages(folder: Path, language: str = "en") -> Iterator[Row]:
    """Yields name, synopsis and long description of each of Debian's packages, those that have them in a language."""
    lists = folder / "lists"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["apt-get", "update", "-q", "-o", f"Acquire::Languages={language}", "-o", f"Dir::State::lists={lists}"],
        check=True,
    )
    form = rf"Package: (.+)\nDescription-md5: .+\nDescription-{language}: (.+)\n((?: .*\n?)+)"
    for path in sorted(lists.glob(f"*Translation-{language}*")):
        text = subprocess.run(["/usr/lib/apt/apt-helper", "cat-file", path], check=True, capture_output=True, text=True)
        for entry in text.stdout.split("\n\n"):
            fields = re.fullmatch(form, entry)
            if fields:
                name, synopsis, rest = fields.groups()
                yield name, synopsis, re.sub(r"^ \.?", "", rest, flags=re.M).strip()


def manual_pages(folder: Path) -> Iterator[Row]:
    """Yields name, synopsis and description of each manual page, roughly without its marks."""
    for path in sorted(folder.glob("*.gz")):
        text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        sections = r'^\.S[hH] +"?(NAME|DESCRIPTION)"?\s*\n(.*?)(?=^\.S[hHsS] |\Z)'
        parts = {name: plain(section) for name, section in re.findall(sections, text, re.M | re.S)}
        named = re.split(r" +\\?- +", parts.get("NAME", ""), maxsplit=1)
        if len(named) == 2 and not path.name.startswith("gcloud"):
            yield path.name.removesuffix(".gz"), named[1], parts.get("DESCRIPTION", "")


def plain(roff: str) -> str:
    """Returns the text of roff without macros, fonts and comments."""
    macros = r"^[.'](\\\".*|(?:[BI]|[BIR][BIR]|Nm|Nd|Fl|Ar) (.*)|.*)$"
    text = re.sub(macros, lambda match: match[2] or "", roff, flags=re.M)
    text = re.sub(r"\\(?:f\(..|f\[.*?\]|f.|s[-+]?\d|&|%|:|\^|\||c)", "", text)
    text = re.sub(r"\\\((?:en|em|hy|mi)|\\-", "-", text)
    return " ".join(re.sub(r"\\\(..|\\\[.*?\]|\\.", " ", text).split())


def one_of_each(rows: Iterable[Row], shortest: int = 100) -> list[Row]:
    """Returns rows with long enough texts, one for each synopsis and beginning of the text, in an order by hash."""
    used_keys: set[str] = set()
    chosen = []
    for name, synopsis, text in rows:
        keys = {synopsis.lower(), " ".join(text.split("\n\n")[0].split())}
        if keys & used_keys or re.search(r"transitional|dummy|metapackage", synopsis) or len(text) < shortest:
            continue
        used_keys |= keys
        chosen.append((name, synopsis, text))
    return sorted(chosen, key=lambda row: hashlib.sha256(row[0].encode()).digest())


def write_packages(folder: Path, sizes: Sizes) -> None:
    """Writes the collection of packages, and descriptions to train on as pairs and as text."""
    rows = one_of_each(packages(folder))
    train, rest = rows[: sizes.train], rows[sizes.train : sizes.train + sizes.documents]
    write_lines(folder / "train.jsonl", [{"query": synopsis, "positive": text} for _, synopsis, text in train])
    write_lines(folder / "text.jsonl", [{"text": f"{synopsis}. {text}"} for _, synopsis, text in train])
    write_collection(folder / PACKAGES, rest[: sizes.queries], rest)


def write_collection(folder: Path, queries: Sequence[Row], rows: Sequence[Row]) -> None:
    """Writes a folder of BEIR in which each query has one answer."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    write_lines(folder / "queries.jsonl", [{"_id": name, "text": synopsis} for name, synopsis, _ in queries])
    qrels = "".join(f"{name}\t{name}\t1\n" for name, _, _ in queries)
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{qrels}")
    write_lines(folder / "corpus.jsonl", [{"_id": name, "text": text} for name, _, text in rows])


def write_lines(path: Path, lines: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def train(folder: Path, sizes: Sizes, collections: Sequence[str] = (PACKAGES, PAGES)) -> None:
    """Runs the commands that are missing, indexes of `collections` the last."""
    (folder / "settings.yaml").write_text(f"epochs: {sizes.epochs}\n{SETTINGS}")
    (folder / "pretraining.yaml").write_text("stages: [{name: text, length: 256, share: 1.0}]\nlr: 0.003\n")
    tokenizer, model, home = folder / "tokenizer.json", folder / "model", folder / "home"
    if not tokenizer.exists():
        nas(folder, "family", "tokenizer", "--vocab", "4096", "--corpus", folder / "text.jsonl", "-o", tokenizer)
    if not (home / "families" / "debian").exists():
        size = ["--sizes", "2M", "--layout", LAYOUT, "--name", "debian", "--no-measure", "--candidates", "1"]
        nas(folder, "family", "build", *size, "--no-files", "--yes")
    if not (home / "families" / "debian" / "2M" / "files.json").exists():
        text = ["--corpus", folder / "text.jsonl", "--tokenizer", tokenizer, "--tokens", sizes.tokens]
        nas(folder, "family", "train", "debian", "--size", "2M", *text, "--config", folder / "pretraining.yaml")
    data = ["--data", folder / "train.jsonl", "--config", folder / "settings.yaml"]
    nas(folder, "family", "retrieval", "debian/2M", *data, "-o", model)
    for name in collections:
        nas(folder, "family", "index", model, folder / name, "-o", folder / f"{name}-index")


def nas(folder: Path, *arguments: object) -> None:
    """Runs a command in a home of its own."""
    print("nas", *arguments, file=sys.stderr)
    environment = os.environ | {"NAS_HOME": str(folder / "home")}
    subprocess.run([sys.executable, "-m", "nas.cli", *map(str, arguments)], check=True, env=environment)


def judged(folder: Path) -> tuple[dict[str, str], list[str], list[str]]:
    """Returns the documents of a collection, the queries, and the id of each query's answer."""
    relevant = read_judgements(folder, "test")
    answers = [next(iter(relevant.relevance[query])) for query in relevant.queries]
    return read_documents(folder), list(relevant.queries.values()), answers


def results(folder: Path, collection: str) -> dict[str, Any]:
    """Returns sizes, and for each way to search nDCG@10 and recall with 95 % intervals over queries."""
    documents, queries, answers = judged(folder / collection)
    index, encoder = Index(folder / f"{collection}-index"), open_encoder(folder / "model")
    began = time.monotonic()
    hits = [[hit.id for hit in best] for best in index.search(encoder.queries(queries), MOST)]
    late = ranks_of(hits, answers)
    seconds = time.monotonic() - began
    lexical = ranks_of(bm25(documents, queries), answers)
    return {
        "documents": len(documents),
        "queries": len(queries),
        "vectors": index.record.vectors,
        "cut": index.record.cut,
        "search_ms": round(1000 * seconds / len(queries), 1),
        "late": scores(late),
        "bm25": scores(lexical),
        "difference": interval(gains(late) - gains(lexical)),
    }


def encoders(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns figures of the model's folder and of GGUF files: a new index of the packages, and its search."""
    _, queries, answers = judged(folder / PACKAGES)
    figures = {}
    for name in ("torch", "f32", "q4_0"):
        model, path = folder / "model", folder / f"{name}-index"
        if name != "torch":
            model = folder / f"model-{name}.gguf"
            nas(folder, "family", "gguf", folder / "model", "-q", name, "-o", model)
        shutil.rmtree(path, ignore_errors=True)
        times = [time.monotonic()]
        record = build_index(model, [folder / PACKAGES], path, lambda line: None)
        times.append(time.monotonic())
        vectors = open_encoder(model).queries(queries)
        times.append(time.monotonic())
        hits = [[hit.id for hit in best] for best in Index(path).search(vectors, MOST)]
        times.append(time.monotonic())
        index_s, encode_s, search_s = np.diff(times).tolist()
        files = [model] if model.is_file() else list(model.rglob("*.safetensors"))
        figures[name] = {
            "bytes": sum(file.stat().st_size for file in files),
            "documents_per_s": round(record.documents / index_s, 1),
            "tokens_per_s": round(record.vectors / index_s),
            "encode_ms": round(1000 * encode_s / len(answers), 2),
            "search_ms": round(1000 * search_s / len(answers), 2),
            "nDCG@10": interval(gains(ranks_of(hits, answers))),
        }
    return figures


def bm25(documents: Mapping[str, str], queries: Sequence[str]) -> list[list[str]]:
    """Returns the ids of the best documents by BM25 for each query."""
    import bm25s

    search = bm25s.BM25()
    search.index(bm25s.tokenize(list(documents.values()), stopwords="en", show_progress=False), show_progress=False)
    tokens = bm25s.tokenize(list(queries), stopwords="en", show_progress=False)
    names = list(documents)
    return [[names[place] for place in best] for best in search.retrieve(tokens, k=MOST, show_progress=False)[0]]


def ranks_of(hits: Sequence[Sequence[object]], answers: Sequence[object]) -> NDArray[np.float64]:
    """Returns the rank of each query's one answer, from 1; infinite where it is not among the hits."""
    return np.array(
        [1 + places.index(answer) if answer in places else np.inf for places, answer in zip(hits, answers, strict=True)]
    )


def gains(ranks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the nDCG@10 of each query, with one answer each (Järvelin and Kekäläinen 2002)."""
    return np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0.0)


def scores(ranks: NDArray[np.float64]) -> dict[str, list[float]]:
    """Returns nDCG@10 and recall, each with its 95 % interval."""
    recall = {f"recall@{most}": interval((ranks <= most).astype(float)) for most in (1, 10, MOST)}
    return {"nDCG@10": interval(gains(ranks)), **recall}


def interval(values: NDArray[np.float64]) -> list[float]:
    """Returns the mean over queries and its 95 % interval, by 2,000 bootstrap draws of queries."""
    draws = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return [round(float(value), 4) for value in (values.mean(), low, high)]


def write_page(page: Path, record: dict[str, Any], small: bool) -> None:
    """Writes the table of a whole run, or that of encoders of a small one."""
    if small:
        names = ("bytes", "documents_per_s", "tokens_per_s", "encode_ms", "search_ms")
        encoder_rows = [
            (name, *(f"{measured[key]:,}" for key in names), interval_text(measured["nDCG@10"]))
            for name, measured in record["encoders"].items()
        ]
        heads = ("encoder", "bytes", "documents/s", "tokens/s", "ms to encode a query", "ms to search", "nDCG@10")
        fill(page, "encoders", table(heads, encoder_rows))
        return
    rows = []
    for name, measured in record["collections"].items():
        what = f"{name}, {measured['queries']:,} queries, {measured['documents']:,} documents"
        for way, key in (("late interaction", "late"), ("BM25", "bm25")):
            rows.append((what, way, *map(interval_text, measured[key].values())))
    columns = ("collection", "search", *record["collections"][PACKAGES]["late"])
    fill(page, "retrieval", table(columns, rows))


def interval_text(value: Sequence[float]) -> str:
    return f"{value[0]:.3f} ({value[1]:.3f} to {value[2]:.3f})"


if __name__ == "__main__":
    main()
