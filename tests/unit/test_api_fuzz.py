"""Requests made from the coordinator's own OpenAPI document: for rows that are there, for any, and against it.

Nothing is ever answered 5xx, every answer is as documented, what contradicts the document is refused, every error has
the one form and tells nothing of the inside, and who shows wrong credentials gets no further.
"""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from api_lab import space_text
from exhaustive import examples
from farm_support import Coordinator, registration
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup, ServerError
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi import checks
from store_support import BROKEN, key, proposal, put_bytes, round_of

from nas.core.plan import InputFile, PlanFile
from nas.infra.store import agents, jobs, outcomes, studies, trials
from nas.infra.store.rows import JobRow, Role
from nas.infra.web.errors import ErrorBody
from nas.search.spaces import parse_space

EXAMPLES = int(os.environ.get("HILNAS_FUZZ", examples(15)))
REFUSED = checks.negative_data_rejection
CHECKS = [
    not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
    checks.response_schema_conformance, REFUSED,
]  # fmt: skip
INSIDE = re.compile(r"Traceback|\.py\b|sqlalchemy|sqlite|pydantic", re.IGNORECASE)

Operation = APIOperation[Any, Any, Any, Any]


@dataclass
class Farm:
    """A coordinator with a little of everything; who may speak to it; and names of what is there."""

    client: TestClient
    agent: tuple[str, str]
    bearer: dict[str, str]
    names: dict[str, object]
    names_at: dict[str, dict[str, object]]


def make_farm(folder: Path) -> Farm:
    lab = Coordinator(folder)
    client = TestClient(lab.app, raise_server_exceptions=False)
    agent, _ = lab.enrol("host"), lab.enrol("spare")
    body = registration("host", "box", "idle")
    assert client.post("/v1/agents/register", json=body, auth=agent).status_code == 200
    stored = put_bytes(lab.store, b"model")
    job = queue(lab, InputFile(sha256=stored.sha256, size=5))
    (folder / "run").write_bytes(b"model")
    runner = round_of().candidate.runner
    runner = runner.model_copy(update={"files": {"run": PlanFile(sha256=stored.sha256, size=5)}})
    lab.service.farm.runners.admit(runner, folder)
    space = parse_space(space_text(), "space.yaml").model_dump(mode="json")
    study = studies.create(lab.store, "mine", space, seed=0, version="0").id
    (trial,) = trials.propose(lab.store, study, [proposal(128)])
    names: dict[str, object] = {
        "agent": "host", "device": "box", "job": job.id, "epoch": job.epoch, "sha256": stored.sha256, "failure": None,
        "devices": body["devices"], "id": "box", "name": "mine", "study": "mine", "space": space_text(),
        "token": agents.issue_token(lab.store), "number": trial.number,
    }  # fmt: skip
    names_at: dict[str, dict[str, object]] = {
        "/v1/agents/enrol": {"agent": "newcomer"}, "/v1/agents/{name}/revoke": {"name": "spare"},
        "/v1/devices/{id}/remove": {"id": "idle"}, "/v1/studies": {"study": "new"},
    }  # fmt: skip
    bearer = {"Authorization": f"Bearer {agents.create_api_token(lab.store, 'admin', Role.ADMIN)}"}
    return Farm(client, agent, bearer, names, names_at)


