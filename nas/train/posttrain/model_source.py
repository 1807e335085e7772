"""Any model to talk with: a GGUF file in llama.cpp, or a folder of transformers in PyTorch, with its own tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nas.core.errors import InvalidInput
from nas.core.progress import Log
from nas.measure.runtimes.dialogue import Talker, draw
from nas.measure.runtimes.llama_cpp import binding
from nas.measure.runtimes.llama_cpp.gguf_file import is_gguf
from nas.model.nn.model import Model
from nas.model.nn.weights import load_model
from nas.train.adapt.checkpoints import import_model, read_model
from nas.train.release.found_tokenizer import FoundTokenizer, found_tokenizer

_CONTEXT = 1 << 16


class OpenModel(NamedTuple):
    """A model that answers.

    Args:
        talker: continues ids.
        tokenizer: its own.
    """

    talker: Talker
    tokenizer: FoundTokenizer


@contextmanager
def open_model(source: Path, context: int) -> Iterator[OpenModel]:
    """Yields a model that continues at most `context` tokens: a GGUF file, or a folder of transformers.

    Raises:
        InvalidInput: it is neither, or damaged.
        Unsupported: its tokenizer is not read, or no layout says the folder's model.
        InfrastructureFailed: no available build of llama.cpp runs it.
    """
    if not source.exists():
        raise InvalidInput("no such file or folder", where=str(source))
    if not is_gguf(source):
        read_model(source)  # before its tokenizer, which a file that is no model would be taken for
    tokenizer = found_tokenizer(source)
    context = min(context, tokenizer.context)
    if is_gguf(source):
        with binding.dialogue(source, context) as dialogue:
            yield OpenModel(dialogue, tokenizer)
        return
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.safetensors"
        layout = import_model(source, weights).layout
        if (size := tokenizer.tokenizer.size) > layout.vocab:
            raise InvalidInput(f"has {size:,} tokens, but {layout.vocab:,} rows in its embedding", where=str(source))
        model = load_model(weights, layout)
    yield OpenModel(TorchTalker(model, context), tokenizer)


def continued(source: Path, prompt: str, tokens: int, *, temperature: float, seed: int, log: Log) -> str:
    """Returns the text with which a folder of transformers continues `prompt`; see `open_model` for what is raised."""
    with open_model(source, _CONTEXT) as opened:
        tokenizer = opened.tokenizer.tokenizer
        log(opened.tokenizer.describe())
        ids = tokenizer.tokenizer.encode(prompt).ids
        answer = list(opened.talker.answer(ids, tokens, tokenizer.ends, temperature=temperature, seed=seed))
        text: str = tokenizer.tokenizer.decode(answer)
        return text


class TorchTalker:
    """A model in PyTorch that answers as `nas.measure.runtimes.dialogue.Dialogue` does.

    Args:
        model: that answers.
        context: most tokens of a question with its answer.
    """

    def __init__(self, model: Model, context: int) -> None:
        self.model, self.context = model, context

    def inputs(self, question: Sequence[int]) -> Tensor:
        """Returns what the model reads of a question, ids [1, T]; subclasses may return embeddings [1, T, D]."""
        return torch.tensor([list(question)])

    def room(self, question: Sequence[int], most: int) -> int:
        """Returns how many of `most` tokens an answer may have; raises InvalidInput where there is no room."""
        if (room := min(most, self.context - len(question))) < 1:
            raise InvalidInput(f"{len(question):,} tokens leave no room for an answer in {self.context:,}")
        return room

    @torch.no_grad()
    def answer(
        self, question: Sequence[int], most: int, ends: Sequence[int], *, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[int]:
        most, rng = self.room(question, most), np.random.default_rng(seed)
        features, state = self.model.read(self.inputs(question))
        logits = self.model.logits(features[:, -1])
        for remaining in range(most, 0, -1):
            token = draw(logits[0].double().numpy(), temperature, rng)
            yield token
            if token in ends or remaining == 1:
                return
            logits, state = self.model.step(torch.tensor([token]), state)
