"""`--server`: the command line against a coordinator over TLS."""

from __future__ import annotations

import json
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_lab import Lab, ScriptedProcess, space_text
from cli_runner import Outcome, nas
from pyarrow import parquet
from server_lab import Certificates, serve
from store_support import new_study, proposal, put

from nas.cli.output import when
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.trial import EventKind
from nas.infra.store import agents, devices, studies, trials
from nas.infra.store.rows import Health, Role, StudyState
from nas.infra.store.store import Store
from nas.search.analysis.archive import import_study, recorded_studies
from nas.search.analysis.report import study_report
from nas.search.spaces import parse_space
from nas.serve.api.submissions import SubmissionFolder
from nas.serve.client import Server, UsersClient, server_url, servers_file


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    for name in ("NAS_DB", "NAS_SERVER", "NAS_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home of the client"))
    monkeypatch.setenv("NAS_CONFIG", str(tmp_path / "config"))
    lab = Lab(tmp_path)
    yield lab
    lab.process.end()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def url(lab: Lab, certificates: Certificates) -> Iterator[str]:
    with serve(lab, certificates) as url:
        yield url


def add(url: str, certificates: Certificates, token: str) -> Outcome:
    return nas("server", "add", url, "--fingerprint", certificates.fingerprint, stdin=f"{token}\n")


