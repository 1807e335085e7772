"""A late-interaction model beside BM25, a bi-encoder of the same backbone, and itself after distillation; throughput.

    python -m benchmarks.retrieval_compare FOLDER [--page docs/measured/retrieval.md] [--smollm2] [--languages]

FOLDER is that of `benchmarks.retrieval --small`, whose data and model are made if they are missing. The bi-encoder
starts from the same member, is trained on the same pairs in as many steps, and has one vector for a text: the mean of
its tokens', cosine over 0.05. Distillation continues the late-interaction model on the first 200 training queries: the
teacher is SmolLM2-135M-Instruct (98 MB, fetched), by the likelihood of the query behind a document, among the first 8
documents that the model itself finds. Each part is a file in FOLDER: a stopped run continues. The results are in
benchmarks/recorded/retrieval-compare.json.

With --smollm2 the backbone is SmolLM2-135M itself, too (an hour on one core), and both models search what nothing was
trained on: glosses of WordNet for their words, and chapters of Python's library reference for their synopses.

With --languages a member of its own is made from descriptions in four languages (those that Debian has translated),
and searches in each.

Throughput is that of torch on a random model of 30M weights, against the prefill of the same backbone with the logits
of the last token alone, which is what a language model computes before it answers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.adapt_real import unpacked
from benchmarks.page import fill, table
from benchmarks.retrieval import (
    MOST,
    PACKAGES,
    RECORDED,
    SETTINGS,
    SMALL,
    Row,
    bm25,
    gains,
    interval,
    interval_text,
    judged,
    nas,
    one_of_each,
    packages,
    ranks_of,
    scores,
    train,
    write_collection,
    write_lines,
    write_packages,
)
from nas.core.layout import Layout
from nas.model.nn.model import Model
from nas.model.nn.weights import checkpoint_layout
from nas.train.posttrain.start import start_model
from nas.train.retrieval.data import read_examples
from nas.train.retrieval.gguf import open_encoder
from nas.train.retrieval.index import Index
from nas.train.retrieval.retriever import Retriever, TextTokens, extended, load_model, text_tokens
from tests.support.smollm2 import fetch_smollm2

TAUGHT = 200
"""Training queries that the teacher scores."""
BATCHES = (1, 2, 4, 8, 16, 32)
LENGTHS = {"query": 32, "document": 512}
OTHERS = {"wordnet": "wordnet-base", "python": "python3.11-doc"}
"""Collections that nothing is trained on, and Debian's package of each."""
LANGUAGES = ("en", "de", "fr", "it")
BACKBONE = "d512 v8192 ffn=swiglu:1792 [C3 C3 A8/4 C3 C3 A8/4 C3 A8/4]"
TEMPERATURE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of `benchmarks.retrieval --small`")
    parser.add_argument("--page", type=Path, help="Markdown page that gets the tables")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2 as the backbone, too")
    parser.add_argument("--languages", action="store_true", help="another small model for several languages")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / PACKAGES / "corpus.jsonl").exists():
        write_packages(folder, SMALL)
    train(folder, SMALL, (PACKAGES,))
    recorded = RECORDED / "retrieval-compare.json"
    searches = {
        "BM25": once(folder / "bm25.json", lambda: by_bm25(folder)),
        "late interaction": once(folder / "late.json", lambda: by_index(folder, "model", f"{PACKAGES}-index")),
        "bi-encoder": once(folder / "bi.json", lambda: by_bi_encoder(folder)),
        f"late interaction, distilled on {TAUGHT} queries": once(folder / "taught.json", lambda: distilled(folder)),
    }
    record = json.loads(recorded.read_text())
    record["searches"] = searches = record["searches"] | searches
    record["throughput"] = once(folder / "throughput.json", throughput)
    if options.smollm2:
        searches["late interaction, SmolLM2-135M"] = once(folder / "smol.json", lambda: by_smollm2(folder))
        record["others"] = {name: once(folder / f"{name}.json", lambda: elsewhere(folder, name)) for name in OTHERS}  # noqa: B023
    if options.languages:
        record["languages"] = once(folder / "languages.json", lambda: in_languages(folder / "languages"))
    recorded.write_text(json.dumps(record, indent=1) + "\n")
    if options.page:
        write_page(options.page, record)
    print(json.dumps(record, indent=1))


