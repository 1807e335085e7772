"""Writes the model card of a member: shape, measurements, provenance, and how to load it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from nas.core.canonical import content_hash
from nas.core.family import MeasuredModel, MemberEvaluation, MemberFile, MemberFiles, RecordedFigure
from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.units import show_count, show_number
from nas.measure.runtimes.llama_cpp.source import COMMIT
from nas.measure.runtimes.writing import hashed, replacing
from nas.train.release.options import FileOptions

NAME = "README.md"
_LEAST_TRANSFORMERS = {"Lfm2MoeForCausalLM": "5.0"}
"""Class -> first release of transformers that has it, where it is newer than `_TRANSFORMERS`."""
_TRANSFORMERS = "4.57"
"""The oldest release that our files are tested with."""
_LEAST_LLAMA_CPP = {"lfm2moe": "b6709"}
"""Architecture -> first release of llama.cpp that has it, where it is newer than `_LLAMA_CPP`."""
_LLAMA_CPP = "b6000"
"""A release that has the architectures and the pre-tokenizer of the files. Windows and separate output tables came to
them later: with those, the card names the commit that the files are tested with."""


def card_key(text: str) -> str:
    """Returns the key of a card's file."""
    return content_hash(hashlib.sha256(text.encode()).hexdigest())


def write_card(folder: Path, text: str) -> MemberFile:
    """Writes README.md, atomically."""
    with replacing(folder / NAME) as partial:
        written = hashed([text.encode()], partial)
    return MemberFile(path=NAME, kind="card", sha256=written.sha256, size=written.size, key=card_key(text))


def card(
    name: str,
    layout: Layout,
    files: MemberFiles,
    options: FileOptions,
    evaluations: Mapping[str, MemberEvaluation] = MappingProxyType({}),
) -> str:
    """Returns the card's text, in Markdown, of measured figures only.

    Args:
        name: of the model.
        layout: of the model.
        files: that the card describes.
        options: of the files.
        evaluations: title -> right answers; those of other weights are left out.
    """
    hashes = ((f"`{file.path}`", f"{file.size:,}", f"`{file.sha256}`") for file in files.files)
    sections = (
        _head(options.license),
        f"# {name}\n\n" + _what(layout, files),
        "## Measured\n\n" + _measured(options.measured),
        *(
            "\n\n".join((f"## {title}", *evaluation.notes, _table(evaluation.head, evaluation.rows)))
            for title, evaluation in evaluations.items()
            if evaluation.weights == files.weights
        ),
        *(
            ["## Budgets of the search\n\n" + _table(("budget", "limit"), options.budgets.items())]
            * bool(options.budgets)
        ),
        "## Provenance\n\n" + _table(("", ""), (*options.provenance.items(), ("weights", f"`{files.weights}`"))),
        "## Use\n\n" + "\n\n".join(_use(layout, files)),
        "## Files\n\n" + _table(("file", "bytes", "SHA-256"), hashes),
    )
    return "\n\n".join(sections) + "\n"


def _head(license: str | None) -> str:
    lines = [f"license: {license or '# yours to choose'}", "library_name: transformers"]
    return "\n".join(("---", *lines, "pipeline_tag: text-generation", "tags: [hilnas]", "---"))


def _what(layout: Layout, files: MemberFiles) -> str:
    params = layout.params
    weights = "random, for measuring: it cannot talk" if files.weights.startswith("random:") else "trained"
    rows = [
        ("layout", f"`{layout}`"),
        ("parameters", f"{params.total:,} ({show_count(params.total)})"),
        ("active per token", f"{params.active:,}"),
        ("without embeddings", f"{params.non_embedding:,}"),
        ("layers", str(layout.depth)),
        ("vocabulary", f"{layout.vocab:,}"),
        ("weights", f"{weights} (`{files.weights}`)"),
        *((f"loads in {runtime}", what) for runtime, what in files.loads.items()),
    ]
    return "A language model whose architecture hilnas found.\n\n" + _table(("", ""), rows)


def _measured(measured: Sequence[MeasuredModel]) -> str:
    if not measured:
        return "Nothing was measured yet."
    rows = [
        (_where(one), METRICS[figure.metric].title, f"{figure.prompt:,}", _value(figure))
        for one in measured
        for figure in one.figures
    ]
    notes = [f"{one.device}: not used by the search." for one in measured if not one.searched]
    return "\n\n".join((_table(("device", "figure", "tokens of context", "value [95 % interval]"), rows), *notes))


def _where(one: MeasuredModel) -> str:
    return f"{one.device}, {one.runtime} {one.quantisation}, {one.threads} threads"


def _value(figure: RecordedFigure) -> str:
    if figure.value is None:
        return f"none: {figure.reason}"
    interval = f" [{', '.join(map(show_number, figure.ci95))}]" if figure.ci95 else ""
    return f"{show_number(figure.value)}{interval}"


def _use(layout: Layout, files: MemberFiles) -> Iterator[str]:
    if any(file.kind == "transformers" for file in files.files):
        remote = ", trust_remote_code=True" if "trust_remote_code" in files.loads["transformers"] else ""
        least = _LEAST_TRANSFORMERS.get(files.loads["transformers"], _TRANSFORMERS)
        yield (
            f"transformers {least} or newer:\n\n```python\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("transformers"{remote})\n'
            f'tokenizer = AutoTokenizer.from_pretrained("transformers"{remote})\n```'
        )
    if ggufs := [file for file in files.files if file.kind == "gguf"]:
        gguf = next((file for file in ggufs if file.quantisation == "q4_0"), ggufs[0])
        loads = files.loads["llama.cpp"]
        yield f"{_llama_cpp(layout, loads)}:\n\n```sh\nllama-cli -m {gguf.path}\n```"
        if "patched" in loads:
            yield "On a phone: apps bring a llama.cpp without these patches and do not open it."
        else:
            yield (
                "On a phone, an app that brings such a llama.cpp opens the file, among them PocketPal AI and ChatterUI:"
                f"\n\n```sh\nadb push {gguf.path} /sdcard/Download/\n```"
            )
    if pte := next((file for file in files.files if file.kind == "pte"), None):
        yield (
            "ExecuTorch:\n\n```python\nfrom executorch.runtime import Runtime\n\n"
            f'forward = Runtime.get().load_program("{pte.path}").load_method("forward")\n```'
        )


def _llama_cpp(layout: Layout, loads: str) -> str:
    """Returns the versions of llama.cpp that load a member's files."""
    if "patched" in loads:
        return "llama.cpp with the patches of hilnas (`nas runtime build llama.cpp --patched`)"
    windows = any(mixer.kind == "swa" for layer in layout.layers for mixer in layer.mixers)
    plain = layout.tied and not windows
    return f"llama.cpp {_LEAST_LLAMA_CPP.get(loads, _LLAMA_CPP) if plain else f'of commit {COMMIT}'} or newer"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)
