"""`nas family`: build, train, compare and show model families."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nas.cli.lazy import command_app
from nas.cli.options import (
    INTERRUPTED,
    ContextOption,
    DatabaseOption,
    DateOption,
    DeviceOption,
    FamilyArgument,
    OutputOption,
    ProcessesOption,
    RewritePteOption,
    SeedOption,
    SizeOption,
    ThreadsOption,
    YesOption,
    read_layout,
)
from nas.cli.output import JsonFlag, asked_lines, print_answers, print_fields, print_json, print_table, say
from nas.cli.progress import shown
from nas.core.durable import output_file, require_output, write_output
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.family import (
    PRETRAININGS,
    BuildDecision,
    Comparison,
    MeasuredModel,
    MemberFiles,
    MemberTraining,
    RecordedFigure,
    member_folder,
)
from nas.core.layout import Layout
from nas.core.logs import visible
from nas.core.metrics import METRICS
from nas.core.units import show_count, show_duration, show_figure
from nas.serve.views.family import FamilyView, family_view, list_families

if TYPE_CHECKING:
    from nas.train.pretrain.recipe import Settings
    from nas.train.scaling.build import BuildOptions, FilesWriter
    from nas.train.towers.training import Data, TowerSettings


app = command_app(help="Build, train, compare and show model families.")

_SHOWN_TEXT = 100
"""Characters of a document that a search shows."""


@app.command()
def build(
    sizes: Annotated[
        str, typer.Option("--sizes", help="Member sizes, such as 350M,700M,1.2B,8B-A1B (total and active).")
    ],
    study: Annotated[
        str | None,
        typer.Option("--study", "-s", help="Study whose Pareto front and objectives are used.", show_default=False),
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option("--layout", "-l", help="Layout or published name to scale instead. Repeatable.")
    ] = None,
    space: Annotated[
        str, typer.Option("--space", help="Search space whose objectives are used when --study is not given.")
    ] = "lfm2",
    name: Annotated[
        str | None, typer.Option("--name", help="Family name.", show_default="the study's, or 'family'")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", "-d", help="Device to measure on. Repeatable.", show_default="the study's"),
    ] = None,
    runtime: Annotated[
        str | None, typer.Option("--runtime", "-r", help="Runtime name.", show_default="the study's")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option("--vocab", min=2, help="Vocabulary size.", show_default="the winner's")
    ] = None,
    candidates: Annotated[
        int, typer.Option("--candidates", min=1, max=64, help="Maximum candidates to measure per size.")
    ] = 4,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Measure candidates, or select them by computed metrics only."),
    ] = True,
    reps: Annotated[
        int | None,
        typer.Option("--reps", min=2, help="Number of valid repetitions.", show_default="those of the first screening"),
    ] = None,
    files: Annotated[bool, typer.Option("--files/--no-files", help="Write model files of the members.")] = True,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="tokenizer.json for the model files.", show_default="bytes")
    ] = None,
    context: ContextOption = 32768,
    pte: Annotated[bool, typer.Option("--pte", help="Also write a standard ExecuTorch program.")] = False,
    pte_context: Annotated[
        int, typer.Option("--pte-context", min=16, help="Context length of the ExecuTorch program.")
    ] = 2048,
    license: Annotated[
        str | None, typer.Option("--license", help="License of the model files, such as apache-2.0.")
    ] = None,
    seed: SeedOption = 0,
    db: DatabaseOption = None,
    json: JsonFlag = False,
    yes: YesOption = False,
) -> None:
    """Scale the best layouts of a Pareto front to other sizes, with a small measured search per size.

    All decisions are recorded. After an interruption, repeat the command to continue.
    """
    from nas.train.scaling.build import BuildOptions
    from nas.train.scaling.build import build as build_family
    from nas.train.scaling.candidates import parse_sizes

    options = BuildOptions(
        name=name or study or "family",
        sizes=parse_sizes(sizes),
        study=study,
        layouts=tuple(map(read_layout, layout or ())),
        space=space,
        devices=tuple(device or ()),
        runtime=runtime,
        vocab=vocab,
        candidates=candidates,
        measure=measure,
        repetitions=reps,
        seed=seed,
        db=db,
        files=_writer(tokenizer, context, pte_context if pte else None, license) if files else None,
    )
    if sys.stdin.isatty() and not (yes or json):
        _show_candidates(options)
        typer.confirm("Start?", default=True, abort=True, err=True)
    try:
        with shown(f"building {options.name}") as log:
            family = build_family(options, log)
    except KeyboardInterrupt:
        say("interrupted; repeat the command to continue")
        raise typer.Exit(INTERRUPTED) from None
    if json:
        print_json(family.model_dump(mode="json"))
        return
    print_table(
        ("size", "weights", "active", "layout"),
        [
            (member.size, show_count(member.parameters), show_count(member.active), member.layout)
            for member in family.members
        ],
    )
    say(f"next: nas family show {family.name}        decisions and measurements")


@app.command()
def train(
    name: FamilyArgument,
    size: SizeOption,
    corpus: Annotated[
        list[Path] | None,
        typer.Option("--corpus", help="File, folder or glob of text or records. Repeatable.", show_default=False),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", min=1, help="Number of training tokens. Default: 20 per active parameter.", show_default=False
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file with recipe settings.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="tokenizer.json. Default: that of the member.", show_default=False),
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option("--teacher", help="Checkpoint of a teacher model to distil from; same vocabulary.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="Checkpoint of a smaller model to grow from, such as a trained proxy.")
    ] = None,
    start_layout: Annotated[
        str | None,
        typer.Option(
            "--from-layout", help="Layout of the --from checkpoint, if not in its header.", show_default=False
        ),
    ] = None,
    workers: ProcessesOption = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=16, help="Context length in tokens.", show_default="as before, or 32768"),
    ] = None,
    pte: RewritePteOption = None,
    pte_context: Annotated[
        int | None,
        typer.Option(
            "--pte-context", min=16, help="Context length of the ExecuTorch program.", show_default="as before, or 2048"
        ),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option("--license", help="License of the model files, such as apache-2.0.", show_default="as before"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print tokens, FLOPs, memory, time and price, and exit.")
    ] = False,
    price_per_hour: Annotated[
        float | None, typer.Option("--price-per-hour", min=0, help="Price of a GPU's hour, for --dry-run.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Pre-train a family member on your own text and write its model files with the trained weights.

    The recipe follows the LFM2 report, scaled down for short trainings; see docs/how-to/family-training.md for the
    settings. After an interruption, repeat the command to continue from the last checkpoint.
    """
    from nas.train.pretrain.member_training import train_member
    from nas.train.pretrain.next_token import PretrainingRequest
    from nas.train.pretrain.recipe import Settings, read_settings
    from nas.train.release.files import files_of, find_member
    from nas.train.release.options import kept_options

    settings = Settings() if config is None else read_settings(config)
    if tokens is not None:
        settings = settings.model_copy(update={"tokens": tokens})
    folder, _, member = find_member(name, size)
    if price_per_hour is not None and not dry_run:
        raise InvalidInput("is for --dry-run", where="--price-per-hour")
    if dry_run:
        _print_cost(Layout.parse(member.layout), settings, price_per_hour, json)
        return
    if not corpus:
        raise InvalidInput("is missing: only --dry-run needs no text", where="--corpus")
    request = PretrainingRequest(
        corpus=tuple(corpus),
        settings=settings,
        tokenizer=tokenizer,
        teacher=teacher,
        start=start,
        start_layout=None if start_layout is None else Layout.parse(start_layout),
        workers=workers,
        files=kept_options(files_of(folder), context, pte, pte_context, license),
    )
    with shown(f"preparing {name} {size}") as log:
        record = train_member(name, size, request, log)
    if json:
        print_json(record.model_dump(mode="json"))
        return
    print_fields(
        (
            ("checkpoint", record.checkpoint),
            ("start", record.start),
            ("tokens", f"{record.tokens:,}"),
            ("steps", f"{record.steps:,}"),
            ("loss", f"{record.curve[0][1]:.3f} -> {record.curve[-1][1]:.3f} nats per token"),
            *((f"bits per byte, {source}", f"{bits:.4f}") for source, bits in record.held_out.items()),
            ("time", show_duration(record.seconds)),
            ("peak memory", _memory(record)),
            ("device", record.device),
        )
    )


