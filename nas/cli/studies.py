"""Where `nas study` and `nas launch` read and steer: a coordinator's API, or a database. Both speak the same JSON."""

from __future__ import annotations

from nas.cli.database import open_store
from nas.cli.remote import open_server
from nas.cli.users_client import Json, part
from nas.core.errors import InfrastructureFailed
from nas.service.report import study_report
from nas.store import pages, studies
from nas.store.rows import DesiredState

_ALL = 1 << 20


def read_studies(server: str | None, db: str | None) -> list[Json]:
    """Every study: study, space, state, desired_state, trials, created."""
    if server is not None:
        with open_server(server, db) as client:
            return list(client.whole("/v1/studies", "studies")["studies"])
    with open_store(db) as store:
        return [
            {
                "study": study.name,
                "space": study.space,
                "state": study.state.value,
                "desired_state": study.desired_state,
                "trials": study.trials,
                "created": study.created,
            }
            for study in pages.studies(store, limit=_ALL)
        ]


def read_report(study: str, server: str | None, db: str | None) -> Json:
    """A study's report, as `nas.service.report` makes it.

    Raises:
        UnknownName: no such study.
        InfrastructureFailed: it was submitted and has not begun.
    """
    if server is None:
        with open_store(db) as store:
            return study_report(store, study)
    with open_server(server, db) as client:
        found = client.get(f"/v1/studies/{part(study)}")
    report: Json | None = found["report"]
    if report is None:
        why = (found["submission"] or {}).get("message")
        raise InfrastructureFailed(f"study {study!r} is {found['state']}{f': {why}' if why else '; it has not begun'}")
    return report


def tell_study(study: str, desired: DesiredState, server: str | None, db: str | None) -> None:
    """Tells a study to run, pause or stop.

    Raises:
        UnknownName: no such study.
    """
    if server is not None:
        with open_server(server, db) as client:
            client.post(f"/v1/studies/{part(study)}/{desired}")
        return
    with open_store(db) as store:
        studies.set_desired_state(store, studies.get(store, study).id, desired)
