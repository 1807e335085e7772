"""Arguments that several commands share, and what they stand for."""

from __future__ import annotations

from typing import Annotated

import typer

from nas.core.layout import Layout
from nas.core.published import LFM2

LayoutArgument = Annotated[
    str, typer.Argument(metavar="LAYOUT", help="One-line layout, a published name such as LFM2-350M, or '-' for stdin.")
]
RuntimeOption = Annotated[str, typer.Option("--runtime", "-r", help="Runtime.")]
StudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="Name of a study.")]
SpaceArgument = Annotated[str, typer.Argument(metavar="SPACE", help="Name of a packaged space, or a YAML file.")]


def read_layout(text: str) -> Layout:
    """The layout that an argument names.

    Raises:
        InvalidInput: it is neither a published name nor a layout.
    """
    if text == "-":
        text = typer.get_text_stream("stdin").readline()
    return Layout.parse(LFM2.get(text, text))
