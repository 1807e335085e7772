"""A published GGUF file goes in and out: logits, bits per byte of each type, tokens and chat templates; JSON.

    python -m benchmarks.gguf_models [--page docs/measured/model-files.md]

SmolLM2-135M-Instruct, published as Q4_1, is fetched into the cache, imported, and written as F32, F16, Q8_0 and Q4_0.
The F32 file's logits in llama.cpp are compared with PyTorch's, and bits per byte of each file with the published one's,
on 100 kB of Python's documentation. Each file answers the same questions in `nas chat`, greedily. Chat templates are
those that llama.cpp's source keeps of published models rendered here and by transformers. What was computed is kept in
benchmarks/recorded/gguf-models.json, and not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from benchmarks.page import fill, table
from nas.core.canonical import sha256_of
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.llama_cpp import source
from nas.measure.runtimes.llama_cpp.binding import bits_per_byte, evaluate
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.model.nn.model import Model
from nas.model.nn.weights import load_weights
from nas.train.adapt.checkpoints import import_model
from nas.train.release.found_tokenizer import found_tokenizer
from nas.train.release.templates import TURN, rendered
from tests.support.smollm2 import fetch_smollm2

RECORDED = Path(__file__).parent / "recorded/gguf-models.json"
TEXT_BYTES = 100_000
TOKENS = 256
TYPES = ("f32", "f16", "q8_0", "q4_0")
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And\ntwice that?"},
]
_NAMES = {"Q4_1 as published": "q4_1", **{name.upper(): name for name in TYPES}}
DATE = "2025-01-01"
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Why is the sky blue? Answer in one sentence.")
ANSWER_TOKENS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="Markdown page that gets the tables")
    page = parser.parse_args().page
    record = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name, value in results(Path(folder), record):
            record[name] = value
            RECORDED.write_text(json.dumps(record, indent=2) + "\n")
            print(name, json.dumps(value), file=sys.stderr)
    if page:
        write_page(page, record)
    print(json.dumps(record, indent=2))


def results(folder: Path, record: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields what is not recorded yet."""
    if "templates" not in record:
        yield "templates", templates()
    published, weights = fetch_smollm2(), folder / "smollm2.safetensors"
    layout, tokenizer = import_model(published, weights).layout, found_tokenizer(published)
    checkpoint = Checkpoint(weights, sha256_of(weights))
    vocabulary = tokenizer.tokenizer.vocabulary(layout.vocab)
    texts, build, threads = [text()], LLAMA_CPP.find_build(), len(os.sched_getaffinity(0))
    for name in TYPES:
        if name in record and name in record.get("answers", {}):
            continue
        path = folder / f"{name}.gguf"
        LLAMA_CPP.export_trained(layout, name, checkpoint, path, "SmolLM2-135M-Instruct", vocabulary, tokenizer.context)
        if name == "f32" and "logits" not in record:
            ids = tokenizer.tokenizer.tokenizer.encode(texts[0][:4096]).ids[:TOKENS]
            llama_logits = evaluate(build, path, ids, [TOKENS], folder).logits
            yield "logits", difference(layout, weights, ids, llama_logits)
        if name not in record:
            yield name, {"bytes": path.stat().st_size, "bits_per_byte": bits_per_byte(build, path, texts, threads)}
        yield "answers", record.get("answers", {}) | {name: answers(path)}
        path.unlink()
    if "q4_1" not in record:
        bits = bits_per_byte(build, published, texts, threads)
        yield "q4_1", {"bytes": published.stat().st_size, "bits_per_byte": bits}
    if "q4_1" not in record["answers"]:
        yield "answers", record["answers"] | {"q4_1": answers(published)}


def answers(model: Path) -> list[str]:
    """Returns what `nas chat` prints to each of `QUESTIONS`, in a conversation of its own."""
    options = ("--temperature", "0", "--tokens", str(ANSWER_TOKENS))
    argv = [sys.executable, "-m", "nas.cli", "chat", str(model), *options]
    texts = []
    for question in QUESTIONS:
        done = subprocess.run(argv, input=f"{question}\n", capture_output=True, text=True, check=True, timeout=900)
        texts.append(" ".join(done.stdout.split()).replace("|", "\\|"))
    return texts


