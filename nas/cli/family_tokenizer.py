"""`nas family tokenizer`: a tokeniser for members."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nas.cli.output import say


def tokenizer(
    output: Annotated[Path, typer.Option("--output", "-o", help="tokenizer.json to write.")],
    vocab: Annotated[int, typer.Option("--vocab", help="Tokens, special ones included.")] = 65536,
    corpus: Annotated[
        list[Path] | None,
        typer.Option("--corpus", help="UTF-8 file, or folder of them; may be repeated. Default: the default corpus."),
    ] = None,
) -> None:
    """Train a byte-level BPE tokeniser, with special tokens for chat, tools and filling in the middle.

    Stock transformers and stock llama.cpp turn text into the same tokens with it. The same text gives the same file.
    """
    from nas.family.tokenizer_training import train_tokenizer

    made = train_tokenizer(corpus or [], vocab, output, say)
    say(f"wrote {output}: {len(made.tokens):,} tokens, {len(made.special)} of them special")