def queue(lab: Coordinator, model: InputFile) -> JobRow:
    """Queues three jobs of a device: one that failed, one that is held, and one that waits; returns the held one."""
    plan = round_of().candidate.model_copy(update={"inputs": {"model": model}})
    for name in ("failed", "held", "waits"):
        jobs.enqueue(lab.store, key(name), round_of().model_copy(update={"candidate": plan}), device="box")
    failed, held = jobs.claim(lab.store, "box", "host"), None
    assert failed is not None and failed.epoch is not None
    assert outcomes.fail(lab.store, failed.id, "box", "host", failed.epoch, BROKEN).accepted
    held = jobs.claim(lab.store, "box", "host")
    assert held is not None
    return held


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """For requests that change little."""
    return make_farm(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """For requests that change nothing."""
    return make_farm(tmp_path_factory.mktemp("still"))


def document() -> dict[str, Any]:
    """The OpenAPI document, which is the same for every coordinator."""
    with tempfile.TemporaryDirectory() as folder:
        return Coordinator(Path(folder)).app.openapi()


DOCUMENT = document()
OPERATIONS = [f"{method.upper()} {path}" for path, methods in DOCUMENT["paths"].items() for method in methods]


def with_rows(path: str, names: dict[str, object]) -> dict[str, Any]:
    """The document, in which names are those of rows that are there; what comes beside them is left open."""
    closer = copy.deepcopy(DOCUMENT)
    for operation in closer["paths"][path].values():
        for parameter in operation.get("parameters", []):
            if parameter["name"] in names:
                parameter["schema"] = {"enum": [names[parameter["name"]]]}
    models = closer["components"]["schemas"]
    for title, model in models.items():
        if title.endswith("Request"):
            fields = model["properties"]
            fields |= {field: {"enum": [names[field]]} for field in fields if field in names}
    models["ResultRequest"]["properties"]["result"] = {"$ref": "#/components/schemas/RoundResult"}
    return closer


def operation_of(farm: Farm, label: str, *, rows: bool = False) -> tuple[Operation, list[str]]:
    """Returns an operation, from which requests are made, and the names of its security schemes."""
    method, path = label.split()
    guard = [name for scheme in DOCUMENT["paths"][path][method.lower()].get("security", []) for name in scheme]
    names = farm.names | farm.names_at.get(path, {})
    schema = schema_of(with_rows(path, names)) if rows else plain_schema()
    schema.app = farm.client.app
    return schema[path][method], guard


@cache
def plain_schema() -> Any:
    """Returns the schema of requests in which names are anything."""
    return schema_of(copy.deepcopy(DOCUMENT))


def schema_of(document: dict[str, Any]) -> Any:
    """Returns the schema of a document without credentials, which these tests send themselves; no request waits."""
    del document["components"]["securitySchemes"]
    for described in (operation for methods in document["paths"].values() for operation in methods.values()):
        described.pop("security", None)
        for parameter in described.get("parameters", []):
            if parameter["name"] == "wait_s":
                parameter["schema"] = {"enum": [0]}
    document["components"]["schemas"]["LeaseRequest"]["properties"]["wait_s"] = {"enum": [0]}
    return schemathesis.openapi.from_dict(document)


def ask(farm: Farm, guard: Sequence[str], case: Any, access: bool) -> int:
    """Sends a request, with the right credentials if `access`, and checks the answer; returns its status."""
    credentials = {"agent": {"auth": farm.agent}, "HTTPBearer": {"headers": farm.bearer}}
    answer = case.call(**(credentials[guard[0]] if access and guard else {"auth": ("x", "y")}))
    # 413 refuses a body before it is compared with the document; Schemathesis does not count it as a refusal.
    case.validate_response(answer, checks=[check for check in CHECKS if answer.status_code != 413 or check != REFUSED])
    if answer.status_code >= 400:
        body = ErrorBody.model_validate(answer.json())
        assert [body.request_id] == answer.headers["x-request-id"]
        assert not INSIDE.search(answer.text), answer.text
    assert access or not guard or answer.status_code == 401
    return int(answer.status_code)


def talk(
    farm: Farm, operation: Operation, guard: Sequence[str], mode: GenerationMode, count: int = EXAMPLES
) -> list[int]:
    """Sends `count` requests; returns the statuses of the answers."""
    statuses = []

    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode), access=st.sampled_from([True, True, True, False]))
    def once(case: Any, access: bool) -> None:
        statuses.append(ask(farm, guard, case, access))

    once()
    return statuses


@pytest.mark.parametrize("label", OPERATIONS)
def test_requests_for_what_is_there(label: str, still: Farm, tmp_path: Path) -> None:
    farm = still if label.startswith("GET ") else make_farm(tmp_path)
    # More requests than elsewhere: one of them must be accepted, and few generated results of rounds are.
    assert min(talk(farm, *operation_of(farm, label, rows=True), GenerationMode.POSITIVE, 3 * EXAMPLES)) < 300


@pytest.mark.parametrize("label", OPERATIONS)
def test_requests_that_the_document_allows(shared: Farm, label: str) -> None:
    assert talk(shared, *operation_of(shared, label), GenerationMode.POSITIVE)


def can_be_wrong(label: str) -> bool:
    """Whether requests have anything that can be wrong: not without parameters, nor where any name will do."""
    method, path = label.split()
    described = DOCUMENT["paths"][path][method.lower()]
    return ("parameters" in described or "requestBody" in described) and label != "GET /v1/files/{sha256}"


@pytest.mark.parametrize("label", [label for label in OPERATIONS if can_be_wrong(label)])
def test_requests_that_the_document_forbids(shared: Farm, label: str) -> None:
    assert talk(shared, *operation_of(shared, label), GenerationMode.NEGATIVE)


def test_a_fault_of_the_coordinators_would_be_found(shared: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "all", None)
    with pytest.raises(FailureGroup) as error:
        talk(shared, *operation_of(shared, "GET /v1/agents"), GenerationMode.POSITIVE)
    assert any(isinstance(failure, ServerError) for failure in error.value.exceptions)
