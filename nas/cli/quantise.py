"""`nas quantise`: the type of each tensor of a GGUF file for a device and its budgets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nas.cli.lazy import command_app
from nas.cli.options import (
    BudgetOption,
    DatabaseOption,
    DeviceOption,
    GenOption,
    OutputOption,
    PromptOption,
    RepsOption,
    ThreadsOption,
    workload_of,
)
from nas.cli.output import JsonFlag, figure_text, print_fields, print_json, print_table, say
from nas.cli.progress import activity
from nas.core.durable import output_file, scratch_folder
from nas.core.errors import InvalidInput
from nas.core.limit import Limit
from nas.core.metrics import metric
from nas.core.progress import Log
from nas.core.units import show_figure, show_number
from nas.core.workload import Workload
from nas.measure.protocol.file_choice import require_measured

if TYPE_CHECKING:
    from nas.train.adapt.quantise import Quantised, Score

app = command_app()

_KL = re.compile(r"\s*kl\s*<=\s*([0-9.eE+-]+)\s*")


@app.command("quantise")
def command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="GGUF file, best in F16, or a folder of transformers.")
    ],
    output: OutputOption,
    corpus: Annotated[
        list[Path],
        typer.Option(
            "--corpus",
            "-c",
            help="File or folder of text, to tell what types lose; of several, as much of each.",
            show_default=False,
        ),
    ],
    budget: BudgetOption = None,
    minimise: Annotated[
        str, typer.Option("--minimise", help="What to minimise: kl, file_size, or a figure of the device.")
    ] = "kl",
    device: DeviceOption = "local",
    types: Annotated[
        str | None,
        typer.Option("--types", metavar="TYPE,...", help="Types that are tried.", show_default="all that fit"),
    ] = None,
    parts: Annotated[
        int, typer.Option("--parts", min=1, max=64, help="Parts of the depth with types of their own.")
    ] = 3,
    windows: Annotated[
        int,
        typer.Option("--windows", min=2, help="Windows of 256 tokens that choose types; twice as many judge files."),
    ] = 8,
    importance: Annotated[
        bool, typer.Option("--importance/--no-importance", help="Weigh errors by an importance matrix of the text.")
    ] = True,
    prompt: PromptOption = 512,
    gen: GenOption = 128,
    threads: ThreadsOption = 1,
    reps: RepsOption = 5,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Write a GGUF file whose tensors have the types that keep budgets on a device and lose least.

    Budgets are metrics of a file or of its device, such as file_size<=80MB and decode_p50<=12ms, and kl, the divergence
    from the source in nats a token. Half of the text is for the importance matrix. The rest has three parts: windows of
    the first choose types, those of the second decide whether a file breaks a budget of kl, so that types are chosen
    again, and those of the third tell what the chosen file loses. Divergences are kept in the cache: a command that was
    stopped continues where it was. See docs/how-to/quantising.md.
    """
    from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
    from nas.model.text.documents import files_read, read_sources
    from nas.train.adapt.made_types import types_of
    from nas.train.adapt.quantise import KL, MOST_BYTES, TYPES, Quantiser, QuantiseRequest

    workload = workload_of(prompt=prompt, gen=gen, context=0, threads=threads)
    limits, kl = _budgets(budget or (), workload)
    if minimise != KL:
        if metric(minimise).direction != "min":
            raise InvalidInput(f"{minimise} is no cost: minimise one that is better when smaller", where="--minimise")
        require_measured(minimise, workload, "--minimise")
    if minimise == KL and not limits:
        raise InvalidInput("without a budget the largest file loses least: name file_size or another", where="--budget")
    names = types_of(types, TYPES) if types else TYPES
    sources = read_sources(corpus, 0.5)
    (train,) = _shared([(document.train for document in source.documents) for source in sources], MOST_BYTES, 1)
    chosen_on, decided_on, reported_on = _shared(
        [(document.held_out for document in source.documents) for source in sources], MOST_BYTES, 3
    )
    with (
        activity("preparing") as log,
        output_file(output, reads=[model, *files_read(corpus)]) as file,
        scratch_folder("quantise") as scratch,
    ):
        source = _gguf(model, scratch, log)
        request = QuantiseRequest(
            source=source,
            chosen_on=chosen_on,
            decided_on=decided_on,
            reported_on=reported_on,
            importance_from=train if importance else "",
            limits=limits,
            kl=kl,
            minimise=minimise,
            types=names,
            parts=parts,
            windows=windows,
            device=device,
            workload=workload,
            repetitions=reps,
            threads=len(os.sched_getaffinity(0)),
            db=db,
        )
        build = LLAMA_CPP.build(log=log, tools=True)
        chosen = Quantiser(request, build, scratch, log).choose(file)
    if json:
        print_json(_json(output, chosen))
        return
    _print(output, chosen)