def _print_cost(layout: Layout, settings: Settings, price_per_hour: float | None, json: bool) -> None:
    from nas.train.pretrain.cost import UTILISATION, timed_flops_per_s, training_cost
    from nas.train.pretrain.recipe import complete

    recipe, _ = complete(settings, layout)
    cost = training_cost(layout, recipe, timed_flops_per_s(layout), price_per_hour)
    if json:
        print_json({**asdict(cost), "host_seconds": cost.host_seconds, "utilisation": UTILISATION})
        return
    print_fields(
        (
            ("tokens", f"{cost.tokens:,}"),
            ("compute", f"{cost.flops:.2g} FLOPs"),
            ("memory", f"{cost.state_bytes / 1e9:.2g} GB of weights, gradients and moments; activations come on top"),
            ("here", f"about {show_duration(cost.host_seconds, rough=True)}, by a step of two layers timed now"),
        )
    )
    print_gpus([asdict(gpu) for gpu in cost.gpus], UTILISATION, price_per_hour)


def print_gpus(costs: Iterable[Mapping[str, Any]], utilisation: float, price_per_hour: float | None) -> None:
    """Prints the time and price of a training on GPUs: fields of `nas.train.pretrain.cost.GpuCost`."""
    typer.echo()
    rows = [
        (gpu["gpu"], show_duration(gpu["hours"] * 3600, rough=True), gpu["least_gpus"])
        + (() if gpu["price"] is None else (f"{gpu['price']:,.2f}",))
        for gpu in costs
    ]
    price = () if price_per_hour is None else (f"price at {price_per_hour:g} an hour",)
    print_table(("GPU", "time of one", "least GPUs for the memory", *price), rows)
    say(f"GPUs at {utilisation:.0%} of their peak, as others report; it was not measured with hilnas")


