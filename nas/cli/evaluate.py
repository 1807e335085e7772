"""`nas evaluate`: right answers of any models, GGUF files or folders of transformers, to the same questions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.options import (
    BenchmarkOption,
    BenchmarksOption,
    ContextOption,
    DateOption,
    LimitOption,
    TasksOption,
)
from nas.cli.output import JsonFlag, print_json, print_table, say
from nas.cli.progress import activity

if TYPE_CHECKING:
    from nas.core.family import Evaluation

app = command_app()


@app.command("evaluate")
def command(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL...", help="GGUF files, or folders of transformers.", exists=True)
    ],
    conversations: TasksOption = None,
    data: BenchmarksOption = None,
    benchmark: BenchmarkOption = None,
    limit: LimitOption = None,
    context: ContextOption = 4096,
    date: DateOption = None,
    json: JsonFlag = False,
) -> None:
    """Count right answers of models to questions of your own or of public benchmarks.

    GGUF files run in llama.cpp, folders of transformers in PyTorch, each with its own tokenizer and chat template; the
    other models are compared with the first. Questions are conversations of your own, or public benchmarks by
    lm-evaluation-harness; see docs/how-to/post-training.md.
    """
    from nas.train.posttrain.evaluate import evaluate_models, questions_of
    from nas.train.release.templates import DATE

    with activity("evaluating") as log:
        questions = questions_of(conversations, data, benchmark or (), context, limit, log)
        scores = evaluate_models(models, questions, context, log, date or DATE)
    print_scores(scores, json, public=data is not None)


def print_scores(scores: Evaluation, json: bool, *, public: bool) -> None:
    """Prints right answers to the questions of `public` benchmarks, or exact answers to conversations."""
    if json:
        print_json(scores.model_dump(mode="json"))
        return
    print_table(scores.head, scores.rows, title="right answers" if public else "exact answers")
    for note in scores.notes:
        say(note)
