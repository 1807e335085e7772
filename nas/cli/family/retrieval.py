"""Commands of `nas family` on late-interaction models: training, files, indexes and search."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from nas.cli.family.folders import LANGUAGE_MODEL, FolderOption, SettingsOption, print_training
from nas.cli.options import CheckpointOption, OutputOption, SeedOption
from nas.cli.output import JsonFlag, print_fields, print_json, print_table, say
from nas.cli.progress import activity
from nas.core.durable import output_file, require_output
from nas.core.logs import visible

_SHOWN_TEXT = 100
"""Characters of a document that a search shows."""


def retrieval(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help=f"Model to start from: {LANGUAGE_MODEL}", show_default=False),
    ],
    data: Annotated[
        list[Path],
        typer.Option("--data", help="JSON lines, or folder of BEIR, to train on. Repeatable.", show_default=False),
    ],
    output: FolderOption,
    config: SettingsOption = None,
    checkpoint: CheckpointOption = 60.0,
    json: JsonFlag = False,
) -> None:
    """Train a late-interaction model that finds documents for queries, from a trained model (LFM2 report, section 7).

    Data has answers to queries, or a teacher's scores of documents; see docs/how-to/retrieval.md. The folder opens in
    sentence-transformers and PyLate. After an interruption, repeat the command to continue from the last checkpoint.
    """
    from nas.search.spaces.problems import read_model
    from nas.train.retrieval.training import RetrievalSettings, train_retriever

    settings = RetrievalSettings() if config is None else read_model(config, RetrievalSettings)
    with activity(f"preparing {output}") as log:
        record = train_retriever(model, data, settings, output, log, checkpoint)
    details = {"objective": record.objective, "examples": f"{record.examples:,}"}
    print_training(
        output, record, details, f"nas family index {shlex.quote(str(output))} DOCUMENTS -o INDEX", json=json
    )


def scores(
    teacher: Annotated[
        str,
        typer.Argument(
            metavar="TEACHER",
            help="Folder of a cross-encoder or reward model of transformers, or a language model: " + LANGUAGE_MODEL,
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
    seed: SeedOption = 0,
) -> None:
    """Let a teacher score documents for queries, as data for `nas family retrieval`.

    A language model scores a document by how likely it makes the query. After an interruption, repeat the command: it
    continues with the queries that are missing.
    """
    from nas.train.retrieval.teacher import write_scores

    folders = [folder / "qrels" for folder in data]
    require_output(output, reads=[*data, *folders, Path(teacher), *([index] if index else [])])
    with activity(f"reading {teacher}") as log:
        count = write_scores(teacher, data, output, log, documents=documents, index=index, seed=seed)
    print_fields((("file", output), ("queries", f"{count:,}")))
    say(f"next: nas family retrieval MODEL --data {shlex.quote(str(output))} -o FOLDER")


def gguf(
    model: Annotated[
        Path,
        typer.Argument(
            help="Folder of a late-interaction model, or one that reads images or sound.", show_default=False
        ),
    ],
    output: OutputOption,
    quantisation: Annotated[
        str, typer.Option("--quantisation", "-q", help="Type of the weights: f32, f16, q4_0, q8_0 or q4_k_m.")
    ] = "q4_0",
    json: JsonFlag = False,
) -> None:
    """Write a late-interaction model, or one that reads images or sound, for llama.cpp.

    `nas family index` and `search` take the GGUF file of a late-interaction model in place of the folder. Encoder and
    connector of a model that reads images or sound are a second file beside it, mmproj-OUTPUT, in float16, or in
    float32 with `-q f32`: llama.cpp's programs take it as --mmproj.
    """
    from nas.train.towers.release import modality_of

    files = [output]
    if modality := modality_of(model):
        from nas.train.towers.gguf import PROJECTOR, differences, question, write_gguf_model

        files.append(output.parent / PROJECTOR.format(output.name))
        with output_file(files[0], reads=[model]) as file, output_file(files[1], reads=[model]) as projector:
            *written, whole = write_gguf_model(model, modality, quantisation, file, projector, output.stem)
        for difference in differences(whole):
            say(f"llama.cpp: {difference}")
        say(f"next: {shlex.join(question(whole, *files))}")
    else:
        from nas.train.retrieval.gguf import write_gguf_retriever
        from nas.train.retrieval.release import DENSE

        with output_file(output, reads=[model, model / DENSE]) as file:
            written = [write_gguf_retriever(model, quantisation, file, output.stem)]
    if json:
        first, *beside = [{"file": str(file), **one.model_dump()} for file, one in zip(files, written, strict=True)]
        print_json(first | ({"mmproj": beside[0]} if beside else {}))
        return
    for file, one in zip(files, written, strict=True):
        print_fields((("file", file), ("size", f"{one.size / 1e6:.1f} MB"), ("sha256", one.sha256)))


def pte(
    model: Annotated[
        Path,
        typer.Argument(help="Late-interaction model: folder of `nas family retrieval`.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .pte file.", show_default=False)],
) -> None:
    """Write a late-interaction model as a .pte file, for ExecuTorch: vectors of the tokens of a text, in float32."""
    from nas.train.retrieval.pte import write_pte_retriever
    from nas.train.retrieval.release import DENSE

    with output_file(output, reads=[model, model / DENSE]) as file, activity(f"lowering {model}"):
        size = write_pte_retriever(model, file)
    print_fields((("file", output), ("size", f"{size / 1e6:.1f} MB")))


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

    with activity(f"reading {model}") as log:
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
    from nas.train.retrieval.index import open_index

    (hits,) = open_index(folder, model)([query], top)
    if json:
        print_json({"query": query, "hits": [hit._asdict() for hit in hits]})
        return
    print_table(
        ("score", "document", "text"), [(f"{hit.score:.2f}", hit.id, visible(hit.text[:_SHOWN_TEXT])) for hit in hits]
    )