@app.command()
def post(
    name: FamilyArgument,
    size: SizeOption,
    recipe: Annotated[Path, typer.Option("--recipe", help="YAML file with the stages.", show_default=False)],
    workers: ProcessesOption = None,
    checkpoint: Annotated[
        float, typer.Option("--checkpoint", min=0, help="Least seconds between checkpoints; 0: one after every step.")
    ] = 60.0,
    pte: RewritePteOption = None,
    json: JsonFlag = False,
) -> None:
    """Run the stages of a recipe on a family member, such as pre-training and fine-tuning on conversations.

    See docs/how-to/post-training.md. After an interruption, repeat the command to continue from the last checkpoint.
    """
    from nas.train.posttrain.recipe import read_recipe, run_recipe
    from nas.train.release.files import files_of
    from nas.train.release.options import kept_options

    stages = read_recipe(recipe)
    files = kept_options(files_of(member_folder(name, size)), None, pte, None)
    with shown(f"preparing {name} {size}") as log:
        record = run_recipe(
            name, size, stages, recipe.resolve().parent, log, workers=workers, files=files, checkpoint_s=checkpoint
        )
    if json:
        print_json(record.model_dump(mode="json"))
        return
    _print_stages(record, "stages")


@app.command()
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


@app.command()
def evaluate(
    name: FamilyArgument,
    size: SizeOption,
    conversations: Annotated[
        Path | None, typer.Option("--tasks", help="File of conversations with expected answers.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--benchmarks", help="Folder of data sets of public benchmarks, instead of --tasks.")
    ] = None,
    benchmark: Annotated[
        list[str] | None,
        typer.Option("--benchmark", help="Benchmark, such as gsm8k. Repeatable.", show_default="all with data"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Maximum questions of each data set.", show_default="all")
    ] = None,
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
    from nas.train.posttrain.evaluate import Conversations, Questions, evaluate_member
    from nas.train.release.templates import DATE

    questions: Questions
    if (conversations is None) == (data is None):
        raise InvalidInput("give either --tasks or --benchmarks")
    if data is not None and not data.is_dir():
        raise InvalidInput(f"there is no folder {data}", where="--benchmarks")
    with shown(f"evaluating {name} {size}") as log:
        if conversations is not None:
            questions = Conversations(conversations)
        else:
            from nas.train.posttrain.harness import Benchmarks

            assert data is not None
            questions = Benchmarks(data, benchmark or (), context, limit, log)
        scores = evaluate_member(name, size, questions, quantisation or ["q4_0", "8da4w"], context, log, date or DATE)
    if json:
        print_json(scores.model_dump(mode="json"))
        return
    print_table(scores.head, scores.rows, title="right answers" if data else "exact answers")
    for note in scores.notes:
        say(note)


@app.command()
def chat(
    name: FamilyArgument,
    size: SizeOption,
    quantisation: Annotated[str, typer.Option("--quantisation", "-q", help="File to use; 8da4w: .pte.")] = "q4_0",
    system: Annotated[str, typer.Option("--system", help="System message.", show_default="none")] = "",
    tools: Annotated[Path | None, typer.Option("--tools", help="JSON list of tools that it may call.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="Sampling temperature; 0: greedy.")] = 0.3,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Maximum tokens of an answer.")] = 512,
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


@app.command()
def serve(
    name: FamilyArgument,
    size: SizeOption,
    quantisation: Annotated[str, typer.Option("--quantisation", "-q", help="GGUF file to use.")] = "q4_0",
    context: ContextOption = 4096,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8080,
    server: Annotated[str, typer.Option("--server", help="Name or path of llama.cpp's server.")] = "llama-server",
    print_only: Annotated[bool, typer.Option("--print", help="Print the command line instead of running it.")] = False,
) -> None:
    """Serve a member's GGUF file with llama.cpp's server, which has to be installed, and its OpenAI-compatible API."""
    from nas.train.posttrain.evaluate import server_command
    from nas.train.release.files import find_member

    folder, _, _ = find_member(name, size)
    command = server_command(folder, quantisation, context, host, port, server, say)
    if print_only:
        typer.echo(shlex.join(command))
        return
    if shutil.which(server) is None:
        line = shlex.join(command)
        raise InfrastructureFailed(f"no {server} found: install llama.cpp, or give --server; it would run {line}")
    sys.stdout.flush()
    os.execvp(server, command)


@app.command()
def tokenizer(
    output: Annotated[Path, typer.Option("--output", "-o", help="Output file, tokenizer.json.")],
    vocab: Annotated[int, typer.Option("--vocab", help="Vocabulary size, including special tokens.")] = 65536,
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            "--corpus", help="File, folder or glob of text or records. Repeatable. Default: the default corpus."
        ),
    ] = None,
) -> None:
    """Train a byte-level BPE tokenizer with special tokens for chat, tools and fill-in-the-middle.

    Stock transformers and stock llama.cpp tokenize identically with it. Training is deterministic.
    """
    from nas.train.pretrain.tokenizer_training import train_tokenizer

    with shown("reading the corpus") as log, output_file(output, reads=corpus or []) as file:
        vocabulary = train_tokenizer(corpus or [], vocab, file, log)
    say(f"wrote {output}: {len(vocabulary.tokens):,} tokens, including {len(vocabulary.special)} special tokens")


@app.command()
def retrieval(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model to start from: FAMILY/SIZE of a trained member, a folder of transformers or of `nas adapt`,"
            " or a GGUF file.",
            show_default=False,
        ),
    ],
    data: Annotated[
        list[Path],
        typer.Option("--data", help="JSON lines, or folder of BEIR, to train on. Repeatable.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the trained model.", show_default=False)],
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file with settings of the training.", show_default=False)
    ] = None,
    checkpoint: Annotated[
        float, typer.Option("--checkpoint", min=0, help="Least seconds between checkpoints; 0: one after every step.")
    ] = 60.0,
    json: JsonFlag = False,
) -> None:
    """Train a late-interaction model that finds documents for queries, from a trained model (LFM2 report, section 7).

    Data has answers to queries, or a teacher's scores of documents; see docs/how-to/retrieval.md. The folder opens in
    sentence-transformers and PyLate. After an interruption, repeat the command to continue from the last checkpoint.
    """
    from nas.search.spaces.problems import read_model
    from nas.train.retrieval.training import RetrievalSettings, train_retriever

    settings = RetrievalSettings() if config is None else read_model(config, RetrievalSettings)
    with shown(f"preparing {output}") as log:
        record = train_retriever(model, data, settings, output, log, checkpoint)
    if json:
        print_json(record.model_dump(mode="json"))
        return
    print_fields(
        (
            ("folder", output),
            ("start", record.source),
            ("objective", record.objective),
            ("examples", f"{record.examples:,}"),
            ("steps", f"{record.steps:,}"),
            ("loss", f"{record.curve[0][1]:.4f} -> {record.curve[-1][1]:.4f}"),
            *_before_and_after(record.before, record.after),
            ("time", show_duration(record.seconds)),
            ("device", record.device),
        )
    )
    say(f"next: nas family index {shlex.quote(str(output))} DOCUMENTS -o INDEX")


