"""Chat about images or sound, in text or speech, with a model in PyTorch."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nas.core.durable import require_output, write_output
from nas.core.errors import InvalidInput
from nas.core.progress import Log
from nas.train.posttrain.model_source import TorchTalker
from nas.train.release.found_tokenizer import FoundTokenizer
from nas.train.towers.codec import read_codec
from nas.train.towers.detokenizer import SPEECH_RATE, SpeechState
from nas.train.towers.modality import Modality, Processor
from nas.train.towers.model import timed
from nas.train.towers.release import CODEC, TowerFolder
from nas.train.towers.speech import Mode


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
        tokens, self._encoding = super().inputs(question), 0.0
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


class SpeechTalker(TowerTalker):
    """A model that answers in text and in sound, which a file gets.

    Args:
        folder: of the model.
        modality: of its tower.
        paths: files that the first message is about.
        context: most tokens of a question with its answer, frames included.
        log: takes the real-time factors of each answer: seconds of computation per second of speech.
        speak: WAV file of 24 kHz, with the speech of all answers, one after another; written after each.
        mode: in which text and sound follow each other.

    Raises:
        InvalidInput: see `TowerTalker`; or the model does not speak.
    """

    def __init__(
        self, folder: Path, modality: Modality, paths: Sequence[Path], context: int, log: Log, speak: Path, mode: Mode
    ) -> None:
        super().__init__(folder, modality, paths, context, log)
        if self._whole.head is None:
            raise InvalidInput(
                "does not speak: `nas family audio --codec` gives a model a head that does", where=str(folder)
            )
        require_output(speak, reads=paths, flag="--speak")
        self._head, self._speak, self._mode = self._whole.head, speak, mode
        self._detokenizer = read_codec(folder / CODEC).detokenizer
        if self._detokenizer.shape.books != self._head.shape.books:
            raise InvalidInput("its codec has other codebooks than its head", where=str(folder))
        self._speech: list[Tensor] = []

    @torch.no_grad()
    def answer(
        self, question: Sequence[int], most: int, ends: Sequence[int], *, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[int]:
        """Yields the tokens of the text; those that only order text and sound are left out."""
        most = self.room(question, most)
        start, first, samples = time.perf_counter(), 0.0, list[Tensor]()
        inputs = self.inputs(question)
        seconds = {"encoder": self._encoding, "backbone": 0.0, "RQ head": 0.0, "detokenizer": 0.0}
        options: dict[str, Any] = {"temperature": temperature, "seed": seed, "seconds": seconds}
        state = SpeechState(None, None)
        for part in self._whole.spoken(inputs, most, ends, self._mode, **options):
            if isinstance(part, int):
                if part not in self._head.tokens:
                    yield part
            elif int(part[0]) != self._head.end:
                with timed(seconds, "detokenizer"):
                    chunk, state = self._detokenizer.step(part[None, None], state)
                samples.append(chunk[0])
                first = first or time.perf_counter() - start
        if not samples:
            self._log("the answer has no sound")
            return
        samples.append(self._detokenizer.last(state)[0])
        self._write(samples)
        length = sum(map(len, samples)) / SPEECH_RATE
        factors = ", ".join(f"{part} {value / length:.3f}" for part, value in seconds.items())
        whole = sum(seconds.values()) / length
        about = f"{length:.1f} s of speech, the first after {first:.2f} s"
        self._log(f"{about}; real-time factors: {factors}, together {whole:.3f}")

    def _write(self, samples: Sequence[Tensor]) -> None:
        import soundfile

        self._speech += samples
        content = io.BytesIO()
        soundfile.write(content, torch.cat(self._speech).clamp(-1, 1).numpy(), SPEECH_RATE, "PCM_16", format="WAV")
        write_output(self._speak, content.getvalue(), flag="--speak")
