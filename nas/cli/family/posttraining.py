"""Commands of `nas family` that post-train members, evaluate them, and chat with them."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from nas.cli.evaluate import print_scores
from nas.cli.family.members import print_stages
from nas.cli.options import (
    AnswerOption,
    BenchmarkOption,
    BenchmarksOption,
    CheckpointOption,
    ContextOption,
    DateOption,
    FamilyArgument,
    LimitOption,
    ProcessesOption,
    RewritePteOption,
    SeedOption,
    SizeOption,
    SystemOption,
    TasksOption,
    TemperatureOption,
    ToolsOption,
)
from nas.cli.output import JsonFlag, asked_lines, print_answers, print_json, say
from nas.cli.progress import activity
from nas.core.errors import InfrastructureFailed
from nas.core.family import member_folder


def post(
    name: FamilyArgument,
    size: SizeOption,
    recipe: Annotated[Path, typer.Option("--recipe", help="YAML file with the stages.", show_default=False)],
    workers: ProcessesOption = None,
    checkpoint: CheckpointOption = 60.0,
    pte: RewritePteOption = None,
    json: JsonFlag = False,
) -> None:
    """Run the stages of a recipe on a family member, such as pre-training and fine-tuning on conversations.

    See docs/how-to/post-training.md. After an interruption, repeat the command to continue from the last checkpoint.
    """
    from nas.search.spaces.problems import read_model
    from nas.train.posttrain.start import context_of
    from nas.train.recipe import PostTrainingRecipe, run_recipe
    from nas.train.release.files import files_of
    from nas.train.release.options import kept_options

    stages = read_model(recipe, PostTrainingRecipe)
    before = files_of(member_folder(name, size))
    context = None if before or stages.start is None else context_of(recipe.parent / stages.start)
    files = kept_options(before, context, pte, None)
    with activity(f"preparing {name} {size}") as log:
        record = run_recipe(
            name, size, stages, recipe.resolve().parent, log, workers=workers, files=files, checkpoint_s=checkpoint
        )
    if json:
        print_json(record.model_dump(mode="json"))
        return
    print_stages(record, "stages")
    if stages.retrieval is not None:
        finder = shlex.quote(str(member_folder(name, size) / stages.retrieval.folder))
        say(f"next: nas family index {finder} DOCUMENTS -o INDEX")


def tasks(
    output: Annotated[Path, typer.Option("--output", "-o", help="Output folder.", show_default=False)],
    train: Annotated[
        int, typer.Option("--train", min=1, max=1_000_000, help="Number of training conversations.")
    ] = 4000,
    test: Annotated[int, typer.Option("--test", min=1, max=1_000_000, help="Number of test conversations.")] = 300,
    pairs: Annotated[int, typer.Option("--pairs", min=1, max=1_000_000, help="Number of preferences.")] = 1000,
    lines: Annotated[int, typer.Option("--lines", min=1, max=1_000_000, help="Lines of text for pre-training.")] = 4000,
    seed: SeedOption = 0,
) -> None:
    """Generate small conversations with checkable answers, for trying out post-training."""
    from nas.train.posttrain.toy_data import write_tasks

    write_tasks(output, train, test, pairs, lines, seed)
    say(f"wrote train.jsonl, test.jsonl, pairs.jsonl and text/ to {output}")


def evaluate(
    name: FamilyArgument,
    size: SizeOption,
    conversations: TasksOption = None,
    data: BenchmarksOption = None,
    benchmark: BenchmarkOption = None,
    limit: LimitOption = None,
    quantisation: Annotated[
        list[str] | None,
        typer.Option(
            "--quantisation", "-q", help="File to evaluate, too; 8da4w: .pte. Repeatable.", show_default="q4_0, 8da4w"
        ),
    ] = None,
    context: ContextOption = 4096,
    date: DateOption = None,
    json: JsonFlag = False,
) -> None:
    """Compare a member's answers with expected ones, with PyTorch and with its GGUF and .pte files.

    Questions are conversations of your own, or public benchmarks by lm-evaluation-harness; see
    docs/how-to/post-training.md.
    """
    from nas.train.posttrain.evaluate import evaluate_member, questions_of
    from nas.train.release.templates import DATE

    with activity(f"evaluating {name} {size}") as log:
        questions = questions_of(conversations, data, benchmark or (), context, limit, log)
        scores = evaluate_member(name, size, questions, quantisation or ["q4_0", "8da4w"], context, log, date or DATE)
    print_scores(scores, json, public=data is not None)


def chat(
    name: FamilyArgument,
    size: SizeOption,
    quantisation: Annotated[str, typer.Option("--quantisation", "-q", help="File to use; 8da4w: .pte.")] = "q4_0",
    system: SystemOption = "",
    tools: ToolsOption = None,
    temperature: TemperatureOption = 0.3,
    tokens: AnswerOption = 512,
    context: ContextOption = 4096,
    date: DateOption = None,
    seed: SeedOption = 0,
) -> None:
    """Chat with a member: each line of stdin is a message; answers are streamed to stdout.

    When the context is full, the oldest turns are forgotten.
    """
    from nas.train.posttrain.evaluate import Chat, chat_tokenizer, open_dialogue, read_tools
    from nas.train.release.files import find_member
    from nas.train.release.templates import DATE

    folder, _, _ = find_member(name, size)
    tokenizer = chat_tokenizer(folder, date or DATE)
    functions = read_tools(tools, tokenizer.special) if tools else ()
    with open_dialogue(folder, quantisation, context) as dialogue:
        talk = Chat(dialogue, tokenizer, system, functions, say)
        print_answers(talk.answers(asked_lines(), most=tokens, temperature=temperature, seed=seed))


def serve(
    name: FamilyArgument,
    size: SizeOption,
    quantisation: Annotated[str, typer.Option("--quantisation", "-q", help="GGUF file to use.")] = "q4_0",
    context: ContextOption = 4096,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8080,
    program: Annotated[str, typer.Option("--program", help="llama.cpp's server, or its path.")] = "llama-server",
    print_only: Annotated[bool, typer.Option("--print", help="Print the command line instead of running it.")] = False,
) -> None:
    """Serve a member's GGUF file with llama.cpp's server, which has to be installed, and its OpenAI-compatible API."""
    from nas.train.posttrain.evaluate import server_command
    from nas.train.release.files import find_member

    folder, _, _ = find_member(name, size)
    command = server_command(folder, quantisation, context, host, port, program, say)
    if print_only:
        typer.echo(shlex.join(command))
        return
    if shutil.which(program) is None:
        line = shlex.join(command)
        raise InfrastructureFailed(f"no {program} found: install llama.cpp, or give --program; it would run {line}")
    sys.stdout.flush()
    os.execvp(program, command)
