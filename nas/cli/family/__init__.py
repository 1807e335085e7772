"""`nas family`: build, train, compare and show model families."""

from __future__ import annotations

from collections.abc import Callable

from nas.cli.family import members, posttraining, retrieval, towers, training
from nas.cli.lazy import command_app

_COMMANDS: tuple[Callable[..., None], ...] = (
    members.build,
    training.train,
    posttraining.post,
    posttraining.tasks,
    posttraining.evaluate,
    posttraining.chat,
    posttraining.serve,
    training.tokenizer,
    retrieval.retrieval,
    retrieval.scores,
    towers.vision,
    towers.audio,
    towers.codec,
    towers.merge,
    retrieval.gguf,
    retrieval.pte,
    retrieval.index,
    retrieval.search,
    members.compare,
    members.show,
    members.report,
)
"""In the order of the help."""

app = command_app(help="Build, train, compare and show model families.")
for _command in _COMMANDS:
    app.command()(_command)
