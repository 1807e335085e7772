"""The users' API as a whole: who may do what, errors, OpenAPI, metrics, logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_lab import Lab, refusal
from fastapi import APIRouter
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from store_support import new_study, put, put_bytes, take

from nas.infra.store import agents, calibrations
from nas.infra.store import devices as stored_devices
from nas.infra.store import studies as studies_table
from nas.infra.store.rows import Role, StudyState
from nas.infra.web.errors import ErrorBody
from nas.infra.web.metrics import RESULTS
from nas.serve.api import devices, studies

OPERATIONS = {
    ("get", "/v1/server"): Role.READ,
    ("get", "/metrics"): Role.READ,
    ("get", "/v1/devices"): Role.READ,
    ("get", "/v1/devices/{id}"): Role.READ,
    **{("post", f"/v1/devices/{{id}}/{order}"): Role.OPERATE
       for order in ("drain", "resume", "quarantine", "release", "check")},
    ("post", "/v1/devices/{id}/label"): Role.OPERATE,
    ("post", "/v1/devices/{id}/reserve"): Role.OPERATE,
    ("post", "/v1/devices/{id}/remove"): Role.ADMIN,
    ("get", "/v1/device-events"): Role.READ,
    ("get", "/v1/agents"): Role.READ,
    ("post", "/v1/agents/{name}/revoke"): Role.ADMIN,
    ("get", "/v1/jobs"): Role.READ,
    ("get", "/v1/studies"): Role.READ,
    ("post", "/v1/studies"): Role.OPERATE,
    ("get", "/v1/studies/{name}"): Role.READ,
    **{("post", f"/v1/studies/{{name}}/{order}"): Role.OPERATE for order in ("pause", "run", "stop")},
    ("get", "/v1/studies/{name}/events"): Role.READ,
    ("get", "/v1/studies/{name}/trials"): Role.READ,
    ("get", "/v1/studies/{name}/measurements"): Role.READ,
    ("get", "/v1/studies/{name}/archive"): Role.READ,
    ("post", "/v1/estimates"): Role.READ,
    ("post", "/v1/studies/{name}/trials/{number}/mark"): Role.OPERATE,
}  # fmt: skip


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """For tests that do not mind what others did."""
    return Lab(tmp_path_factory.mktemp("shared"))


def described(lab: Lab) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in lab.app.openapi()["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_every_operation_has_a_role_that_is_tested(shared: Lab) -> None:
    assert {(method, path) for method, path, _ in described(shared)} == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_lower_roles_and_strangers_are_refused(shared: Lab, method: str, path: str) -> None:
    needed = OPERATIONS[method, path]
    address = path.format(id="box", name="none", number=0)
    body = {"json": {"study": "none", "space": ""}} if (method, path) == ("post", "/v1/studies") else {}
    stranger = shared.client(None).request(method, address, **body)
    assert "nas token create" in refusal(stranger, 401, "unauthenticated")
    assert stranger.headers["WWW-Authenticate"] == "Bearer"
    for role in Role:
        answer = shared.client(role).request(method, address, **body)
        if list(Role).index(role) < list(Role).index(needed):
            assert f"needs role {needed}" in refusal(answer, 403, "forbidden")
        else:
            assert answer.status_code not in (401, 403, 500), answer.text


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer x", "Bearer hilnas.read.", "Bearer hilnas.read.wrong", "Basic cmVhZDp4",
     "Bearer hilnas.nobody.x", "Bearer hilnas..x", "bearer \xff"],
)  # fmt: skip
def test_what_is_no_token_lets_nobody_in(shared: Lab, header: str) -> None:
    answer = shared.client(None).get("/v1/server", headers={"Authorization": header.encode("latin-1")})
    refusal(answer, 401, "unauthenticated")


def test_a_revoked_token_is_worth_nothing_at_once(lab: Lab) -> None:
    reader = lab.client(Role.READ)
    assert reader.get("/v1/server").json()["role"] == "read"
    agents.revoke_api_token(lab.store, "read")
    refusal(reader.get("/v1/server"), 401, "unauthenticated")


def test_examples_stand_for_every_operation_and_are_valid(shared: Lab) -> None:
    models = {
        name: model
        for module in (devices, studies)
        for name, model in vars(module).items()
        if isinstance(model, type) and issubclass(model, BaseModel)
    } | {"ErrorBody": ErrorBody}
    schemas = shared.app.openapi()["components"]["schemas"]
    for method, path, operation in described(shared):
        answers = [answer for answer in operation["responses"].values() if "content" in answer]
        bodies = [body["content"] for body in (*answers, operation.get("requestBody")) if body]
        for content in bodies:
            for kind, media in content.items():
                if kind != "application/json":
                    assert media.get("example") or media["schema"]["format"] == "binary"
                    continue
                schema = media["schema"]
                name = (schema.get("anyOf") or [schema])[0]["$ref"].rpartition("/")[2]
                if name == "HTTPValidationError":
                    pytest.fail(f"{method} {path}: errors have one form, and this is another")
                assert schemas[name]["examples"]
                # Those in the document lack what is null.
                for example in models[name].model_json_schema()["examples"]:
                    models[name].model_validate(example)
        assert operation["summary"]
        assert operation["security"], f"{method} {path}"


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/nothing", 404, "not_found"),
        ("/v1/devices/none", 404, "unknown_name"),
        ("/v1/devices/..%2Fx", 404, "not_found"),
        ("/v1/devices/A%00", 422, "invalid_input"),
        ("/v1/devices?limit=0", 422, "invalid_input"),
        ("/v1/devices?limit=1000000000000000000000", 422, "invalid_input"),
        ("/v1/jobs?after=x", 422, "invalid_input"),
        ("/v1/jobs?state=none", 422, "invalid_input"),
        ("/v1/studies?after=-1", 422, "invalid_input"),
        ("/v1/studies?after=99999999999999999999999", 422, "invalid_input"),
        ("/v1/studies/..%2F..%2Fetc%2Fpasswd", 404, "not_found"),
        ("/v1/studies/%2e%2e%5cx", 422, "invalid_input"),
        ("/v1/studies/.hidden/events", 422, "invalid_input"),
        ("/v1/studies/none", 404, "unknown_name"),
        ("/v1/studies/none/events?after=99999999999999999999", 422, "invalid_input"),
        ("/v1/devices/box/drain", 405, "method_not_allowed"),
    ],
)
def test_errors_have_one_form(shared: Lab, path: str, status: int, kind: str) -> None:
    refusal(shared.client().get(path), status, kind)


@pytest.mark.parametrize(
    "body", [b"nonsense", b"\xff", b"[" * 5000, b"[]", b'{"reason": "\\ud800"}', b'{"reason": "\\u0000"}',
             b'{"reason": "' + b"x" * 1000 + b'"}', b'{"other": 1}', b'{"reason": NaN}'],
)  # fmt: skip
def test_bodies_that_make_no_sense_are_refused(shared: Lab, body: bytes) -> None:
    for path in ("/v1/devices/box/quarantine", "/v1/studies"):
        answer = shared.client().post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422)  # no JSON at all, or another than was asked for
        refusal(answer, answer.status_code, "invalid_input")


def test_a_fault_of_ours_tells_no_details_but_where_to_look(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    broken = APIRouter()

    @broken.get("/broken")
    def fail() -> None:
        raise RuntimeError("password is hunter2")

    lab.app.include_router(broken)
    with caplog.at_level(logging.INFO):
        message = refusal(lab.client().get("/broken"), 500, "internal")
    assert "hunter2" not in message
    assert any(record.exc_info for record in caplog.records)


def test_requests_carry_an_id(shared: Lab) -> None:
    headers = {"X-Request-Id": "client-given-1"}
    assert shared.client().get("/v1/server", headers=headers).headers["X-Request-Id"] == "client-given-1"
    request_id = shared.client().get("/v1/server", headers={"X-Request-Id": "not this; one"}).headers["X-Request-Id"]
    assert request_id.isalnum()


def test_metrics_tell_of_the_farm(lab: Lab) -> None:
    put(lab.store, "a")
    put(lab.store, "b")
    take(lab.store)
    lab.clock.time += 7
    before = samples(lab).get('hilnas_results_total{verdict="accepted"}', 0.0)
    RESULTS.labels("accepted").inc()
    lab.client().get("/v1/devices/box")
    lab.client().get("/stranger/1234")
    metrics = samples(lab)
    assert metrics['hilnas_devices{health="unknown",state="leased"}'] == 1
    assert metrics['hilnas_jobs{state="queued"}'] == 1
    assert metrics['hilnas_jobs{state="leased"}'] == 1
    assert metrics["hilnas_queue_age_seconds"] == 7
    assert metrics['hilnas_leases_total{device="box"}'] == 1
    assert metrics['hilnas_results_total{verdict="accepted"}'] == before + 1
    labels = 'method="GET",route="/v1/devices/{id}",status="200"'
    assert (
        metrics[f'hilnas_request_seconds_bucket{{le="+Inf",{labels}}}']
        == metrics[f"hilnas_request_seconds_count{{{labels}}}"]
    )
    assert not any("1234" in name for name in metrics)


def test_metrics_tell_of_studies_disk_drift_and_noise(lab: Lab) -> None:
    study = new_study(lab.store)
    studies_table.set_state(lab.store, study.id, StudyState.FAILED)
    new_study(lab.store, "second")
    stored = put_bytes(lab.store, b"12345")
    calibrations.put(lab.store, "box", "fake", "b1", 12.5, {})
    for job, calm, later in (("before", True, 1), ("now", True, 4000), ("disturbed", False, 1)):
        lab.clock.time += later
        runs = [calibrations.ReferenceRun(1.28, 41.5, calm)] * (9 if calm else 3)
        calibrations.note_runs(lab.store, ("box", "fake", "b1"), job, runs, 12.5)
    metrics = samples(lab)
    states = {state: metrics[f'hilnas_studies{{state="{state}"}}'] for state in ("new", "failed", "interrupted")}
    assert states == {"new": 1, "failed": 1, "interrupted": 0}
    assert metrics["hilnas_artifact_bytes"] == stored.size == 5
    for folder in ("home", "artifacts"):
        size = metrics[f'hilnas_disk_size_bytes{{folder="{folder}"}}']
        assert 0 < metrics[f'hilnas_disk_free_bytes{{folder="{folder}"}}'] < size
    assert metrics['hilnas_device_drift_ratio{device="box",runtime="fake"}'] == pytest.approx(0.28)
    # 3 of the 12 runs of the last hour.
    assert metrics['hilnas_device_disturbed_ratio{device="box"}'] == pytest.approx(0.25)


def test_drift_is_that_of_the_latest_build(lab: Lab) -> None:
    for build in ("b1", "b2"):
        lab.clock.time += 1
        calibrations.put(lab.store, "box", "fake", build, 12.5, {})
    runs = [calibrations.ReferenceRun(1.28, 41.5, calm=True)] * 9
    sample = 'hilnas_device_drift_ratio{device="box",runtime="fake"}'
    calibrations.note_runs(lab.store, ("box", "fake", "b1"), "of the earlier one", runs, 12.5)
    assert sample not in samples(lab)
    calibrations.note_runs(lab.store, ("box", "fake", "b2"), "of the latest one", runs, 12.5)
    assert samples(lab)[sample] == pytest.approx(0.28)


def test_a_revoked_agent_is_not_reported_as_silent(lab: Lab) -> None:
    agents.enrol(lab.store, agents.issue_token(lab.store), "shelf")
    stored_devices.register(lab.store, "shelf", [], boot_id="boot")
    sample = 'hilnas_agent_last_seen_timestamp_seconds{agent="shelf"}'
    assert samples(lab)[sample] == lab.clock.time
    agents.revoke(lab.store, "shelf")
    assert sample not in samples(lab)


def test_metrics_keep_their_names_and_types(lab: Lab) -> None:
    lab.client().get("/v1/devices")
    RESULTS.labels("accepted").inc()
    lines = lab.client(Role.READ).get("/metrics").text.splitlines()
    assert {line.removeprefix("# TYPE ") for line in lines if line.startswith("# TYPE ")} == {
        "hilnas_devices gauge", "hilnas_jobs gauge", "hilnas_queue_age_seconds gauge", "hilnas_leases_total counter",
        "hilnas_agent_last_seen_timestamp_seconds gauge", "hilnas_request_seconds histogram",
        "hilnas_results_total counter", "hilnas_studies gauge", "hilnas_disk_free_bytes gauge",
        "hilnas_disk_size_bytes gauge", "hilnas_artifact_bytes gauge", "hilnas_device_drift_ratio gauge",
        "hilnas_device_disturbed_ratio gauge", "hilnas_build_info gauge",
    }  # fmt: skip
    assert not any("_created" in line for line in lines)


def test_labels_of_metrics_hold_any_text(lab: Lab) -> None:
    hostile = 'x"} 1\nforged{device="\\\r\x1b[2J'
    RESULTS.labels(hostile).inc()
    try:
        text = lab.client(Role.READ).get("/metrics").text
    finally:
        RESULTS.remove(hostile)
    metrics = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert hostile in {sample.labels["verdict"] for sample in metrics if sample.name == "hilnas_results_total"}
    assert not any(sample.name == "forged" for sample in metrics)


def samples(lab: Lab) -> dict[str, float]:
    """Metrics by name and labels."""
    answer = lab.client(Role.READ).get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
