"""Shared by tests of `nas adapt`: a tiny trained model, its text, and an arithmetic device."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrain_lab import write_corpus, write_tokenizer

from benchmarks.adapt import TINY, TINY_SETTINGS, ArithmeticBench
from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.model.nn.fit import Worker
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights
from nas.model.text.documents import read_sources
from nas.train.adapt.adapt import Adaptation
from nas.train.adapt.device import Bench
from nas.train.adapt.parallel import Workers
from nas.train.adapt.prepare import prepare
from nas.train.adapt.request import AdaptRequest, AdaptSettings
from nas.train.pretrain.data import Tokens, Vocabulary, tokenise
from nas.train.pretrain.next_token import Packed

LAYOUT, SETTINGS = TINY, TINY_SETTINGS
QUICK = SETTINGS.model_copy(update={"library": SETTINGS.library.model_copy(update={"tokens": 256})})
"""One step for each alternative."""
FEW = QUICK.model_copy(update={"alternatives": ("gqa", "swiglu", "-")})
"""The same for fewer alternatives."""
LONG = SETTINGS.model_copy(update={"library": SETTINGS.library.model_copy(update={"tokens": 8192})})
"""Thirty-two steps for each alternative."""
RECALLING = QUICK.model_copy(
    update={
        "library": QUICK.library.model_copy(
            update={"length": 96, "score_length": 96, "score_tokens": 384, "recall_tokens": 768}
        )
    }
)
"""Windows that are long enough for answers in generated text."""


def alone(yield_hook: Any = lambda: None) -> Worker:
    return Worker(torch.device("cpu"), lambda line: None, yield_hook)


def work_of(layout: Layout) -> Mapping[str, float]:
    """A device whose decode time is the layout's arithmetic."""
    if any(not layer.mixers for layer in layout.layers[:1]):
        raise Unsupported("the first layer needs a mixer")
    return {"decode_p50": layout.flops(256) / 1e6, "file_size": layout.params.total / 1e6}


def write_lab(folder: Path) -> Path:
    """Writes a text, a tokenizer and a trained model of three layers; returns the folder."""
    return Path(shutil.copytree(_lab(), folder, dirs_exist_ok=True))


@cache
def _lab() -> Path:
    """Trains the model once for all tests of this process."""
    folder = Path(tempfile.mkdtemp(prefix="hilnas-adapt-"))
    atexit.register(shutil.rmtree, folder)
    corpus = write_corpus(folder / "text")
    write_tokenizer(folder / "tokenizer.json", corpus)
    model = Model(LAYOUT, seed=1)
    packed = Packed("teacher", sources(folder), 32, 16, 0)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(60):
        inputs, labels = packed.batch(step)
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    save_weights(model, folder / "teacher.safetensors")
    return folder


def sources(lab: Path) -> list[Tokens]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAS_CACHE", str(lab / "cache"))
        vocabulary = Vocabulary(lab / "tokenizer.json", LAYOUT.vocab)
        return [tokenise(source, vocabulary, None, 0, 1 << 16) for source in read_sources([lab / "text"], 0.2)]


def adaptation(
    lab: Path,
    out: Path,
    library: Path,
    worker: Worker | None = None,
    budget: str = "",
    measure: Callable[[Layout], Mapping[str, float]] = work_of,
    *,
    bench: Bench | None = None,
    settings: AdaptSettings = SETTINGS,
    teacher: Path | None = None,
    tokenizer: Path | None = None,
    workers: Workers | None = None,
    **keys: Any,
) -> Adaptation:
    limit = work_of(LAYOUT)["decode_p50"] * 0.8
    request = AdaptRequest(
        **dict(settings),
        **{"device": "arithmetic", "gguf": ("f16",)} | keys,
        model=teacher or lab / "teacher.safetensors",
        tokenizer=tokenizer or lab / "tokenizer.json",
        corpus=(lab / "text",),
        budget=(budget or f"decode_p50<={limit:.6f}ms",),
        output=out,
        library_folder=library,
    )
    return prepare(request, lambda layouts: bench or ArithmeticBench(measure), worker or alone(), workers)
