"""`nas chat`: chat with any model, a GGUF file or a folder of transformers."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from operator import methodcaller
from pathlib import Path
from typing import Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.options import (
    AnswerOption,
    ContextOption,
    DateOption,
    ModelArgument,
    SeedOption,
    SystemOption,
    TemperatureOption,
    ToolsOption,
)
from nas.cli.output import asked_lines, print_answers, say
from nas.core.errors import InvalidInput

app = command_app()


class SpeechMode(StrEnum):
    """Order of text and sound."""

    INTERLEAVED = "interleaved"
    SEQUENTIAL = "sequential"


@app.command("chat")
def command(
    model: ModelArgument,
    system: SystemOption = "",
    tools: ToolsOption = None,
    temperature: TemperatureOption = 0.3,
    tokens: AnswerOption = 512,
    context: ContextOption = 4096,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            "--image", help="Image that the first message is about, for a model that reads images. Repeatable."
        ),
    ] = None,
    image_tokens: Annotated[
        int | None,
        typer.Option(
            "--image-tokens", min=1, max=4096, help="Maximum tokens of an image or tile.", show_default="as trained"
        ),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option(
            "--audio",
            help="WAV or FLAC file that the first message is about, likewise, for one that reads sound.",
        ),
    ] = None,
    speak: Annotated[
        Path | None,
        typer.Option("--speak", help="WAV file that gets the spoken answers, of a model that speaks.", dir_okay=False),
    ] = None,
    mode: Annotated[
        SpeechMode, typer.Option("--mode", help="Order of text and sound in spoken answers.")
    ] = SpeechMode.INTERLEAVED,
    date: DateOption = None,
    seed: SeedOption = 0,
) -> None:
    """Chat with a model: a GGUF file, or a folder of Hugging Face's transformers.

    Each line of stdin is a message; answers are streamed to stdout. GGUF files run in llama.cpp, folders of
    transformers in PyTorch, with the model's own tokenizer and chat template. When the context is full, the oldest
    turns are forgotten. With --image, the folder is one of `nas family vision`, or of LFM2-VL; with --audio, one of
    `nas family audio`, and each answer about the sound has its real-time factors on stderr. With --speak, the folder
    is one of `nas family audio --codec`.
    """
    from nas.train.posttrain.conversations import ChatTokenizer
    from nas.train.posttrain.evaluate import Chat, read_tools
    from nas.train.posttrain.model_source import OpenModel, open_model
    from nas.train.release.templates import DATE

    with ExitStack() as stack:
        opening = ""
        if image_tokens is not None and not image:
            raise InvalidInput("applies only with --image", where="--image-tokens")
        if image and speak:
            raise InvalidInput("no model reads images and speaks: give one of --image and --speak", where="--speak")
        if image and audio:
            raise InvalidInput("no model reads images and sound: give one of --image and --audio", where="--audio")
        # Packages of towers are extras.
        if image:
            from nas.train.towers.chat import TowerTalker
            from nas.train.towers.vision import VISION

            limited = None if image_tokens is None else methodcaller("limited", image_tokens)
            talker = TowerTalker(model, VISION, image, context, say, limited)
            opened, opening = OpenModel(talker, talker.tokenizer), talker.opening
        elif audio or speak:
            from nas.train.towers.audio import AUDIO
            from nas.train.towers.chat import SpeechTalker, TowerTalker

            heard = audio or []
            talker = (
                SpeechTalker(model, AUDIO, heard, context, say, speak, mode.value)
                if speak
                else TowerTalker(model, AUDIO, heard, context, say)
            )
            opened, opening = OpenModel(talker, talker.tokenizer), talker.opening
        else:
            opened = stack.enter_context(open_model(model, context))
        tokenizer = ChatTokenizer(opened.tokenizer.tokenizer, str(model), date or DATE, trains=False)
        functions = read_tools(tools, tokenizer.special) if tools else ()
        say(opened.tokenizer.describe())
        talk = Chat(opened.talker, tokenizer, system, functions, say, opening)
        print_answers(talk.answers(asked_lines(), most=tokens, temperature=temperature, seed=seed))