def text() -> str:
    """Returns the first bytes of the reference of Python, as `pydoc` has it."""
    whole = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    return whole.encode()[:TEXT_BYTES].decode(errors="ignore")


def difference(layout: Layout, weights: Path, ids: list[int], llama_logits: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Returns how far llama.cpp's logits are from PyTorch's."""
    model = Model(layout, None).eval()
    load_weights(model, weights)
    with torch.no_grad():
        torch_logits = model(torch.tensor([ids]))[0].numpy()
    return {
        "tokens": len(ids),
        "relative": float(np.linalg.norm(llama_logits - torch_logits) / np.linalg.norm(torch_logits)),
        "largest": float(np.abs(llama_logits - torch_logits).max()),
        "deviation": float(torch_logits.std()),
        "same_top": float((llama_logits.argmax(-1) == torch_logits.argmax(-1)).mean()),
    }


def templates() -> dict[str, str]:
    """Returns template -> "same", or how the text of ours and transformers' differ."""
    import datetime

    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    class Frozen(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Self:
            return cls.fromisoformat(DATE)

    chat_template_utils.datetime = Frozen
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **names)
    options = {"tools": None, "add_generation_prompt": True, "enable_thinking": False}
    outcomes = {}
    for name, template in published_templates():
        try:
            our_text = rendered(template, {**TURN, **names, "messages": MESSAGES, **options}, name, DATE)
        except InvalidInput as error:
            our_text = f"refused: {error.message}"
        try:
            upstream_text = tokenizer.apply_chat_template(MESSAGES, chat_template=template, tokenize=False, **options)
        except Exception as error:
            upstream_text = f"refused: {error}"
        both_refuse = our_text.startswith("refused") and upstream_text.startswith("refused")
        outcomes[name] = (
            "refused by both"
            if both_refuse
            else "same"
            if our_text == upstream_text
            else f"{our_text!r} / {upstream_text!r}"[:500]
        )
    return outcomes


def published_templates() -> Iterator[tuple[str, str]]:
    """Yields the chat templates of models in the source of llama.cpp."""
    with tarfile.open(source.fetch(print)) as archive:
        for member in archive:
            path = Path(member.name)
            if path.parent.as_posix().endswith("models/templates") and path.suffix == ".jinja":
                file = archive.extractfile(member)
                assert file is not None
                yield path.stem, file.read().decode()


def write_page(page: Path, record: dict[str, Any]) -> None:
    """Writes the tables."""
    logits, outcomes = record["logits"], record["templates"]
    rows = [(name, f"{one['bytes'] / 1e6:.1f}", f"{one['bits_per_byte']:.4f}") for name, one in _files(record)]
    text = table(("file", "MB", "bits per byte"), rows)
    text += (
        f"\nLogits of the F32 file in llama.cpp and of the import in PyTorch, {logits['tokens']} tokens: they differ by"
        f" {logits['relative']:.1e} (norm of the difference over that of the logits), by {logits['largest']:.1e} at"
        f" most where their deviation is {logits['deviation']:.1f}, and {logits['same_top']:.1%} of the likeliest"
        " tokens are the same.\n"
    )
    fill(page, "smollm2", text)
    rows = []
    for i, question in enumerate(QUESTIONS):
        texts = {name: record["answers"][key][i] for name, key in _NAMES.items()}
        for answer in dict.fromkeys(texts.values()):
            rows.append((question, ", ".join(name for name in texts if texts[name] == answer), answer))
    text = table(("question", "file", "answer"), rows)
    fill(page, "answers", text)
    same = sum(outcome == "same" for outcome in outcomes.values())
    others = [(name, outcome) for name, outcome in outcomes.items() if outcome != "same"]
    text = f"{same} of {len(outcomes)} templates give the same text.\n"
    fill(page, "templates", text + (f"\n{table(('template', 'outcome'), others)}" if others else ""))


def _files(record: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, record[key]) for name, key in _NAMES.items()]


if __name__ == "__main__":
    main()