TowerStage = Annotated[
    str | None, typer.Option("--stage", help="connector, mid or joint.", show_default="that of --config")
]
TowerOutput = Annotated[Path, typer.Option("--output", "-o", help="Folder of the trained model.", show_default=False)]
TowerEvaluation = Annotated[
    list[Path] | None,
    typer.Option("--evaluate", help="As --data, but only scored, before and after. Repeatable."),
]
TowerConfig = Annotated[
    Path | None, typer.Option("--config", help="YAML file with settings of the stage.", show_default=False)
]
TowerCheckpoint = Annotated[
    float, typer.Option("--checkpoint", min=0, help="Least seconds between checkpoints; 0: one after every step.")
]


@app.command()
def scores(
    teacher: Annotated[
        str,
        typer.Argument(
            metavar="TEACHER",
            help="Folder of a cross-encoder or reward model of transformers, or a language model: FAMILY/SIZE of a"
            " trained member, a folder of transformers or of `nas adapt`, or a GGUF file.",
            show_default=False,
        ),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            "--data", help="Answers to queries: JSON lines, or folder of BEIR. Repeatable.", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File of JSON lines to write.", show_default=False)],
    documents: Annotated[int, typer.Option("--documents", min=2, max=64, help="Documents of a query.")] = 8,
    index: Annotated[
        Path | None,
        typer.Option(
            "--index",
            help="Index that other documents are taken from: the first ones for each query.",
            show_default="some of other queries",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of documents of other queries.")] = 0,
) -> None:
    """Let a teacher score documents for queries, as data for `nas family retrieval`.

    A language model scores a document by how likely it makes the query. After an interruption, repeat the command: it
    continues with the queries that are missing.
    """
    from nas.train.retrieval.teacher import write_scores

    require_output(output, reads=data)
    with shown(f"reading {teacher}") as log:
        count = write_scores(teacher, data, output, log, documents=documents, index=index, seed=seed)
    print_fields((("file", output), ("queries", f"{count:,}")))
    say(f"next: nas family retrieval MODEL --data {shlex.quote(str(output))} -o FOLDER")


@app.command()
def vision(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model to start from: a folder of `nas family vision` or LFM2-VL, or a language model: FAMILY/SIZE of"
            " a trained member, a folder of transformers or of `nas adapt`, or a GGUF file.",
            show_default=False,
        ),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            help="JSON lines of conversations about images, or folder with metadata.jsonl. Repeatable.",
            show_default=False,
        ),
    ],
    output: TowerOutput,
    stage: TowerStage = None,
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="JSON lines of conversations without images. Repeatable.")
    ] = None,
    evaluate: TowerEvaluation = None,
    encoder: Annotated[
        Path | None,
        typer.Option(
            "--encoder",
            help="Folder of SigLIP2 (NaFlex) whose image encoder is used.",
            show_default="as in MODEL, or random",
        ),
    ] = None,
    config: TowerConfig = None,
    checkpoint: TowerCheckpoint = 60.0,
    json: JsonFlag = False,
) -> None:
    """Train a stage of a model that reads images and text, from a trained model (LFM2 report, section 5).

    The stages are connector, mid and joint, each from the folder of the one before; see docs/how-to/vision.md. Where a
    stock class of transformers holds the layout, the folder opens there. After an interruption, repeat the command to
    continue from the last checkpoint.
    """
    from nas.train.towers.training import Data
    from nas.train.towers.vision import VisionSettings

    files = Data(data, text or (), evaluate or ())
    _train_tower(VisionSettings, model, files, output, stage, config, encoder, checkpoint, json)


