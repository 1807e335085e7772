"""Writes the generated parts of docs/: the command reference, and tables of the search space, of models and of results.

`--check` writes nothing and fails where a file is not what it would write.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from docs_tables import (
    block_tables,
    merges_table,
    metric_table,
    model_tables,
    model_types_table,
    passes_table,
    post_training_table,
    reference_table,
    task_table,
)

from nas.cli.main import app

DOCS = Path(__file__).resolve().parent.parent / "docs"
RECORDED = DOCS.parent / "benchmarks/recorded"
BEGIN, END = "<!-- generated: {} -->", "<!-- end -->"
WIDTH = 100


def main() -> None:
    """Writes or checks every generated part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only check whether the files are current")
    check = parser.parse_args().check
    stale = []
    for path, text in generated().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not check:
            path.write_text(text, encoding="utf-8")
    for path in stale:
        print(
            f"{path.relative_to(DOCS.parent)}: {'out of date, run `make docs`' if check else 'written'}",
            file=sys.stderr,
        )
    sys.exit(bool(check and stale))


def generated() -> dict[Path, str]:
    """Returns the text that every file with a generated part should have."""
    reference = DOCS / "reference/search-space.md"
    text = reference.read_text(encoding="utf-8")
    parts = {"keys": model_tables(), "blocks": block_tables(), "metrics": metric_table(), "tasks": task_table()}
    for name, part in parts.items():
        text = _replaced(text, name, part)
    compared = DOCS / "how-to/family-comparison.md"
    models = _replaced(compared.read_text(encoding="utf-8"), "references", reference_table())
    post = DOCS / "measured/post-training.md"
    trained = post.read_text(encoding="utf-8")
    tables = {
        "post-training": post_training_table,
        "post-training-passes": passes_table,
        "post-training-merges": merges_table,
    }
    for name, table in tables.items():
        trained = _replaced(trained, name, table(json.loads((RECORDED / f"{name}.json").read_bytes())))
    types = DOCS / "reference/model-types.md"
    read = _replaced(types.read_text(encoding="utf-8"), "types", model_types_table())
    return {reference: text, compared: models, post: trained, types: read, DOCS / "reference/cli.md": cli_reference()}


def _replaced(text: str, name: str, part: str) -> str:
    """Returns `text` with the part between the markers of `name` replaced."""
    begin = BEGIN.format(name)
    before, opening, rest = text.partition(begin)
    _, closing, after = rest.partition(END)
    assert opening and closing, f"no {begin} ... {END}"
    return f"{before}{begin}\n\n{part.strip()}\n\n{END}{after}"


def cli_reference() -> str:
    """Returns docs/reference/cli.md: the output of `--help` of every command."""
    root = typer.main.get_command(app)
    purpose = "Every command and option, to look up. Written by `make docs` from the commands' own help."
    parts = [f"# Command reference\n\n{purpose}\n"]
    for path, text in _helps(root, "nas", None):
        parts.append(f"## {path}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def _helps(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    context = command.make_context(
        name, [], parent, resilient_parsing=True, terminal_width=WIDTH, max_content_width=WIDTH
    )  # fmt: skip
    yield context.command_path, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    if isinstance(command, typer.core.TyperGroup):
        for subcommand in command.list_commands(context):
            yield from _helps(command.get_command(context, subcommand), subcommand, context)


if __name__ == "__main__":
    main()
