"""Logs: fields, both forms, and no secret in either."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from nas.core.logs import configure_logs, log_fields, without_passwords

log = logging.getLogger("nas.test")
SECRET = "s" * 43


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before, level, quiet = root.handlers[:], root.level, logging.getLogger("httpx").level
    root.handlers = []  # those of the test runner would be closed
    yield
    root.handlers, root.level = before, level
    logging.getLogger("httpx").setLevel(quiet)


def written(text: str, /, *args: object, as_json: bool = True, **fields: object) -> str:
    stream = io.StringIO()
    configure_logs(as_json=as_json, stream=stream)
    log.info(text, *args, extra={"fields": fields})
    return stream.getvalue()


def test_a_json_line_has_the_fields_of_its_context_and_its_own() -> None:
    with log_fields(agent="lab-1", epoch=3), log_fields(job="a.0"):
        entry = json.loads(written("leased %d", 7, device="box"))
    assert entry["time"].endswith("Z")
    del entry["time"]
    assert entry == {
        "level": "INFO", "logger": "nas.test", "message": "leased 7",
        "agent": "lab-1", "epoch": 3, "job": "a.0", "device": "box",
    }  # fmt: skip
    assert "agent" not in json.loads(written("after"))


def test_a_line_for_people() -> None:
    with log_fields(job="a.0"):
        line = written("leased", as_json=False)
    assert line.partition(" ")[2] == "INFO nas.test: leased  job=a.0\n"


def test_fields_cannot_replace_what_the_line_says() -> None:
    assert json.loads(written("true", message="false", level="ERROR"))["message"] == "true"


def test_other_threads_have_fields_of_their_own() -> None:
    stream = io.StringIO()
    configure_logs(as_json=True, stream=stream)
    with log_fields(job="a.0"):
        thread = threading.Thread(target=lambda: log.info("other"))
        thread.start()
        thread.join()
    assert "job" not in json.loads(stream.getvalue())


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {SECRET}",
        f"got 'authorization: basic {SECRET}'",
        f"token hilnas.some.one.{SECRET} refused",
        f"line hilnas-enrol.{SECRET}",
        f"cannot reach postgresql://nas:{SECRET}@host/nas",
        f"cannot reach postgresql://nas:a/{SECRET}@host/nas",
        f"cannot reach postgresql://host/nas?user=nas&password={SECRET}&sslmode=require",
    ],
)
def test_secrets_are_hidden(text: str, as_json: bool) -> None:
    for line in (written(text, as_json=as_json), written("%s", text, as_json=as_json), written("x", where=text)):
        assert SECRET not in line
        assert "[hidden]" in line


def test_only_the_password_of_a_url_is_hidden() -> None:
    assert without_passwords("give postgresql://nas:pw@host/nas 'https://host:1/a' b@c") == (
        "give postgresql://[hidden]@host/nas 'https://host:1/a' b@c"
    )
    assert without_passwords(f"hilnas-enrol.{SECRET}").endswith(SECRET)


@pytest.mark.parametrize("as_json", [True, False])
def test_what_came_from_outside_makes_no_line_of_its_own(as_json: bool) -> None:
    line = written("agent said: %s", "x\n2026-01-01T00:00:00.000Z ERROR nas: forged", as_json=as_json)
    assert len(line.splitlines()) == 1


def test_libraries_do_not_report_their_own_start() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    for library in ("uvicorn.error", "alembic.runtime.migration", "gguf.gguf_writer", "httpx"):
        logging.getLogger(library).info("started")
        logging.getLogger(library).warning("%s is in trouble", library)
    assert stream.getvalue().count("is in trouble") == 4 and "started" not in stream.getvalue()


def test_an_error_brings_its_traceback() -> None:
    stream = io.StringIO()
    configure_logs(as_json=True, stream=stream)
    try:
        raise ValueError(f"Bearer {SECRET}")
    except ValueError:
        log.exception("failed")
    entry = json.loads(stream.getvalue())
    assert "ValueError: Bearer [hidden]" in entry["traceback"]