@app.command()
def audio(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model to start from: a folder of `nas family audio`, or a language model: FAMILY/SIZE of a trained"
            " member, a folder of transformers or of `nas adapt`, or a GGUF file.",
            show_default=False,
        ),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            help="JSON lines of conversations about WAV and FLAC files, or folder with metadata.jsonl. Repeatable.",
            show_default=False,
        ),
    ],
    output: TowerOutput,
    stage: TowerStage = None,
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="JSON lines of conversations without sound. Repeatable.")
    ] = None,
    evaluate: TowerEvaluation = None,
    encoder: Annotated[
        Path | None,
        typer.Option(
            "--encoder",
            help="Folder of Parakeet whose FastConformer encoder is used.",
            show_default="as in MODEL, or random",
        ),
    ] = None,
    config: TowerConfig = None,
    checkpoint: TowerCheckpoint = 60.0,
    json: JsonFlag = False,
) -> None:
    """Train a stage of a model that reads sound and text, from a trained model (LFM2 report, section 6).

    The stages are connector, mid and joint, each from the folder of the one before; see docs/how-to/audio.md. After an
    interruption, repeat the command to continue from the last checkpoint.
    """
    from nas.train.towers.audio import AudioSettings
    from nas.train.towers.training import Data

    files = Data(data, text or (), evaluate or ())
    _train_tower(AudioSettings, model, files, output, stage, config, encoder, checkpoint, json)


