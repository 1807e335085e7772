"""Launching a study from a page: what is taken, and what is said where it cannot be."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import ten_mistakes
from api_lab import space_text
from dashboard_lab import FORM_HEADERS, DashboardLab, Inputs, Visitor

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.infra.store import devices, studies
from nas.infra.store.rows import Role
from nas.search.proposers import Sampler
from nas.search.proposers.sampling import Rng
from nas.search.spaces import list_spaces, load_space, parse_space
from nas.search.spaces import space_text as packaged_text
from nas.search.study.events import stored_space
from nas.serve.dashboard.launch_page import preview_of

TYPED = "v: 1\r\nname: x\r\nmodle: {}  # \u202eright <b>&amp;\r\n"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[DashboardLab]:
    lab = DashboardLab(tmp_path)
    yield lab
    lab.process.end()


@pytest.fixture
def visitor(lab: DashboardLab) -> Visitor:
    return lab.visitor(Role.OPERATE)


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> DashboardLab:
    """A lab with a study, for launches that are refused."""
    lab = DashboardLab(tmp_path_factory.mktemp("still"))
    lab.study()
    return lab


@pytest.fixture(scope="module")
def refused(still: DashboardLab) -> Visitor:
    """Somebody whose launches are refused."""
    return still.visitor(Role.OPERATE)


def launch(visitor: Visitor, study: str = "mine", **fields: Any) -> httpx.Response:
    return visitor.post("/launch", **{"study": study, "space": space_text()} | fields)


def test_a_packaged_space_is_shown_to_begin_with(visitor: Visitor) -> None:
    page = visitor.page("/launch").text
    assert all(name in page for name in list_spaces())
    text = Inputs(visitor.page("/launch?space=lfm2-demo").text).areas["space"]
    assert parse_space(text, "space.yaml") == load_space("lfm2-demo")
    answer = visitor.page("/launch?space=lfm2-dem")
    assert answer.status_code == 404 and "did you mean &#39;lfm2-demo&#39;" in answer.text
    assert visitor.page("/launch?space=/etc/passwd").status_code == 404


def test_a_file_beside_the_coordinator_is_no_packaged_space(
    visitor: Visitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lfm2-demo.yaml").write_text("of: somebody\n")
    monkeypatch.chdir(tmp_path)
    text = Inputs(visitor.page("/launch?space=lfm2-demo").text).areas["space"]
    assert parse_space(text, "space.yaml") == load_space("lfm2-demo")


def test_a_study_is_launched_and_waits_until_it_begins(lab: DashboardLab, visitor: Visitor) -> None:
    answer = launch(visitor, trials="7")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/submissions/mine")
    submission = lab.submitted.find("mine")
    assert submission is not None
    assert (submission.trials, submission.submitted_by) == (7, "operate")
    assert (lab.home / "studies" / "mine" / "space.yaml").read_text() == space_text()
    assert "until a slot is free" in visitor.page("/submissions/mine").text
    assert [entry["study"] for entry in visitor.client.get("/studies.json").json()["waiting"]] == ["mine"]
    assert "/submissions/mine" in visitor.page("/studies").text
    space = parse_space(space_text(), "space.yaml").model_dump(mode="json")
    studies.create(lab.store, "mine", space, seed=0, version="0")
    assert '<a href="/studies/mine">' in visitor.page("/submissions/mine").text
    assert visitor.client.get("/studies.json").json()["waiting"] == []
    assert launch(visitor, trials="7").headers["Location"] == "/studies/mine"


def test_one_that_waits_is_stopped_and_taken_up_again(lab: DashboardLab, visitor: Visitor) -> None:
    launch(visitor)
    (stop,) = Inputs(visitor.page("/submissions/mine").text).actions
    assert visitor.post(stop, next="/submissions/mine").headers["Location"] == "/submissions/mine"
    page = visitor.page("/submissions/mine").text
    assert "stopped while it waited" in page
    assert Inputs(page).actions == ["/studies/mine/run"]
    visitor.post("/studies/mine/run")
    view = visitor.client.get("/submissions/mine.json").json()
    assert (view["begun"], view["submission"]["state"]) == (False, "queued")
    assert visitor.page("/submissions/mien").status_code == 404


def test_problems_are_told_at_their_line_and_the_text_is_kept(lab: DashboardLab, visitor: Visitor) -> None:
    lab.study()
    answer = launch(visitor, space=TYPED, trials="9", warm_start="study")
    assert answer.status_code == 422
    assert "Line 3: modle: unknown key &#39;modle&#39;; did you mean &#39;model&#39;?" in answer.text
    assert "<code>modle: {}  # \\u202eright &lt;b&gt;&amp;amp;</code>" in answer.text
    inputs = Inputs(answer.text)
    assert inputs.areas["space"] == TYPED.replace("\r\n", "\n")
    assert (inputs.fields["study"], inputs.fields["trials"], inputs.fields["warm_start"]) == ("mine", "9", "study")
    assert lab.submitted.not_begun() == []


def test_ten_mistakes_are_ten_problems(lab: DashboardLab, visitor: Visitor) -> None:
    answer = launch(visitor, space=ten_mistakes.TEXT)
    assert answer.status_code == 422
    problems = html.unescape(answer.text.partition('id="space-problems">')[2].partition("</ul>")[0])
    lines = [part.split("<")[0].strip() for part in problems.split("Line ")[1:]]
    ten_mistakes.are_found(lines, "")
    assert lab.submitted.not_begun() == []


def test_a_space_is_checked_without_a_launch(lab: DashboardLab, visitor: Visitor) -> None:
    answer = visitor.post("/launch/check", space=ten_mistakes.TEXT)
    problems = html.unescape(answer.text.partition('id="space-problems">')[2].partition("</ul>")[0])
    ten_mistakes.are_found([part.split("<")[0].strip() for part in problems.split("Line ")[1:]], "")
    assert "Nothing was launched" not in answer.text
    text = space_text()
    answer = visitor.post("/launch/check", space=text, study="../x")
    assert (answer.status_code, Inputs(answer.text).areas["space"]) == (200, text)
    space = parse_space(text, "space.yaml")
    preview = preview_of(space)
    assert preview.drawn > 1 and 1 <= len(preview.samples) <= 4
    for sample in preview.samples:
        layout = Layout.parse(sample.layout)
        assert Sampler(space).contains(layout) == []
        assert (sample.total, sample.active) == (layout.params.total, layout.params.active)
        assert preview.total[0] <= sample.total <= preview.total[1]
        assert f"<code>{sample.layout}</code>" in answer.text
    mixers = f"{len(space.mixers)} kind{'s' if len(space.mixers) > 1 else ''} of mixers"
    assert f"The space is valid: {mixers}, {len(space.ffn)} of feed-forwards." in answer.text
    assert "Estimated duration of a study on this coordinator: about " in answer.text
    assert [kind for kind, _ in preview.kinds] == [block.kind for block in space.mixers + space.ffn]
    assert lab.submitted.not_begun() == []


@pytest.mark.parametrize("trials", ["9" * 5000, "1" + "0" * 400, "0", "abc"])
def test_a_number_of_trials_that_cannot_be_is_no_default_of_a_check(refused: Visitor, trials: str) -> None:
    answer = refused.post("/launch/check", space=space_text(), trials=trials)
    assert answer.status_code == 200 and "Estimated duration" not in answer.text
    problems = answer.text.partition('id="trials-problems">')[2].partition("</ul>")[0]
    assert "Input should be" in problems or "Unable to parse" in problems


def test_a_study_s_space_is_a_start(lab: DashboardLab, visitor: Visitor) -> None:
    lab.study()
    assert '<a href="/launch?like=study">' in visitor.page("/studies/study").text
    assert "/launch" not in lab.visitor(Role.READ).page("/studies/study").text.partition("<main")[2]
    text = Inputs(visitor.page("/launch?like=study").text).areas["space"]
    assert parse_space(text, "space.yaml") == stored_space(studies.get(lab.store, "study"))
    assert visitor.page("/launch?like=studi").status_code == 404


def test_only_operators_check_a_space(lab: DashboardLab) -> None:
    assert lab.visitor(Role.READ).post("/launch/check", space=space_text()).status_code == 403


def test_a_preview_ends_where_drawing_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.serve.dashboard.launch_page._DRAW_S", -1.0)
    assert preview_of(load_space("lfm2-demo")).drawn == 1


def test_a_check_ends_where_no_layout_is_found(visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.serve.dashboard.launch_page._DRAW_S", -1.0)
    tight = packaged_text("lfm2.yaml").replace("{min: 300M, max: 380M}", "{min: 300000000, max: 300000050}")
    answer = html.unescape(visitor.post("/launch/check", space=tight).text)
    assert "1 draw(s) gave no layout of space 'lfm2': the time for it ended" in answer


def test_a_preview_has_what_was_drawn_before_drawing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    space = load_space("lfm2-demo")
    layouts = [Sampler(space).draw(np.random.default_rng(0))]

    def draw(self: Sampler, rng: Rng, until: float) -> Layout:
        if not layouts:
            raise InvalidInput("1000 draws gave no layout")
        return layouts.pop()

    monkeypatch.setattr(Sampler, "draw", draw)
    assert preview_of(space).drawn == 1
    with pytest.raises(InvalidInput, match="gave no layout"):
        preview_of(space)


@pytest.mark.parametrize(
    ("fields", "id", "message"),
    [
        ({"study": "../x"}, "study", "use up to 64 letters"),
        ({"study": ""}, "study", "use up to 64 letters"),
        ({"trials": "many"}, "trials", "valid integer"),
        ({"trials": "0"}, "trials", "greater than or equal to 1"),
        ({"warm_start": "studi"}, "warm_start", "did you mean &#39;study&#39;?"),
        ({"warm_start": "a b, <c>"}, "warm_start", "use up to 64 letters"),
        ({"space": ""}, "space", "Line 1"),
        ({"space": "a: [1\n"}, "space", "not YAML"),
        ({"space": "!!python/object/apply:os.system [id]"}, "space", "Line 1"),
        ({"space": "a: &x [*x]\n"}, "space", "Line 1"),
        ({"space": space_text(devices=["local", "bxo"])}, "space", "did you mean &#39;box&#39;?"),
        ({"space": space_text(quality={"corpus": ["/etc/passwd"]})}, "space", "cannot name files"),
        ({"space": "x" * 1_000_001}, "space", "at most 1000000 characters"),
    ],
)
def test_each_problem_stands_at_its_field(
    still: DashboardLab, refused: Visitor, fields: dict[str, str], id: str, message: str
) -> None:  # fmt: skip
    answer = launch(refused, **fields)
    assert answer.status_code == 422
    problems = answer.text.partition(f'id="{id}-problems">')[2].partition("</ul>")[0]
    assert message in problems
    assert 'aria-invalid="true"' in answer.text
    assert still.submitted.not_begun() == []


def test_a_name_that_is_taken_is_a_conflict(lab: DashboardLab, visitor: Visitor) -> None:
    lab.study()
    answer = launch(visitor, "study")
    assert answer.status_code == 409 and 'id="study-problems"' in answer.text


def test_a_file_counts_in_place_of_the_text(lab: DashboardLab, visitor: Visitor) -> None:
    def send(content: bytes, **fields: str) -> httpx.Response:
        files = {"file": ("my space.yaml", content, "application/yaml")}
        data = {"form_token": visitor.form_token, "study": "mine", "space": TYPED} | fields
        return visitor.client.post("/launch", data=data, files=files, headers=FORM_HEADERS)

    refused = send(b"v: 1\nnmae: \xc3\xa9\n")
    assert refused.status_code == 422
    assert Inputs(refused.text).areas["space"] == "v: 1\nnmae: \xe9\n"
    assert send(b"\xff\xfe").status_code == 422
    assert send(b"x" * (5 << 20)).status_code == 413
    assert send(b"", space=space_text()).headers["Location"] == "/submissions/mine"
    assert send(space_text().encode(), study="second", space="").headers["Location"] == "/submissions/second"
    assert (lab.home / "studies" / "second" / "space.yaml").read_text() == space_text()


@pytest.mark.parametrize(
    "body",
    [b"", b"--x", b"--x--", b"--x\r\n\r\n--x--", b'--x\r\nContent-Disposition: form-data; name="study"\r\n\r\nmine',
     b"--x\r\nContent-Disposition: form-data\r\n\r\nmine\r\n--x--", b"y--x\r\n--x--", b"\r\n--x" * 500],
)  # fmt: skip
def test_what_is_no_form_of_parts_is_refused(refused: Visitor, body: bytes) -> None:
    for kind in ("multipart/form-data; boundary=x", "multipart/form-data"):
        answer = refused.client.post("/launch", content=body, headers=FORM_HEADERS | {"Content-Type": kind})
        assert answer.status_code in (403, 422)


def test_who_may_only_look_is_told_so(lab: DashboardLab) -> None:
    page = lab.visitor(Role.READ).page("/launch").text
    assert "needs the role operate" in page and "<button>Launch</button>" not in page


def test_removed_devices_are_not_offered_and_cannot_be_named(lab: DashboardLab, visitor: Visitor) -> None:
    assert "local, box" in visitor.page("/launch").text
    devices.remove(lab.store, "box")
    assert "box" not in visitor.client.get("/launch.json").json()["devices"]
    answer = launch(visitor, space=space_text(devices=["box"]))
    assert answer.status_code == 422 and "unknown device &#39;box&#39;" in answer.text


def test_programs_are_told_what_a_study_can_be_made_of(visitor: Visitor) -> None:
    view = visitor.client.get("/launch.json?space=lfm2-demo").json()
    assert view["spaces"] == list_spaces() and view["devices"] == ["local", "box"]
    assert "name: lfm2-demo" in view["form"]["space"]


def test_the_list_says_who_submitted_and_is_filtered(lab: DashboardLab, visitor: Visitor) -> None:
    launch(visitor)
    space = parse_space(space_text(), "space.yaml").model_dump(mode="json")
    for name in ("mine", "other"):
        studies.create(lab.store, name, space, seed=0, version="0")
    listed = visitor.client.get("/studies.json?text=MIN").json()["studies"]
    assert [(study["name"], study["submitted_by"]) for study in listed] == [("mine", "operate")]
    page = visitor.page("/studies").text
    assert "submitted by operate" in page and ">other</a>" in page
    assert ">mine</a>" not in visitor.page("/studies?text=oth").text
    assert "No study matches" in visitor.page("/studies?state=failed").text


def test_the_log_of_a_submitted_study_ends_with_what_its_process_printed(lab: DashboardLab, visitor: Visitor) -> None:
    launch(visitor)
    space = parse_space(space_text(), "space.yaml").model_dump(mode="json")
    studies.create(lab.store, "mine", space, seed=0, version="0")
    assert visitor.client.get("/studies/mine/log.json").json()["printed"] is None
    (lab.home / "studies" / "mine" / "launch.log").write_text("calibrating llama.cpp <b>\n")
    assert "calibrating llama.cpp &lt;b&gt;" in visitor.page("/studies/mine/log").text
    studies.create(lab.store, "other", space, seed=0, version="0")
    assert visitor.client.get("/studies/other/log.json").json()["printed"] is None