def once(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what an earlier run measured, or measures it."""
    if not path.exists():
        path.write_text(json.dumps(measure()) + "\n")
    measured: dict[str, Any] = json.loads(path.read_text())
    return measured


def by_bm25(folder: Path, name: str = PACKAGES) -> dict[str, Any]:
    documents, queries, answers = judged(folder / name)
    return figures_of(ranks_of(bm25(documents, queries), answers))


def by_index(folder: Path, model: str, index: str, name: str = PACKAGES) -> dict[str, Any]:
    _, queries, answers = judged(folder / name)
    opened = Index(folder / index)
    hits = opened.search(open_encoder(folder / model).queries(queries), MOST)
    return figures_of(ranks_of([[hit.id for hit in best] for best in hits], answers), stored_bytes(opened))


def stored_bytes(index: Index) -> float:
    """Returns the bytes of vectors for a document."""
    return 2 * index.record.width * index.record.vectors / index.record.documents


def figures_of(ranks: NDArray[np.float64], index_bytes: float | None = None) -> dict[str, Any]:
    return {**scores(ranks), "gains": gains(ranks).tolist(), "index_bytes": index_bytes}


class BiEncoder(nn.Module):
    """One vector of norm 1 for a text: the mean of its tokens' last features, projected."""

    def __init__(self, retriever: Retriever) -> None:
        super().__init__()
        self.retriever = retriever

    def forward(self, tokens: Tensor, text: Tensor) -> Tensor:
        """Maps ids [B, T] and which of them are text -> [B, width]."""
        features = self.retriever.model.packed_features(tokens, text)
        rows = features.new_zeros(*text.shape, features.shape[-1]).masked_scatter(text[..., None], features)
        mean = rows.sum(1) / text.sum(1, keepdim=True)
        return F.normalize(self.retriever.projection(mean), dim=-1)


def by_bi_encoder(folder: Path) -> dict[str, Any]:
    """Trains a bi-encoder from the member, and searches with it."""
    os.environ["NAS_HOME"] = str(folder / "home")  # as the commands have it
    start = start_model("debian/2M")
    tokens = text_tokens(start.tokenizer.tokenizer, (32, 96), expansion=False)
    path = start.tensors(folder / "member.safetensors")
    layout = extended(checkpoint_layout(path), tokens.rows)
    model = BiEncoder(Retriever(layout, 128, 0))
    load_model(model.retriever, load_file(path), tokens.markers)
    weights = folder / "bi-encoder.safetensors"
    if weights.exists():
        model.load_state_dict(load_file(weights))
    else:
        pairs = [(example.query, example.documents[0]) for example in read_examples(folder / "train.jsonl")]
        train_bi_encoder(model, tokens, pairs, batch=32, lr=1e-3)
        save_file(model.state_dict(), weights)
    documents, queries, answers = judged(folder / PACKAGES)
    with torch.no_grad():
        model.eval()
        rows = torch.cat([model(*tokens.documents(part)) for part in parts(list(documents.values()))])
        sought = torch.cat([model(*tokens.queries(part)) for part in parts(queries)])
    names = list(documents)
    best = (sought @ rows.T).topk(min(MOST, len(names))).indices.tolist()
    return figures_of(ranks_of([[names[place] for place in places] for places in best], answers), 2 * rows.shape[1])


def train_bi_encoder(
    model: BiEncoder, tokens: TextTokens, pairs: Sequence[tuple[str, str]], *, batch: int, lr: float, seed: int = 0
) -> None:
    """Trains on pairs once, with in-batch negatives, by the schedule of `nas family retrieval`."""
    from nas.train.retrieval.training import RetrievalSettings

    settings, order = RetrievalSettings(lr=lr), np.random.default_rng([seed, 0]).permutation(len(pairs))
    optimiser = torch.optim.AdamW(model.parameters(), lr, settings.betas, weight_decay=settings.weight_decay)
    steps = max(1, len(pairs) // batch)
    for step in range(steps):
        chosen = [pairs[place] for place in order[step * batch : (step + 1) * batch]]
        for group in optimiser.param_groups:
            group["lr"] = settings.rate(step, steps)
        queries = model(*tokens.queries([query for query, _ in chosen]))
        documents = model(*tokens.documents([document for _, document in chosen]))
        loss = F.cross_entropy(queries @ documents.T / TEMPERATURE, torch.arange(len(chosen)))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimiser.step()


def parts(texts: Sequence[str], size: int = 32) -> list[Sequence[str]]:
    return [texts[first : first + size] for first in range(0, len(texts), size)]


def distilled(folder: Path) -> dict[str, Any]:
    """Continues the model by a teacher's scores of documents that it finds itself, with the commands."""
    lines = (folder / "train.jsonl").read_text().splitlines()
    write_lines(folder / "taught.jsonl", [json.loads(line) for line in lines[:TAUGHT]])
    texts = [{"id": f"{number}", "text": json.loads(line)["positive"]} for number, line in enumerate(lines)]
    write_lines(folder / "training-documents.jsonl", texts)
    index = folder / "training-index"
    nas(folder, "family", "index", folder / "model", folder / "training-documents.jsonl", "-o", index)
    data, scored = folder / "taught.jsonl", folder / "scored.jsonl"
    if not scored.exists():
        nas(folder, "family", "scores", fetch_smollm2(), "--data", data, "--index", index, "-o", scored)
    (folder / "distillation.yaml").write_text("epochs: 4\nbatch: 8\nlr: 0.0003\ndocument_length: 96\nheld_out: 0\n")
    settings = ["--config", folder / "distillation.yaml"]
    nas(folder, "family", "retrieval", folder / "model", "--data", scored, *settings, "-o", folder / "taught")
    nas(folder, "family", "index", folder / "taught", folder / PACKAGES, "-o", folder / "taught-index")
    return by_index(folder, "taught", "taught-index")


def by_smollm2(folder: Path) -> dict[str, Any]:
    """Trains SmolLM2 on the pairs that the member is trained on, and searches with it."""
    (folder / "smollm2.yaml").write_text(f"epochs: 1\nheld_out: 0\n{SETTINGS}".replace("lr: 0.001", "lr: 0.0002"))
    model, index = folder / "smollm2", folder / "smollm2-index"
    settings = ["--config", folder / "smollm2.yaml"]
    nas(folder, "family", "retrieval", fetch_smollm2(), "--data", folder / "train.jsonl", *settings, "-o", model)
    nas(folder, "family", "index", model, folder / PACKAGES, "-o", index)
    return by_index(folder, "smollm2", "smollm2-index")


def elsewhere(folder: Path, name: str) -> dict[str, Any]:
    """Searches a collection that nothing was trained on with BM25 and both models."""
    with unpacked([OTHERS[name]]) as share:
        rows = one_of_each({"wordnet": glosses, "python": chapters}[name](share), shortest=40)[: SMALL.documents]
    write_collection(folder / name, rows[: SMALL.queries], rows)
    searches = {"BM25": by_bm25(folder, name)}
    for model, title in (("model", "late interaction"), ("smollm2", "late interaction, SmolLM2-135M")):
        index = f"{name}-{model}-index"
        nas(folder, "family", "index", folder / model, folder / name, "-o", folder / index)
        searches[title] = by_index(folder, model, index, name)
    return {"documents": len(rows), "searches": searches}


def glosses(share: Path) -> Iterator[Row]:
    """Yields id, words and gloss of each set of nouns in WordNet, without the glosses that have one of the words."""
    for line in (share / "wordnet/data.noun").read_text(encoding="utf-8").splitlines():
        fields, _, gloss = line.partition(" | ")
        if line.startswith(" "):  # the licence
            continue
        head = fields.split()
        words = [head[4 + 2 * place].replace("_", " ") for place in range(int(head[3], 16))]
        text = gloss.partition(' "')[0].strip().rstrip(";")
        if not any(word.lower() in text.lower() for word in words):
            yield head[0], ", ".join(words), text


def chapters(share: Path) -> Iterator[Row]:
    """Yields name, synopsis and beginning of each chapter of Python's library reference."""
    for path in sorted(share.glob("doc/python3.11/html/_sources/library/*.rst.txt")):
        text = path.read_text(encoding="utf-8")
        if synopsis := re.search(r"^   :synopsis: (.+)$", text, re.M):
            body = re.sub(r"^(?:\.\.|   :).*$|:\w+:|[`*~]", "", text[synopsis.end() :], flags=re.M)
            yield path.name, synopsis[1], " ".join(body.split())[:2000]


def in_languages(folder: Path) -> dict[str, Any]:
    """Makes a model of descriptions in `LANGUAGES`, the same number of each, and searches in each language."""
    folder.mkdir(exist_ok=True)
    if not (folder / "text.jsonl").exists():
        pairs = []
        for language in LANGUAGES:
            rows = one_of_each(packages(folder, language))
            size = SMALL.train // len(LANGUAGES)
            pairs += rows[:size]
            rest = rows[size : size + SMALL.documents]
            write_collection(folder / f"packages-{language}", rest[: SMALL.queries], rest)
        write_lines(folder / "train.jsonl", [{"query": synopsis, "positive": text} for _, synopsis, text in pairs])
        write_lines(folder / "text.jsonl", [{"text": f"{synopsis}. {text}"} for _, synopsis, text in pairs])
    names = [f"packages-{language}" for language in LANGUAGES]
    train(folder, SMALL, names)
    return {
        name: {
            "BM25": by_bm25(folder, name),
            "late interaction": by_index(folder, "model", f"{name}-index", name),
        }
        for name in names
    }


def throughput(layout: str = BACKBONE, batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    """Returns texts a second by kind and batch: encoded, and read by the same backbone as a language model."""
    model = Retriever(Layout.parse(layout), 128, 0).eval().requires_grad_(False)
    figures: dict[str, Any] = {"layout": layout, "threads": torch.get_num_threads()}
    for name, length in LENGTHS.items():
        for batch in batches:
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randint(0, model.model.layout.vocab, (batch, length), generator=generator)
            text = torch.ones_like(tokens, dtype=torch.bool)
            ways = {"encoded": lambda: model(tokens, text), "prefill": lambda: prefill(model.model, tokens)}  # noqa: B023
            for way, run in ways.items():
                figures[f"{name}-{batch}-{way}"] = round(batch / fastest(run), 2)
    return figures


def prefill(model: Model, tokens: Tensor) -> Tensor:
    return model.logits(model.features(tokens)[:, -1])


def fastest(run: Callable[[], object], least_s: float = 2.0) -> float:
    """Returns the seconds of the fastest of several runs, within `least_s` in all and three runs at least."""
    run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < least_s:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def write_page(page: Path, record: dict[str, Any]) -> None:
    """Writes the tables of what was measured."""
    base = np.array(record["searches"]["late interaction"]["gains"])
    rows = []
    for name, measured in record["searches"].items():
        difference = interval(np.array(measured["gains"]) - base) if name != "late interaction" else None
        stored = f"{measured['index_bytes']:,.0f}" if measured["index_bytes"] else ""
        kinds = ("nDCG@10", "recall@1", "recall@10", f"recall@{MOST}")
        rows.append(
            (
                name,
                *(interval_text(measured[kind]) for kind in kinds),
                stored,
                interval_text(difference) if difference else "",
            )
        )
    heads = ("search", "nDCG@10", "recall@1", "recall@10", f"recall@{MOST}", "index, bytes/document", "difference")
    fill(page, "comparison", table(heads, rows))
    if "others" in record:
        fill(page, "others", differences_table(record["others"]))
    if "languages" in record:
        languages = {name: {"searches": searches} for name, searches in record["languages"].items()}
        fill(page, "languages", differences_table(languages))
    figures = record["throughput"]
    speeds = [
        (f"{batch}", *(f"{figures[f'{name}-{batch}-{way}']:,}" for name in LENGTHS for way in ("encoded", "prefill")))
        for batch in BATCHES
    ]
    ways = ("encoded", "prefill")
    columns = [f"{name} of {length} tokens, {way}" for name, length in LENGTHS.items() for way in ways]
    fill(page, "throughput", table(("batch", *columns), speeds))


def differences_table(collections: dict[str, dict[str, Any]]) -> str:
    """Returns nDCG@10 and recall of each search of each collection, and the difference from BM25."""
    rows = []
    for name, measured in collections.items():
        lexical = np.array(measured["searches"]["BM25"]["gains"])
        for way, figures in measured["searches"].items():
            difference = "" if way == "BM25" else interval_text(interval(np.array(figures["gains"]) - lexical))
            rows.append(
                (
                    name,
                    way,
                    *(interval_text(figures[kind]) for kind in ("nDCG@10", "recall@1", "recall@10")),
                    difference,
                )
            )
    return table(("collection", "search", "nDCG@10", "recall@1", "recall@10", "difference from BM25"), rows)


if __name__ == "__main__":
    main()