def _budgets(texts: Iterable[str], workload: Workload) -> tuple[list[Limit], float | None]:
    """Returns budgets of figures, and that of the divergence."""
    budgets: dict[str, Limit] = {}
    for text in texts:
        if match := _KL.fullmatch(text):
            try:
                limit = Limit("kl", float(match[1]))
            except ValueError:
                raise InvalidInput(f"no number: {match[1]!r}", where="--budget") from None
        else:
            limit = Limit.parse(text)
            require_measured(limit.metric, workload, "--budget")
        if limit.metric in budgets:
            raise InvalidInput(f"{limit.metric} has two budgets: give one", where="--budget")
        budgets[limit.metric] = limit
    kl = budgets.pop("kl", None)
    return list(budgets.values()), None if kl is None else kl.value


def _shared(sources: Sequence[Iterable[str]], most: int, count: int) -> list[str]:
    """Returns `count` texts of about `most` bytes, each with as much of every source, unless a source is shorter."""
    from nas.model.text.documents import first_bytes

    texts = ["\n\n".join(first_bytes(source, count * most // len(sources))) for source in sources]
    return [
        "\n\n".join(text[len(text) * part // count : len(text) * (part + 1) // count] for text in texts)
        for part in range(count)
    ]


def _gguf(model: Path, scratch: Path, log: Log) -> Path:
    """Returns a GGUF file with tokenizer of a model."""
    from nas.measure.runtimes.llama_cpp.gguf_file import is_gguf
    from nas.train.adapt.quantise import require_source

    if is_gguf(model):
        require_source(model, log)
        return model
    from nas.core.canonical import sha256_of
    from nas.measure.runtimes.base import Checkpoint
    from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
    from nas.train.adapt.checkpoints import import_model, read_model
    from nas.train.release.found_tokenizer import found_tokenizer

    read_model(model)  # before its tokenizer, which a file that is no model would be taken for
    log(f"importing {model}")
    carried, weights, half = found_tokenizer(model), scratch / "weights.safetensors", scratch / "f16.gguf"
    layout = import_model(model, weights).layout
    vocabulary = carried.tokenizer.vocabulary(layout.vocab)
    checkpoint = Checkpoint(weights, sha256_of(weights))
    LLAMA_CPP.export_trained(layout, "f16", checkpoint, half, model.resolve().name, vocabulary, carried.context)
    weights.unlink()
    require_source(half, log)
    return half


def _print(output: Path, chosen: Quantised) -> None:
    roles = list(dict.fromkeys(slot.role for slot in chosen.types))
    count = 1 + max(slot.part for slot in chosen.types)
    by_place = {(slot.role, slot.part): kind for slot, kind in chosen.types.items()}
    rows = [[role, *(by_place.get((role, part), "") for part in range(count))] for role in roles]
    print_table(("tensor", *(f"part {part + 1} of {count}" for part in range(count))), rows)
    typer.echo()
    print_table(
        ("file", "MB", "KL, nats a token (95 %)", "bits/byte", "same top token"),
        [_score(score) for score in (chosen.score, *chosen.beside)],
    )
    typer.echo()
    print_fields([("file", output), *_fields(chosen)])
    if not chosen.keeps_all:
        say(f"it breaks {' and '.join(str(check.limit) for check in chosen.checks if check.verdict == 'broken')}")


def _score(score: Score) -> list[str]:
    kl, half = score.kl
    return [
        score.name,
        f"{score.size / 1e6:.1f}",
        show_figure(kl, kl - half, kl + half),
        f"{score.bits_per_byte:.4f}",
        f"{score.same_top:.1%}",
    ]


def _fields(chosen: Quantised) -> Iterator[tuple[str, object]]:
    for check in chosen.checks:
        figure, expected = check.figure, chosen.expected[check.limit.metric]
        value = figure_text(figure.value, figure.unit, (figure.low, figure.high), figure.reason)
        yield str(check.limit), f"{check.verdict}: {value}; expected {show_number(expected)} {figure.unit}"


def _json(output: Path, chosen: Quantised) -> dict[str, Any]:
    return {
        "file": str(output),
        "types": {str(slot): kind for slot, kind in chosen.types.items()},
        "expected": dict(chosen.expected),
        "score": chosen.score.to_json(),
        "beside": [score.to_json() for score in chosen.beside],
        "budgets": [check.to_json() for check in chosen.checks],
        "figures": {name: figure.model_dump(mode="json") for name, figure in chosen.figures.items()},
    }
