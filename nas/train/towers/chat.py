"""Chat about images or sound with a model in PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nas.model.nn.fit import Log
from nas.train.posttrain.model_source import TorchTalker
from nas.train.release.found_tokenizer import FoundTokenizer
from nas.train.towers.modality import Modality, Processor
from nas.train.towers.release import TowerFolder


class TowerTalker(TorchTalker):
    """A model that answers questions about images or sound.

    Args:
        folder: of the model, see `nas.train.towers.release`.
        modality: of its tower.
        paths: files that the first message is about.
        context: most tokens of a question with its answer.
        log: takes the real-time factors of each answer about sound: seconds of computation per second of sound.
        processor: changes how files are processed; None: as the model was trained.

    Attributes:
        opening: text that stands for the files in front of the first message.
        tokenizer: the model's own.

    Raises:
        InvalidInput: the folder holds no such model, or a file cannot be read.
        Unsupported: no layout says the language model, or the tower is another one.
    """

    def __init__(
        self,
        folder: Path,
        modality: Modality,
        paths: Sequence[Path],
        context: int,
        log: Log = lambda line: None,
        processor: Callable[[Any], Processor] | None = None,
    ) -> None:
        whole = TowerFolder.read(folder, modality).open()
        super().__init__(whole.model.backbone.eval().requires_grad_(False), min(context, whole.context))
        self.tokenizer = FoundTokenizer(whole.tokenizer, folder)
        self._processor = whole.processor if processor is None else processor(whole.processor)
        self._files = [modality.processor.read(path) for path in paths]
        self.opening = "".join(self._processor.text(file) for file in self._files)
        self._whole, self._log = whole.model.eval().requires_grad_(False), log
        self._seconds = sum(self._processor.seconds(file) for file in self._files)
        self._encoding = 0.0

    def inputs(self, question: Sequence[int]) -> Tensor:
        tokens = super().inputs(question)
        # The files leave the context with the first message.
        if self._whole.placeholder not in question:
            return tokens
        start = time.perf_counter()
        embeddings = self._whole.embeddings(tokens, *self._processor.inputs(self._files))
        self._encoding = time.perf_counter() - start
        return embeddings

    def answer(
        self, question: Sequence[int], most: int, ends: Sequence[int], *, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[int]:
        start, first = time.perf_counter(), 0.0
        for token in super().answer(question, most, ends, temperature=temperature, seed=seed):
            first = first or time.perf_counter() - start
            yield token
        if self._seconds and self._whole.placeholder in question:
            whole = time.perf_counter() - start
            encoding, first, whole = (value / self._seconds for value in (self._encoding, first, whole))
            parts = f"reading and encoding {encoding:.3f}, to the first token {first:.3f}, with the answer {whole:.3f}"
            self._log(f"{self._seconds:.1f} s of sound; real-time factors: {parts}")
