"""Folders of late-interaction models, which PyLate and the `MultiVectorEncoder` of sentence-transformers open.

    config.json, model.safetensors        the transformer, for transformers' `AutoModel`
    *.py                                  our code, where no stock class of transformers will do
    tokenizer.json, tokenizer_config.json
    1_Dense/                              the projection
    modules.json, sentence_bert_config.json, config_sentence_transformers.json    in PyLate's format
    retrieval.json                        what it was trained of and how, written last

Weights are float32, so that both compute the vectors that hilnas does. `open_retriever` reads such a folder of ours or
of others without running its code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from nas.core.durable import write_durably
from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.model.nn.transformers import to_transformers, transformers_config
from nas.train.adapt.checkpoints import import_model
from nas.train.release.bundle import bundle
from nas.train.release.huggingface import own_config, write_float32
from nas.train.release.shards import SINGLE, read_json
from nas.train.release.tokenizer import json_bytes, read_content
from nas.train.retrieval.retriever import DOCUMENT, LENGTHS, QUERY, Retriever, TextTokens

RECORD = "retrieval.json"
SETTINGS = "config_sentence_transformers.json"
DENSE = "1_Dense"

_BIDIRECTIONAL = "bidirectional"
_DENSE_WEIGHT = "linear.weight"
_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": DENSE, "type": "pylate.models.Dense.Dense"},
]


def is_retriever(folder: Path) -> bool:
    """Returns whether a folder is one of a late-interaction model in PyLate's format."""
    return (folder / SETTINGS).is_file() and (folder / DENSE).is_dir()


def write_retriever(folder: Path, retriever: Retriever, tokens: TextTokens, context: int) -> None:
    """Writes a model's folder, each file atomically.

    context: tokens that the model was trained for.
    """
    layout, width = retriever.model.layout, retriever.projection.out_features
    config, tensors, code = _for_transformers(layout, retriever.model.state_dict(), retriever.bidirectional)
    special = Tokenizer.from_buffer(tokens.content)
    start, end = (token for token in (special.encode("").tokens[0], tokens.end))
    ids = {name: special.token_to_id(token) for name, token in (("bos", start), ("eos", end), ("pad", end))}
    config |= {"dtype": "float32", "max_position_embeddings": context}
    config |= {f"{name}_token_id": token for name, token in ids.items()}
    dense = {"in_features": layout.d_model, "out_features": width, "bias": False, "use_residual": False}
    query_length, document_length = tokens.lengths
    files: dict[str, object] = {
        "config.json": config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": document_length,
            "model_input_names": ["input_ids", "attention_mask"],
            "bos_token": start,
            "eos_token": end,
            "pad_token": end,
        },
        "modules.json": _MODULES,
        "sentence_bert_config.json": {"max_seq_length": document_length - 1, "do_lower_case": False},
        SETTINGS: {
            "model_type": "ColBERT",
            "similarity_fn_name": "MaxSim",
            "query_prefix": QUERY,
            "document_prefix": DOCUMENT,
            "query_length": query_length,
            "document_length": document_length,
            "do_query_expansion": tokens.expansion,
            "attend_to_expansion_tokens": tokens.expansion,
            "skiplist_words": [],
        },
        f"{DENSE}/config.json": {**dense, "activation_function": "torch.nn.modules.linear.Identity"},
    }
    (folder / DENSE).mkdir(parents=True, exist_ok=True)
    write_float32(folder / SINGLE, tensors)
    write_float32(folder / DENSE / SINGLE, {_DENSE_WEIGHT: retriever.projection.weight})
    write_durably(folder / "tokenizer.json", tokens.content)
    for name, content in files.items():
        write_durably(folder / name, json_bytes(content))
    for name, text in code.items():
        write_durably(folder / name, text)


def _for_transformers(
    layout: Layout, state: Mapping[str, Tensor], bidirectional: bool
) -> tuple[dict[str, Any], Mapping[str, Tensor], dict[str, bytes]]:
    """Returns config.json, the tensors under its names, and the code that it needs."""
    try:
        if bidirectional:
            raise Unsupported("stock classes are causal")
        return transformers_config(layout), to_transformers(layout, state), {}
    except Unsupported:
        kinds = {block.kind for layer in layout.layers for block in layer.blocks}
        config = own_config(layout)
        config["architectures"] = ["HilnasEncoder"]
        config |= {_BIDIRECTIONAL: True} if bidirectional else {}
        config["auto_map"] = {**config["auto_map"], "AutoModel": "modeling_encoder.HilnasEncoder"}
        return config, state, bundle(kinds, "modeling_encoder")


