"""`nas generate`: generate text with a trained byte-level model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.options import SeedOption
from nas.cli.output import JsonFlag, print_json
from nas.core.errors import InvalidInput
from nas.measure.runtimes.llama_cpp.binding import generate

app = command_app()


@app.command("generate")
def command(
    file: Annotated[Path, typer.Argument(help="GGUF file of a trained proxy model with byte tokens.")],
    prompt: Annotated[str, typer.Option("--prompt", help="Start of the text.")] = "The ",
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=4096, help="Number of bytes to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="Sampling temperature; 0: greedy.")] = 0.8,
    seed: SeedOption = 0,
    json: JsonFlag = False,
) -> None:
    """Generate text with a trained proxy model, for a quick look at its quality."""
    if not file.is_file():
        raise InvalidInput("no such file", where=str(file))
    if not prompt:
        raise InvalidInput("must not be empty", where="--prompt")
    written = generate(file, prompt.encode(), tokens, temperature=temperature, seed=seed).decode(errors="replace")
    if json:
        print_json({"file": str(file), "prompt": prompt, "text": written})
    else:
        # A terminal would interpret control characters.
        typer.echo(
            prompt + "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in written)
        )
