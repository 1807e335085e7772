"""Late-interaction models as GGUF files: llama.cpp computes the token vectors, in its embedding mode without pooling.

llama.cpp applies the projection itself behind its architectures lfm2 and lfm2moe ("dense_2.weight", made for
LFM2-ColBERT). Files of other architectures hold it as a key, and it is applied here. Vectors get the norm 1 here.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from nas.core.errors import InvalidInput, UnknownName
from nas.core.plan import PlanFile
from nas.measure.runtimes.checkpoint_file import CheckpointFile
from nas.measure.runtimes.llama_cpp.binding import TEXTS_AT_ONCE, TOKENS_AT_ONCE, vectors_of
from nas.measure.runtimes.llama_cpp.gguf_file import RETRIEVAL, GgufFile, is_gguf
from nas.measure.runtimes.llama_cpp.release import write_file
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.support import PATCHED
from nas.measure.runtimes.llama_cpp.writer import PROJECTION, Released, TokenVectors
from nas.train.release.found_tokenizer import found_tokenizer
from nas.train.release.gguf_tokenizer import tokenizer_of_gguf
from nas.train.release.options import QUANTISATIONS
from nas.train.retrieval.release import SETTINGS, open_retriever, texts_as_set
from nas.train.retrieval.retriever import Batch, Encoder, Floats, TorchEncoder


def write_gguf_retriever(folder: Path, quantisation: str, output: Path, name: str) -> PlanFile:
    """Writes a late-interaction model as a GGUF file, its projection in float32.

    Args:
        folder: of the model.
        quantisation: of the file.
        output: the file.
        name: of the model, which the file has.

    Raises:
        InvalidInput: the folder is no late-interaction model, or damaged.
        UnknownName: no such quantisation.
        Unsupported: llama.cpp does not carry its layout or its tokenizer.
        InfrastructureFailed: a build is missing, or the file cannot be written.
    """
    if quantisation not in QUANTISATIONS:
        raise UnknownName("quantisation", quantisation, QUANTISATIONS)
    retriever, _ = open_retriever(folder)
    tokenizer, layout = found_tokenizer(folder), retriever.model.layout
    settings = (folder / SETTINGS).read_text(encoding="utf-8")
    vectors = TokenVectors(retriever.projection.weight.numpy(), settings, retriever.bidirectional)
    vocabulary = tokenizer.tokenizer.vocabulary(layout.vocab)
    released = Released(name, None, vocabulary, tokenizer.context, vectors)
    with tempfile.TemporaryDirectory() as scratch:
        weights = Path(scratch) / "weights.safetensors"
        save_file(retriever.model.state_dict(), weights)
        with CheckpointFile(weights) as state:
            return write_file(layout, quantisation, state, output, released).file


class GgufEncoder(Encoder):
    """Computes vectors with llama.cpp, several texts together, in a process that stays until the encoder is gone.

    Args:
        path: of the file.

    Raises:
        InvalidInput: the file is damaged, or no late-interaction model.
        Unsupported: its settings or its tokenizer ask for what is not computed.
        InfrastructureFailed: no available build runs it.
    """

    def __init__(self, path: Path) -> None:
        file, where = GgufFile.read(path), str(path)
        fields, arch = file.fields, file.fields.get("general.architecture")
        if RETRIEVAL not in fields:
            what = f"no late-interaction model: it has no key {RETRIEVAL}; `nas family gguf` writes such files"
            raise InvalidInput(what, where=where)
        self._projection: Floats | None = None
        try:
            settings = dict(json.loads(str(fields[RETRIEVAL])))
            if PROJECTION in fields:
                d_model = file.tensors["token_embd.weight"].shape[1]
                self._projection = np.array(fields[PROJECTION], np.float32).reshape(-1, d_model)
                width = len(self._projection)
            else:
                width = file.tensors["dense_2.weight"].shape[0]
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"it is damaged: {error}", where=where) from error
        tokenizer = tokenizer_of_gguf(file)
        tokens = texts_as_set(settings, tokenizer.content, tokenizer.named.get("eos_token"), where)
        build, threads = LLAMA_CPP.find_build(patched=arch == PATCHED), len(os.sched_getaffinity(0))
        self._process = vectors_of(build, path, max(tokens.lengths), threads)
        weakref.finalize(self, self._process.close)
        # llama.cpp cuts texts of unequal lengths to compute them, which must not be where tokens see those behind.
        self._alike = fields.get(f"{arch}.attention.causal") is False
        super().__init__(tokens, width)

    def vectors(self, batch: Batch) -> list[Floats]:
        """Returns the vectors of a batch's texts, of norm 1, without padding.

        Raises:
            CandidateFailed: llama.cpp dies on the file (crash), or gives no finite vectors (not_finite).
        """
        texts = [row[mask].tolist() for row, mask in zip(batch.tokens, batch.text, strict=True)]
        vectors = dict[int, Floats]()
        for places in together([len(text) for text in texts], self._alike):
            vectors |= zip(places, self._process.vectors([texts[place] for place in places]), strict=True)
        rows = [vectors[place] for place in range(len(texts))]
        if self._projection is not None:
            rows = [row @ self._projection.T for row in rows]
        return [row / np.maximum(np.linalg.norm(row, axis=1, keepdims=True), 1e-12) for row in rows]


def together(lengths: Sequence[int], alike: bool) -> Iterator[list[int]]:
    """Yields the places of texts that are computed together, by their numbers of tokens: of like length, or `alike`."""
    places: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        full = len(places) == TEXTS_AT_ONCE or lengths[place] * (len(places) + 1) > TOKENS_AT_ONCE
        if places and (full or (alike and lengths[place] != lengths[places[0]])):
            yield places
            places = []
        places.append(place)
    yield places


def open_encoder(model: Path) -> Encoder:
    """Returns the encoder of a late-interaction model: llama.cpp for a GGUF file, torch for a folder.

    Raises:
        InvalidInput: it is damaged, or no such model.
        Unsupported: no layout says the model, or its settings ask for what is not computed.
        InfrastructureFailed: no available build runs a GGUF file.
    """
    if is_gguf(model):
        return GgufEncoder(model)
    retriever, tokens = open_retriever(model)
    return TorchEncoder(retriever.to("cuda" if torch.cuda.is_available() else "cpu"), tokens)