def projection_of(folder: Path, d_model: int) -> Tensor:
    """Returns the weight of a folder's projection, [width, d_model].

    Raises:
        InvalidInput: it is missing, damaged or one of several, or has a bias, an activation or a residual connection.
    """
    about, path = folder / DENSE / "config.json", folder / DENSE / SINGLE
    if further := sorted(place.name for place in folder.glob("*_Dense") if place.name != DENSE):
        raise InvalidInput(f"several projections are not read: {', '.join((DENSE, *further))}", where=str(folder))
    settings = read_json(about)
    plain = str(settings.get("activation_function", "")).endswith("Identity")
    if settings.get("bias") or settings.get("use_residual") or not plain:
        raise InvalidInput(
            "a projection with a bias, an activation or a residual connection is not read", where=str(about)
        )
    try:
        weight = load_file(path).get(_DENSE_WEIGHT)
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"cannot read it: {error}", where=str(path)) from error
    if weight is None or weight.dim() != 2 or weight.shape[1] != d_model or not weight.isfinite().all():
        raise InvalidInput(f"needs a finite {_DENSE_WEIGHT} of {d_model} columns", where=str(path))
    return weight.float()


def is_bidirectional(folder: Path) -> bool:
    """Returns whether the model of a folder that hilnas wrote is bidirectional."""
    return read_json(folder / "config.json").get(_BIDIRECTIONAL) is True


def open_retriever(folder: Path) -> tuple[Retriever, TextTokens]:
    """Reads a folder of a late-interaction model; no code of it is run.

    Raises:
        InvalidInput: a file is missing or damaged.
        Unsupported: no layout says the model, or its settings ask for what is not computed.
    """
    if not is_retriever(folder):
        raise InvalidInput(
            f"no late-interaction model: it needs {SETTINGS} and {DENSE}; `nas family retrieval` writes such a folder",
            where=str(folder),
        )
    content, _ = read_content(folder / "tokenizer.json")
    end = read_json(folder / "tokenizer_config.json").get("eos_token")
    tokens = texts_as_set(read_json(folder / SETTINGS), content, end, str(folder / SETTINGS))
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "weights.safetensors"
        layout = import_model(folder, checkpoint).layout
        tensors = load_file(checkpoint)
    weight = projection_of(folder, layout.d_model)
    bidirectional = is_bidirectional(folder)
    retriever = Retriever(layout, len(weight), bidirectional=bidirectional)
    retriever.model.load_state_dict(tensors)
    retriever.projection.load_state_dict({"weight": weight})
    if tokens.rows > layout.vocab:
        raise InvalidInput(
            f"has more tokens than the embedding's {layout.vocab:,} rows", where=f"{folder}/tokenizer.json"
        )
    return retriever.eval().requires_grad_(False), tokens


def texts_as_set(settings: Mapping[str, Any], content: bytes, end: object, where: str) -> TextTokens:
    """Returns the tokens of texts that a model's settings ask for.

    Args:
        settings: of `config_sentence_transformers.json`.
        content: tokenizer.json.
        end: token that ends a text.
        where: of the settings, for messages.

    Raises:
        InvalidInput: settings or tokenizer lack something.
        Unsupported: the settings ask for what is not computed.
    """
    expansion = settings.get("do_query_expansion", True)
    problems = {
        f"markers other than {QUERY!r} and {DOCUMENT!r}": (
            (settings.get("query_prefix"), settings.get("document_prefix")) != (QUERY, DOCUMENT)
        ),
        "words that are skipped": settings.get("skiplist_words") != [],
        "tokens of the expansion that are not attended to": (
            expansion and not settings.get("attend_to_expansion_tokens")
        ),
    }
    if missing := [name for name, present in problems.items() if present]:
        raise Unsupported(f"is not computed here: {'; '.join(missing)}", where=where)
    tokenizer = Tokenizer.from_buffer(content)
    if not isinstance(end, str) or tokenizer.token_to_id(end) is None:
        raise InvalidInput("its tokenizer names no eos_token", where=where)
    if any(tokenizer.token_to_id(marker) is None for marker in (QUERY, DOCUMENT)):
        raise InvalidInput("its tokenizer has no tokens for the markers", where=where)
    lengths = tuple(
        settings.get(f"{name}_length", most) for name, most in zip(("query", "document"), LENGTHS, strict=True)
    )
    if not all(isinstance(length, int) and 4 <= length <= 1 << 20 for length in lengths):
        raise InvalidInput("lengths must be whole numbers from 4", where=where)
    return TextTokens(content, end, (lengths[0], lengths[1]), bool(expansion))
