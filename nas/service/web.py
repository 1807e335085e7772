"""What the coordinator's applications share: bounded requests, and one form of errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from nas.service.api_errors import install_errors
from nas.service.body_limit import BodyLimit

MAX_BODY = 64 << 20
"""Bytes of a request: a round's raw output is kept up to 1 MiB a run."""

BODY_S = 60.0
"""Seconds in which a request must arrive whole."""


def web_app(**settings: Any) -> FastAPI:
    """An application without routes."""
    app = FastAPI(title="hilnas coordinator", docs_url=None, redoc_url=None, **settings)
    app.add_middleware(BodyLimit, limit=MAX_BODY, seconds=BODY_S)
    install_errors(app)
    return app
