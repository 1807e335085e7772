"""`nas generate`: what a trained byte-level model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_json
from nas.core.errors import InvalidInput
from nas.runtimes.llama_cpp.generate import generate

app = command_app()


@app.command("generate")
def command(
    file: Annotated[Path, typer.Argument(help="GGUF file of a trained proxy, whose tokens are bytes.")],
    prompt: Annotated[str, typer.Option("--prompt", help="What the text begins with.")] = "The ",
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=4096, help="Bytes to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="0: the likeliest byte each time.")] = 0.8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of sampling.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Write text with a trained proxy: a look at what it has learned, no measure of it."""
    if not file.is_file():
        raise InvalidInput("no such file", where=str(file))
    if not prompt:
        raise InvalidInput("a text begins with at least one character", where="--prompt")
    written = generate(file, prompt.encode(), tokens, temperature=temperature, seed=seed).decode(errors="replace")
    if json:
        print_json({"file": str(file), "prompt": prompt, "text": written})
    else:
        typer.echo(prompt + _printable(written))


def _printable(text: str) -> str:
    """A model may write anything, commands to the terminal included."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
