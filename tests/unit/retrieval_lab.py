"""Small late-interaction models and data for them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nas.core.layout import Layout
from nas.train.release.tokenizer import byte_tokenizer
from nas.train.retrieval.release import write_retriever
from nas.train.retrieval.retriever import Retriever, TextTokens, extended, text_tokens

LAYOUT = Layout.parse("d64 v320 ffn=swiglu:96 [C3 A4/2*2]")
WORDS = ["cat", "mat", "dog", "sat", "on", "the", "größer", "Meere", "def", "add", "return", "code", "search", "model"]


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in lines))
    return path


def texts(count: int, length: int = 12) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, length)) for _ in range(count)]


def retriever(layout: Layout = LAYOUT, *, bidirectional: bool = False, **more: Any) -> tuple[Retriever, TextTokens]:
    """A random model of byte tokens with vectors of 16 values."""
    tokens = text_tokens(byte_tokenizer(layout.vocab), **more)
    model = Retriever(extended(layout, tokens.rows), 16, seed=1, bidirectional=bidirectional)
    return model.eval().requires_grad_(False), tokens


def write_model(folder: Path, layout: Layout = LAYOUT, **more: Any) -> tuple[Retriever, TextTokens]:
    """The same with its folder."""
    model, tokens = retriever(layout, **more)
    folder.mkdir(parents=True)
    write_retriever(folder, model, tokens, 2048)
    return model, tokens
