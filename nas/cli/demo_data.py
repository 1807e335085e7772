"""`nas demo-data`: recorded studies, so that an empty dashboard shows something."""

from __future__ import annotations

from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption, open_store
from nas.cli.output import say
from nas.infra.store import studies
from nas.search.analysis.archive import import_study, recorded_studies

app = command_app()


@app.command("demo-data")
def demo_data(db: DatabaseOption = None) -> None:
    """Import the recorded studies of hilnas, to look at.

    They are named demo-NAME; 'nas study delete' removes them. Their figures are of the machines that recorded them, and
    no other study reuses them.
    """
    with open_store(db, create=True) as store:
        present = {study.name for study in studies.all(store)}
        for recorded, path in recorded_studies().items():
            name = f"demo-{recorded}"
            if name in present:
                say(f"{name}: is there already")
                continue
            with path.open("rb") as source:
                import_study(store, source, name=name)
            say(f"{name}: imported")
    say("next: nas study show demo-lfm2, or nas serve and its dashboard")