@pytest.fixture
def server(lab: Lab, url: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> str:
    """A coordinator that was added, with an admin's token, and is the default."""
    done = add(url, certificates, lab.tokens[Role.ADMIN])
    assert done.code == 0, done.err
    monkeypatch.setenv("NAS_SERVER", url)
    return url


def test_a_server_is_added_by_fingerprint_and_kept_for_this_user_only(
    lab: Lab, url: str, certificates: Certificates
) -> None:
    done = add(url, certificates, lab.tokens[Role.OPERATE])
    assert done.code == 0
    assert "role operate" in done.err
    assert stat.S_IMODE(servers_file().stat().st_mode) == 0o600
    (row,) = json.loads(nas("server", "list", "--json").out)["servers"]
    assert row == {"url": url, "fingerprint": certificates.fingerprint}
    assert lab.tokens[Role.OPERATE] not in nas("server", "list").out
    assert nas("server", "remove", url).code == 0
    assert nas("server", "remove", url).code == 3


def test_another_authority_is_refused(lab: Lab, url: str, certificates: Certificates) -> None:
    done = nas("server", "add", url, "--fingerprint", "0" * 64, stdin="x\n")
    assert (done.code, certificates.fingerprint in done.err) == (3, True)
    assert nas("server", "add", url, stdin="x\n").code == 3  # nobody there to compare
    assert not servers_file().exists()


def test_a_server_with_another_certificate_is_rejected(
    lab: Lab, server: str, certificates: Certificates, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    content = json.loads(servers_file().read_text())
    content["servers"][server]["ca_pem"] = Certificates(tmp_path / "other").ca_pem
    servers_file().write_text(json.dumps(content))
    done = nas("device", "list")
    assert done.code == 1, "another try cannot help"
    assert "no certificate of the authority that was pinned" in done.err


def test_an_endless_certificate_is_not_read(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def pieces() -> Iterator[bytes]:
        while len(sent) < 1000:
            sent.append(1 << 14)
            yield bytes(1 << 14)

    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=pieces()))
    monkeypatch.setattr("nas.cli.server.open_http", lambda url, **settings: httpx.Client(transport=transport))
    done = nas("server", "add", "https://lab.example", "--fingerprint", "0" * 64, stdin="x\n")
    assert done.code == 3 and "sent more than a certificate" in done.err
    assert sum(sent) < 1 << 20


def test_a_wrong_token_is_not_kept(lab: Lab, url: str, certificates: Certificates) -> None:
    done = add(url, certificates, "hilnas.admin.wrong")
    assert done.code == 1
    assert "nas token create" in done.err
    assert not servers_file().exists()


def test_the_environment_overrides_the_stored_token(lab: Lab, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_TOKEN", lab.tokens[Role.READ])
    assert nas("device", "list").code == 0
    done = nas("device", "drain", "box")
    assert done.code == 1
    assert "needs role operate" in done.err


def test_a_token_may_end_its_line_but_has_no_other_characters(
    lab: Lab, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_TOKEN", f"{lab.tokens[Role.READ]}\r")
    assert nas("device", "list").code == 0
    for token in ("hilnas.ann.s\u00e4cret", "hilnas.ann.se\x1fcret"):
        monkeypatch.setenv("NAS_TOKEN", token)
        done = nas("device", "list")
        assert done.code == 3 and "$NAS_TOKEN: has characters" in done.err and "cret" not in done.err


@pytest.mark.parametrize("text", ["<html>Sign in</html>", "[1]"])
def test_what_another_server_answers_is_called_so(text: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
    with (
        UsersClient("https://lab.example", "token", None, transport=transport) as client,
        pytest.raises(InfrastructureFailed, match="not a response of a coordinator"),
    ):
        client.get("/v1/server")


def test_a_file_may_take_longer_than_other_answers() -> None:
    timeouts: list[dict[str, float]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        timeouts.append(request.extensions["timeout"])
        return httpx.Response(200, content=b"file")

    with UsersClient("https://lab.example", "token", None, transport=httpx.MockTransport(answer)) as client:
        assert client.get_bytes("/v1/studies/large/archive") == b"file"
    assert timeouts[0]["connect"] < 60 < 300 < timeouts[0]["read"]


def test_unknown_servers_and_server_with_database_are_rejected(lab: Lab, server: str) -> None:
    assert "nas server add" in nas("device", "list", "--server", "https://127.0.0.1:1").err
    assert nas("study", "list", "--db", "sqlite:////x.db").code == 3


@pytest.mark.parametrize(
    "text",
    [
        *("http://host:1", "https://host/path", "https://u:p@host", "https://", "https://h:x"),
        "https://farm\u200b.example",
    ],
)
def test_invalid_server_urls(text: str) -> None:
    with pytest.raises(InvalidInput):
        server_url(text)


def test_servers_have_a_default_port() -> None:
    assert server_url("lab.local") == server_url("https://lab.local/") == "https://lab.local:7711"
    assert server_url("[::1]:80") == "https://[::1]:80"


def test_devices_are_shown_and_managed_as_with_a_database(lab: Lab, server: str) -> None:
    study = new_study(lab.store, "waiting")
    put(lab.store, "a", trial=(study.id, None))
    # Readers of the database go by the time of day: by that, too, its agent was heard from just now.
    lab.clock.time = time.time() + 3600
    devices.register(lab.store, "local", [devices.get(lab.store, "box").device], boot_id="boot")
    database = str(lab.store.engine.url)
    for command in (("device", "list"), ("device", "show", "box"), ("device", "check", "box")):
        server_answer = nas(*command, "--json")
        assert server_answer.code == 0, server_answer.err
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("NAS_SERVER")
            database_answer = nas(*command, "--json", "--db", database)
        assert json.loads(server_answer.out) == json.loads(database_answer.out)
    assert nas("device", "name", "box", "desk").out.split() == ["device", "box", "name", "desk"]
    assert nas("device", "tag", "box", "fast", "lab").code == 0
    answer = nas("device", "show", "tag:lab", "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["id"] == "box"
    unknown = nas("device", "show", "tag:lap")
    assert unknown.code == 3 and "did you mean 'lab'?" in unknown.err
    noted = nas("device", "note", "box", "new battery").out
    assert "note    new battery" in noted and "tags    fast lab" in noted
    assert nas("device", "tag", "box", "two words").code == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NAS_SERVER")
        assert nas("device", "note", "box", "--db", database).code == 0
        assert nas("device", "name", "box", "x" * 65, "--db", database).code == 3
    assert "new battery" not in nas("device", "list").out and "fast lab" in nas("device", "list").out
    done = nas("device", "quarantine", "box", "--reason", "battery swollen")
    assert done.err == "box: idle, health maintenance (battery swollen)\n"
    assert devices.get(lab.store, "box").health is Health.MAINTENANCE
    assert nas("device", "show", "box").out.splitlines()[0].split() == ["device", "box"]
    assert nas("device", "show", "bxo").code == 3
    assert "jobs to do" in nas("device", "retire", "box").err
    assert nas("device", "release", "box").code == 0


def test_studies_are_listed_shown_and_controlled(lab: Lab, server: str) -> None:
    study = new_study(lab.store)
    space = parse_space(space_text(), "space.yaml").model_dump(mode="json")
    other_study = studies.create(lab.store, "shown", space, seed=0, version="0")
    assert [row["study"] for row in json.loads(nas("study", "list", "--json").out)["studies"]] == ["first", "shown"]
    report = json.loads(nas("study", "show", "shown", "--json").out)
    assert report == json.loads(json.dumps(study_report(lab.store, "shown")))
    assert nas("study", "front", "shown").out.startswith("trial\tquality")
    assert nas("study", "pause", "first").code == nas("study", "stop", "shown").code == 0
    assert studies.get(lab.store, study.id).desired_state == "pause"
    assert studies.get(lab.store, other_study.id).desired_state == "stop"
    assert nas("study", "show", "frist").code == 3


def test_scripts_read_the_tables_of_a_study(
    lab: Lab, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    space = parse_space(space_text(), "space.yaml").model_dump(mode="json")
    study = studies.create(lab.store, "phones", space, seed=0, version="0")
    (first,) = trials.propose(lab.store, study.id, [proposal(128)])
    with Server(server) as client:
        assert [entry["study"] for entry in client.studies()] == ["phones"]
        assert client.front("phones") == client.measurements("phones") == []
        (row,) = client.trials("phones")
        assert (row["trial"], row["state"]) == (first.number, "proposed")
        assert row["layout"] == "d64 v256 ffn=swiglu:128 [C3 A2/1]"
        csv = client.download("phones", "trials", "csv").decode()
        assert csv.splitlines()[0].startswith("trial,state,rung") and len(csv.splitlines()) == 2
    listed = json.loads(nas("study", "trials", "phones", "--json").out)["trials"]
    assert listed == [row]
    assert json.loads(nas("study", "trials", "phones", "--state", "complete", "--json").out)["trials"] == []
    for format in ("csv", "parquet", "json"):
        assert nas("study", "export", "phones", "-f", format, "-o", str(tmp_path / format)).code == 0
    assert (tmp_path / "csv").read_text() == csv
    archive = tmp_path / "archive"
    assert nas("study", "export", "phones", "-o", str(archive)).code == 0
    elsewhere = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    with monkeypatch.context() as patch:
        patch.delenv("NAS_SERVER")
        assert nas("study", "import", str(archive), "--db", elsewhere).code == 0
        assert json.loads(nas("study", "trials", "phones", "--json", "--db", elsewhere).out)["trials"][0]["trial"] == 0
    table = parquet.read_table(tmp_path / "parquet")
    assert table.to_pylist() == [row]
    assert json.loads((tmp_path / "json").read_text())["study"] == "phones"
    assert nas("study", "export", "phones", "-o", str(archive)).err == f"wrote {archive}\n"
    how_to = Path(__file__).parents[2] / "docs" / "how-to"
    page = (how_to / "reading-results.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace("https://farm.example:7711", server), "reading-results.md", "exec"), {})
    assert "1 trials" in capsys.readouterr().out and (tmp_path / "phones.csv").read_text() == csv
    (tmp_path / "phones.csv").unlink()
    cells = json.loads((how_to / "reading-results.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]).replace("https://farm.example:7711", server), names)
    assert names["trials"] == [row] and (tmp_path / "phones.csv").read_text() == csv


def test_a_front_is_a_small_tidy_frame_with_intervals(lab: Lab, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_studies()["lfm2"].open("rb") as archive:
        import_study(lab.store, archive)
    with Server(server) as client:
        front, whole, trials = client.front("lfm2"), client.front("lfm2", samples=True), client.trials("lfm2")
    assert [row["trial"] for row in front] == [row["trial"] for row in whole]
    assert "repetitions" in whole[0]["measurements"][0] and "repetitions" not in front[0]["measurements"][0]
    assert len(json.dumps(front)) < len(json.dumps(whole)) / 5
    frame = front.frame()
    assert len(frame) == len(front) * 3
    assert set(frame["objective"]) == {"quality", "latency", "memory"}
    assert ((frame["low"] < frame["value"]) & (frame["value"] < frame["high"])).all()
    best = frame[(frame["trial"] == 5) & (frame["objective"] == "latency")].iloc[0]
    assert best["high"] / best["value"] == pytest.approx(best["value"] / best["low"])
    row = next(row for row in trials if row["trial"] == 5)
    quality = frame[(frame["trial"] == 5) & (frame["objective"] == "quality")].iloc[0]
    assert (row["quality_low"], row["quality_high"]) == (quality["low"], quality["high"])
    assert (row["quality_seeds"], row["quality_rung"], row["quality_rescored"]) == (4, "long", 1)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InvalidInput, match="pip install pandas"):
        front.frame()


class Played(ScriptedProcess):
    """Does in the database what a launch does, once it is started."""

    def __init__(self, store: Store, end: StudyState) -> None:
        super().__init__("")
        self.store, self.end_state = store, end

    def start(self, folder: SubmissionFolder, *args: object, **more: object) -> object:  # type: ignore[override]
        space = parse_space(folder.space.read_text(), "space.yaml").model_dump(mode="json")
        number = studies.create(self.store, folder.path.name, space, seed=0, version="0").id
        trials.propose(self.store, number, [proposal(32)])
        trials.add_event(self.store, number, 0, EventKind.FAILED, {"reason": "crash"})
        studies.set_state(self.store, number, self.end_state)
        return super().start(folder, *args, **more)  # type: ignore[arg-type]


def test_a_launch_is_submitted_followed_and_reported(
    lab: Lab, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nas.serve.api.submissions._POLL_S", 0.05)
    played = Played(lab.store, StudyState.COMPLETE)
    lab.submitted._process = played
    (tmp_path / "mine.yaml").write_text(space_text())
    with lab.submitted:
        done = nas("launch", "--space", str(tmp_path / "mine.yaml"), "--study", "mine", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == json.loads(json.dumps(study_report(lab.store, "mine")))
    assert "trial 0: failed: crash" in done.err
    assert played.started == [("mine", False)]
    played.end()


def test_a_dry_run_is_estimated_by_the_coordinator(lab: Lab, server: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(space_text())
    plan = json.loads(nas("launch", "--space", str(tmp_path / "mine.yaml"), "--dry-run", "--json").out)
    assert plan["estimate"]["seconds"]["typical"] > 0 and plan["load"] is None
    assert lab.submitted.not_begun() == []
    (tmp_path / "mine.yaml").write_text(space_text(devices=["bxo"]))
    refused = nas("launch", "--space", str(tmp_path / "mine.yaml"), "--dry-run")
    assert refused.code == 3 and f"{tmp_path}/mine.yaml:24: devices.0: unknown device 'bxo'" in refused.err


def test_a_rejected_launch_reports_file_and_line(lab: Lab, server: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(space_text(devices=["bxo"]))
    done = nas("launch", "--space", str(tmp_path / "mine.yaml"), "--study", "mine")
    assert done.code == 3
    assert f"{tmp_path}/mine.yaml:24: devices.0: unknown device 'bxo'; did you mean 'box'?" in done.err


def test_ctrl_c_detaches_and_says_how_to_follow_again(
    lab: Lab, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(space_text())

    def interrupt(*_: object) -> str | None:
        raise KeyboardInterrupt

    number = studies.create(lab.store, "mine", {"name": "tiny"}, seed=0, version="0").id
    trials.propose(lab.store, number, [proposal(32)])
    monkeypatch.setattr("nas.cli.follow.event_line", interrupt)
    done = nas("study", "follow", "mine", "--from-start")
    assert done.code == 130
    assert f"nas study follow mine --server {server}" in done.err
    assert studies.get(lab.store, number).desired_state == "run"


def test_follow_starts_now_unless_all_is_asked_for(lab: Lab, server: str) -> None:
    number = studies.create(lab.store, "mine", {"name": "tiny"}, seed=0, version="0").id
    trials.propose(lab.store, number, [proposal(32)])
    quality = {"rung": "short", "value": 1.0213, "per_group": {}, "sd": 0.012, "n_seeds": 2}
    trials.add_event(lab.store, number, 0, EventKind.PROGRESS, {"what": "quality", "rung": 0, "quality": quality})
    trials.add_event(lab.store, number, 0, EventKind.FAILED, {"reason": "crash"})
    studies.set_state(lab.store, number, StudyState.STOPPED)
    lines = {options: nas("study", "follow", "mine", *options).err.splitlines() for options in ((), ("--from-start",))}
    assert lines[()] == ["study mine: stopped"]
    assert lines[("--from-start",)][:3] == [
        "trial 0: proposed", "trial 0: quality 1.02 ± 0.01 (rung short, 2 seeds)", "trial 0: failed: crash",
    ]  # fmt: skip


def test_follow_retries_while_the_coordinator_restarts(
    lab: Lab, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = studies.create(lab.store, "mine", {"name": "tiny"}, seed=0, version="0").id
    with serve(lab, certificates) as url:
        assert add(url, certificates, lab.tokens[Role.READ]).code == 0
    back = threading.Event()
    monkeypatch.setattr("nas.cli.follow.time.sleep", lambda seconds: back.set())
    port = int(url.rpartition(":")[2])

    def come_back() -> None:
        back.wait()
        studies.set_state(lab.store, number, StudyState.STOPPED)
        with serve(lab, certificates, port):
            end.wait()

    end = threading.Event()
    thread = threading.Thread(target=come_back)
    thread.start()
    done = nas("study", "follow", "mine", "--server", url)
    end.set()
    thread.join()
    assert done.code == 0, done.err
    assert "retrying in 1 s" in done.err
    assert "study mine: stopped" in done.err


def test_agents_are_listed_and_revoked(lab: Lab, server: str) -> None:
    agents.enrol(lab.store, agents.issue_token(lab.store), "lab-1")
    assert nas("agent", "list").out.splitlines() == [
        "agent\taccess\tlast seen\tdevices", "lab-1\tenrolled\tnever\t", f"local\tlocal\t{when(1000.0)}\tbox",
    ]  # fmt: skip
    assert nas("agent", "revoke", "lab-1").code == 0
    listing = json.loads(nas("agent", "list", "--json").out)["agents"]
    assert [(agent["name"], agent["access"]) for agent in listing] == [("lab-1", "revoked"), ("local", "local")]
