"""`nas generate`: continue a text with any model."""

from __future__ import annotations

from typing import Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.options import ModelArgument, SeedOption, TemperatureOption
from nas.cli.output import JsonFlag, print_json, say
from nas.core.errors import InvalidInput
from nas.core.logs import visible
from nas.measure.runtimes.llama_cpp.binding import generate

app = command_app()


@app.command("generate")
def command(
    model: ModelArgument,
    prompt: Annotated[str, typer.Option("--prompt", help="Start of the text.")] = "The ",
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, max=4096, help="Maximum tokens to generate; a proxy's are bytes.")
    ] = 200,
    temperature: TemperatureOption = 0.8,
    seed: SeedOption = 0,
    json: JsonFlag = False,
) -> None:
    """Continue a text with a model: a GGUF file, or a folder of Hugging Face's transformers.

    No chat template is used. GGUF files run in llama.cpp, whose tokenizer is used; folders of transformers in PyTorch.
    """
    if not model.exists():
        raise InvalidInput("no such file", where=str(model))
    if not prompt:
        raise InvalidInput("must not be empty", where="--prompt")
    if model.is_dir():
        from nas.train.posttrain.model_source import continued

        written = continued(model, prompt, tokens, temperature=temperature, seed=seed, log=say)
    else:
        written = generate(model, prompt.encode(), tokens, temperature=temperature, seed=seed).decode(errors="replace")
        say(f"tokenizer of {model}, by llama.cpp; no chat template")
    if json:
        print_json({"file": str(model), "prompt": prompt, "text": written})
    else:
        typer.echo(prompt + visible(written, keep="\n\t"))
