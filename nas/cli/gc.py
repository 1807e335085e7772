"""`nas gc`: stored files that nothing needs."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from nas.cli.database import DatabaseOption, open_store
from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_json, say
from nas.core.errors import InvalidInput
from nas.core.units import parse_limit
from nas.service.collect import collect

app = command_app()


@app.command()
def gc(
    keep: Annotated[str, typer.Option("--keep", help="How much of each may stay, such as 500MB or 20GB.")] = "20GB",
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Remove model files, checkpoints and lowered programs that nothing needs, least recently used first.

    Files of running measurements, of references and of finished studies' fronts stay, whatever the limit.
    """
    megabytes, relative = parse_limit(keep, "MB")
    if relative:
        raise InvalidInput(f"{keep!r} is no size; write 500MB or 20GB", where="--keep")
    with open_store(db) as store:
        done = collect(store, round(megabytes * 1e6))
    if json:
        print_json(dataclasses.asdict(done))
    else:
        for kind in ("artifacts", "agent_cache", "checkpoints", "programs"):
            say(f"{kind.replace('_', ' ')}: removed {getattr(done, kind) / 1e6:.1f} MB")
        say(f"{done.artifacts_kept / 1e6:.1f} MB of artifacts stay")