@app.command("merge")
def merge_towers(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...",
            help="Two or more folders of `nas family vision` or `audio`, of one layout and tower.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ],
    output: TowerOutput,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            help="Folder that they were trained from, for every method but soup.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="YAML file: method, weights, density ... as of a merge of post-training."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Merge runs of a model with a tower into one: by default the mean of all their weights."""
    from nas.search.spaces.problems import read_model
    from nas.train.posttrain.merging import MergeSettings
    from nas.train.towers.merging import merge_runs

    settings = MergeSettings() if config is None else read_model(config, MergeSettings)
    record = merge_runs(folders, base, settings, output)
    if json:
        print_json(record.model_dump(mode="json"))
        return
    print_fields((("folder", output), ("method", settings.method), ("weights", record.weights[:12])))


def _train_tower(
    settings_kind: type[TowerSettings],
    model: str,
    data: Data,
    output: Path,
    stage: str | None,
    config: Path | None,
    encoder: Path | None,
    checkpoint: float,
    json: bool,
) -> None:
    """Trains a stage with a tower and prints its record."""
    from nas.search.spaces.problems import read_model
    from nas.train.towers.training import train_tower

    settings = settings_kind.of_stage(stage) if config is None else read_model(config, settings_kind)
    if stage not in (None, settings.stage):
        raise InvalidInput(f"{config} is for the stage {settings.stage}", where="--stage")
    with shown(f"preparing {output}") as log:
        record = train_tower(model, data, settings, output, log, encoder, checkpoint)
    if json:
        print_json(record.model_dump(mode="json"))
        return
    modality = settings.modality
    counts = f"{record.examples:,} about {modality.noun}s, {record.texts:,} without; {record.left_out:,} left out"
    print_fields(
        (
            ("folder", output),
            ("start", record.source),
            ("stage", settings.stage),
            ("conversations", counts),
            ("steps", f"{record.steps:,}"),
            ("loss", f"{record.curve[0][1]:.4f} -> {record.curve[-1][1]:.4f} nats per token"),
            *_before_and_after(record.before, record.after),
            ("time", show_duration(record.seconds)),
            ("device", record.device),
        )
    )
    say(f"next: nas chat {shlex.quote(str(output))} --{modality.kind} {modality.kind.upper()}")


def _before_and_after(before: dict[str, float], after: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Yields scores on held-out data for `print_fields`."""
    yield from ((f"{name}, held out", f"{before[name]:.4g} -> {value:.4g}") for name, value in after.items())


@app.command()
def gguf(
    model: Annotated[
        Path,
        typer.Argument(help="Folder of a late-interaction model, or one that reads images.", show_default=False),
    ],
    output: OutputOption,
    quantisation: Annotated[
        str, typer.Option("--quantisation", "-q", help="Type of the weights: f32, f16, q4_0, q8_0 or q4_k_m.")
    ] = "q4_0",
    json: JsonFlag = False,
) -> None:
    """Write a late-interaction model, or one that reads images, for llama.cpp.

    `nas family index` and `search` take the GGUF file of a late-interaction model in place of the folder. Encoder and
    connector of a model that reads images are a second file beside it, mmproj-OUTPUT, in float16, or in float32 with
    `-q f32`: llama.cpp's programs take it as --mmproj.
    """
    from nas.train.towers.release import has_tower
    from nas.train.towers.vision import VISION

    files = [output]
    if has_tower(model, VISION):
        from nas.train.towers.gguf import PROJECTOR, differences, write_gguf_model

        files.append(output.with_name(PROJECTOR.format(output.name)))
        with output_file(files[0], reads=[model]) as file, output_file(files[1], reads=[model]) as projector:
            *written, frames = write_gguf_model(model, quantisation, file, projector, output.stem)
        for difference in differences(frames):
            say(f"llama.cpp processes images in another way than in training: {difference}")
        command = ["llama-mtmd-cli", "-m", *files[:1], "--mmproj", *files[1:], "--image", "IMAGE", "-p", "QUESTION"]
        tokens = ["--image-min-tokens", frames.min_image_tokens, "--image-max-tokens", frames.max_image_tokens]
        say(f"next: {shlex.join(map(str, command + tokens))}")
    else:
        from nas.train.retrieval.gguf import write_gguf_retriever

        with output_file(output, reads=[model]) as file:
            written = [write_gguf_retriever(model, quantisation, file, output.stem)]
    if json:
        first, *beside = [{"file": str(file), **one.model_dump()} for file, one in zip(files, written, strict=True)]
        print_json(first | ({"mmproj": beside[0]} if beside else {}))
        return
    for file, one in zip(files, written, strict=True):
        print_fields((("file", file), ("size", f"{one.size / 1e6:.1f} MB"), ("sha256", one.sha256)))


@app.command()
def pte(
    model: Annotated[
        Path,
        typer.Argument(help="Late-interaction model: folder of `nas family retrieval`.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .pte file.", show_default=False)],
) -> None:
    """Write a late-interaction model as a .pte file, for ExecuTorch: vectors of the tokens of a text, in float32."""
    from nas.train.retrieval.pte import write_pte_retriever

    with output_file(output, reads=[model]) as file, shown(f"lowering {model}"):
        size = write_pte_retriever(model, file)
    print_fields((("file", output), ("size", f"{size / 1e6:.1f} MB")))


@app.command()
def index(
    model: Annotated[
        Path,
        typer.Argument(
            help="Late-interaction model: folder of `nas family retrieval`, or file of `nas family gguf`.",
            show_default=False,
        ),
    ],
    documents: Annotated[
        list[Path], typer.Argument(help="Documents: JSON lines, or folders of BEIR.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the index.", show_default=False)],
    json: JsonFlag = False,
) -> None:
    """Write an index of documents, for `nas family search`.

    After an interruption, repeat the command: it continues with the documents that are missing.
    """
    from nas.train.retrieval.index import build_index

    with shown(f"reading {model}") as log:
        record = build_index(model, documents, output, log)
    if json:
        print_json(record.model_dump(mode="json"))
        return
    print_fields(
        (
            ("index", output),
            ("documents", f"{record.documents:,}"),
            ("of the model's full length", f"{record.cut:,}; what exceeds it is not searched"),
            ("vectors", f"{record.vectors:,} of {record.width} float16"),
        )
    )
    say(f'next: nas family search {shlex.quote(str(output))} "QUERY"')


@app.command()
def search(
    folder: Annotated[Path, typer.Argument(metavar="INDEX", help="Folder of an index.", show_default=False)],
    query: Annotated[str, typer.Argument(help="What to search for.", show_default=False)],
    top: Annotated[int, typer.Option("--top", min=1, max=1000, help="Most documents to show.")] = 10,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder or file of the model, if it was moved.", show_default=False)
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Search an index: all documents are scored exactly, and the best are shown."""
    from nas.train.retrieval.index import search as search_index

    (hits,) = search_index(folder, [query], top, model)
    if json:
        print_json({"query": query, "hits": [hit._asdict() for hit in hits]})
        return
    print_table(
        ("score", "document", "text"), [(f"{hit.score:.2f}", hit.id, visible(hit.text[:_SHOWN_TEXT])) for hit in hits]
    )


@app.command()
def compare(
    family: Annotated[str | None, typer.Option("--family", help="Built family whose members are compared.")] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option("--reference", help="Reference model. Repeatable. Default: those of the same size classes."),
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option("--layout", help="Layout string or published name. Repeatable.")
    ] = None,
    size_class: Annotated[
        list[str] | None, typer.Option("--class", help="Restrict to a size class: 350M, 700M, 1B or 3B. Repeatable.")
    ] = None,
    alone: Annotated[bool, typer.Option("--no-references", help="Compare members and layouts only.")] = False,
    device: DeviceOption = "local",
    threads: ThreadsOption = 1,
    reps: Annotated[int, typer.Option("--reps", min=1, max=100, help="Repetitions per model and prompt length.")] = 3,
    flash_attn: Annotated[bool, typer.Option("--flash-attn/--no-flash-attn", help="Use fused attention.")] = True,
    replicate: Annotated[
        int, typer.Option("--replicate", min=0, help="Use a higher number to repeat earlier measurements.")
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Plot speed against size to this .png, .svg or .pdf file.")
    ] = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Compare family members with reference models on one device.

    Measures prefill and decode speed and TTFT at 1K and 4K tokens, and peak memory at 4K and 32K, with llama.cpp and
    Q4_0. Results are stored: a stopped comparison continues, and only new models are measured.
    """
    from nas.train.compare.compare import CompareOptions, ModelSelection
    from nas.train.compare.compare import compare as measure
    from nas.train.compare.tables import check_plot, draw_comparison

    if plot is not None:
        check_plot(plot)
    models = ModelSelection(family, tuple(reference or ()), tuple(layout or ()), tuple(size_class or ()), alone)
    options = CompareOptions(
        models, device=device, threads=threads, repetitions=reps, flash_attn=flash_attn, replicate=replicate, db=db
    )
    with shown("preparing the device") as log:
        record, path = measure(options, log)
    say(f"wrote {path}")
    if plot is not None:
        draw_comparison(record, plot)
        say(f"wrote {plot}")
    if json:
        print_json(record.model_dump(mode="json"))
    else:
        _print_comparison(record)


@app.command()
def show(
    name: Annotated[
        str | None, typer.Argument(help="Family name. Default: list all families.", show_default=False)
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show the members, decisions, files and training of a family, or list all families."""
    if name is None:
        _print_families(json)
        return
    view = family_view(name)
    if json:
        print_json(view.model_dump(mode="json"))
        return
    print_fields(_family_fields(view))
    _print_members(view)
    _print_decisions(view)
    _print_training(view)
    _print_comparisons(view)


@app.command()
def report(name: FamilyArgument, output: OutputOption) -> None:
    """Write a report of a family to send: one HTML file with its members, comparisons, scores and decisions."""
    from nas.serve.dashboard.study_report import family_report_html  # matplotlib takes a second to load

    write_output(output, family_report_html(name).encode())
    say(f"wrote {output}")


def _writer(tokenizer: Path | None, context: int, pte_context: int | None, license: str | None) -> FilesWriter:
    """Returns the writer of model files; imports torch, which a build without files does not need."""
    from nas.train.release.files import MemberFilesWriter
    from nas.train.release.options import FileOptions

    return MemberFilesWriter(
        FileOptions(tokenizer=tokenizer, context=context, pte_context=pte_context, license=license)
    )


def _show_candidates(options: BuildOptions) -> None:
    """Prints the candidates of each size."""
    from nas.train.scaling.build import candidates_of

    print_table(
        ("size", "weights", "active", "candidate"),
        [
            (size.name, show_count(scaled.layout.params.total), show_count(scaled.layout.params.active), scaled.layout)
            for size, candidates in candidates_of(options)
            for scaled in candidates
        ],
    )


def _print_comparison(record: Comparison) -> None:
    from nas.train.compare.lfm2_report import HX370, S25
    from nas.train.compare.tables import figures_table, ratios_table, reasons

    print_fields(record.conditions.items())
    print_table(*figures_table(record), title="Tokens per second, ms and MB")
    if record.ratios:
        print_table(*ratios_table(record), title=f"Ratios: here / {S25} / {HX370} (of the LFM2 report)")
    for line in (*reasons(record), *record.notes):
        say(line)


def _print_families(json: bool) -> None:
    families = list_families()
    if json:
        print_json({"families": [family.model_dump(mode="json") for family in families]})
        return
    print_table(
        ("family", "study", "sizes", "made", "pattern"),
        [
            (family.name, family.study, " ".join(member.size for member in family.members), family.made, family.pattern)
            for family in families
        ],
    )


def _family_fields(view: FamilyView) -> list[tuple[str, object]]:
    """Returns (name, value) for the properties of a family."""
    family = view.family
    sources = [
        ("given" if source.trial is None else f"trial {source.trial}") + f": {source.layout}"
        for source in family.sources
    ]
    return [
        ("family", family.name),
        ("study", family.study or "none: from given layouts"),
        ("made", family.made),
        ("pattern", family.pattern),
        *(("winner", source) for source in sources),
        *((f"  {name}", value) for name, value in family.provenance.items()),
        ("folder", view.folder),
    ]


def _print_members(view: FamilyView) -> None:
    """Prints the members and their measurements."""
    print_table(
        ("size", "weights", "active", "files", "layout"),
        [
            (member.size, show_count(member.parameters), show_count(member.active), _files(row.files), member.layout)
            for row in view.members
            for member in (row.member,)
        ],
        title="members",
    )
    rows = [
        (
            row.member.size,
            measured.device + ("" if measured.searched else " (not searched)"),
            _runtime(measured),
            METRICS[figure.metric].label,
            figure.prompt,
            _figure_text(figure),
        )
        for row in view.members
        for measured in row.member.measured
        for figure in measured.figures
    ]
    if rows:
        print_table(("size", "device", "runtime", "figure", "tokens", "value"), rows, title="measured")


def _print_decisions(view: FamilyView) -> None:
    """Prints the recorded decisions and the candidates of each size."""
    rows = [*_decisions("family", view.family.decisions)]
    for row in view.members:
        rows += _decisions(row.member.size, row.member.decisions)
    print_table(("of", "what", "decided", "because"), rows, title="decisions")
    tried = [
        (row.member.size, "*" * candidate.chosen, show_count(candidate.parameters), candidate.verdict, candidate.layout)
        for row in view.members
        for candidate in row.member.tried
    ]
    print_table(("size", "", "weights", "verdict", "layout"), tried, title="candidates")


def _print_training(view: FamilyView) -> None:
    """Prints the training results of the members."""
    for row in view.members:
        if (training := row.training) is not None:
            last = f", last loss {training.curve[-1][1]:.3f} nats" if training.curve else ""
            print_fields(
                [
                    (
                        f"{row.member.size} trained",
                        f"{show_count(training.tokens)} tokens, {training.steps} steps{last}",
                    ),
                    ("  from", training.start),
                    ("  held out", _scores(training) or None),
                ]
            )
            if training.before:
                _print_stages(training, f"stages of {row.member.size}")


def _print_stages(training: MemberTraining, title: str) -> None:
    """Prints all trainings up to one."""
    rows = [
        (
            stage.label,
            f"{stage.steps:,}",
            f"{stage.tokens:,}",
            f"{stage.curve[0][1]:.3f} -> {stage.curve[-1][1]:.3f}" if stage.curve else "",
            _scores(stage),
            _times(stage),
            _memory(stage),
        )
        for stage in training.history
    ]
    print_table(("stage", "steps", "tokens", "loss", "scores", "time", "peak memory"), rows, title=title)


def _times(training: MemberTraining) -> str:
    """Returns the time of a training, and of its parts where they are on record."""
    parts = ", ".join(f"{name} {show_duration(seconds)}" for name, seconds in training.spent.items() if seconds >= 1)
    return show_duration(training.whole_s) + (f" ({parts})" if parts else "")


def _memory(training: MemberTraining) -> str:
    if training.peak_memory_mb is None:
        return "-"
    prepared = training.prepare_memory_mb
    return f"{training.peak_memory_mb:,.0f} MB" + (f", before {prepared:,.0f} MB" if prepared else "")


def _scores(training: MemberTraining) -> str:
    """Returns the scores of a training on held-out data; pre-trainings have bits per byte."""
    counts = training.config.get("counts", {})
    scores = ", ".join(
        f"{name} {value:.3f}" + (f" of {counts[name]:,}" if name in counts else "")
        for name, value in training.held_out.items()
    )
    return f"{scores} bits per byte" if scores and training.kind in PRETRAININGS else scores


def _print_comparisons(view: FamilyView) -> None:
    """Prints the comparisons with reference models."""
    for comparison in view.comparisons:
        rows = [
            (
                model.name,
                "member" if model.member else "reference",
                show_count(model.parameters),
                model.architecture,
                METRICS[figure.metric].label,
                figure.prompt,
                _figure_text(figure),
            )
            for model in comparison.models
            for figure in model.measured.figures
        ]
        columns = ("model", "", "weights", "architecture", "figure", "tokens", "value")
        print_table(columns, rows, title=f"on {comparison.device}")


def _figure_text(figure: RecordedFigure) -> str:
    """Formats a figure with its unit and confidence interval, or the reason it is unknown."""
    if figure.value is None:
        return f"unknown: {figure.reason or 'not read'}"
    low, high = figure.ci95 or (None, None)
    return show_figure(figure.value, low, high, METRICS[figure.metric].unit)


def _runtime(measured: MeasuredModel) -> str:
    return f"{measured.runtime} {measured.quantisation}, {measured.threads} thread{'s' * (measured.threads != 1)}"


def _files(files: MemberFiles | None) -> str:
    if files is None:
        return "none"
    kinds = dict.fromkeys(f"{file.kind} {file.quantisation}".strip() for file in files.files)
    return ", ".join(kinds)


def _decisions(of: str, decisions: Iterable[BuildDecision]) -> Iterator[tuple[str, str, str, str]]:
    for decision in decisions:
        yield of, decision.what, decision.value, decision.reason
