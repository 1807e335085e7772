"""Pages of families: what they show, and that nothing but a member's listed files can be fetched."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_runner import nas
from fastapi.testclient import TestClient
from live_lab import LiveLab
from release_lab import CONTENT, write_family
from test_dashboard_access import HTML, OPEN, client
from test_dashboard_pages import HOSTILE, LOOPBACK, Page

from nas.core.family import (
    BENCHMARKS,
    EVALUATION,
    FAMILY,
    FILES,
    TRAINING,
    MemberEvaluation,
    MemberFiles,
    MemberTraining,
    TaskScore,
    read_record,
    write_record,
)

HASH = hashlib.sha256(CONTENT).hexdigest()
FILE = "/families/demo/4M/files/gguf/model%20q4_0.gguf"


@pytest.fixture
def visitor(tmp_path: Path, home: Path) -> TestClient:
    return client(LiveLab(tmp_path), OPEN, LOOPBACK)


def get_page(visitor: TestClient, path: str) -> Page:
    answer = visitor.get(path, headers=HTML)
    assert answer.status_code == 200, answer.text
    return Page(answer.text)


def get_json(visitor: TestClient, path: str) -> Any:
    answer = visitor.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_without_families_the_page_says_how_to_build_one(visitor: TestClient) -> None:
    assert "nas family build" in get_page(visitor, "/families").text
    assert get_json(visitor, "/families.json") == {"families": []}


def test_the_list_names_sizes_trainings_and_devices(visitor: TestClient, home: Path) -> None:
    write_family(home)
    (line,) = get_json(visitor, "/families.json")["families"]
    assert (line["sizes"], line["trained"], line["compared"]) == (["12M", "4M"], ["4M"], ["laptop"])
    page = get_page(visitor, "/families")
    assert "12M, 4M" in page.text and "laptop" in page.text
    assert "/families/demo" in [named.get("href") for _, named in page.tags]


def test_a_folder_that_was_copied_has_a_page_of_its_own(visitor: TestClient, home: Path) -> None:
    write_family(home)
    shutil.copytree(home / "families" / "demo", home / "families" / "second")
    assert [line["name"] for line in get_json(visitor, "/families.json")["families"]] == ["demo", "second"]
    links = [named.get("href") for _, named in get_page(visitor, "/families/second").tags]
    assert FILE.replace("demo", "second") in links and "/families/second.json" in links


def test_a_member_shows_what_its_files_answer(visitor: TestClient, home: Path) -> None:
    write_family(home)
    scores = {"pytorch": {"sums": TaskScore.of(30, 40)}, "q4_0": {"sums": TaskScore.of(29, 40, lost=2, gained=1)}}
    evaluation = MemberEvaluation(
        weights="checkpoint:other", tasks="<test>.jsonl", scores=scores, missing={"8da4w": "no file was written"}
    )
    write_record(home / "families" / "demo" / "4M" / EVALUATION, evaluation)
    other = evaluation.model_copy(update={"tasks": "gsm8k", "missing": {}})
    write_record(home / "families" / "demo" / "4M" / BENCHMARKS, other)
    page = get_page(visitor, "/families/demo").text
    assert "Exact answers of 4M" in page and "Benchmarks of 4M" in page and "Questions of gsm8k" in page
    for text in ("75.0 59.8 to 85.8", "-2.5 -12.8 to +8.0", "<test>.jsonl", "8da4w has no scores: no file was written",
                 "not those of the files below"):  # fmt: skip
        assert text in page, text
    (member, _) = get_json(visitor, "/families/demo.json")["members"]
    assert member["evaluation"]["scores"]["q4_0"]["sums"]["exact"] == 29
    assert member["benchmarks"]["tasks"] == "gsm8k"


def test_a_change_of_next_to_nothing_is_no_minus_zero(visitor: TestClient, home: Path) -> None:
    write_family(home)
    scores = {
        "pytorch": {"sums": TaskScore.of(5000, 10_000)},
        "q4_0": {"sums": TaskScore.of(4999, 10_000, lost=1, gained=0)},
    }
    evaluation = MemberEvaluation(weights="checkpoint:1", tasks="test.jsonl", scores=scores, missing={})
    assert evaluation.rows[0][-1] == "+0.0 (+0.0 to +0.0)"
    write_record(home / "families" / "demo" / "4M" / EVALUATION, evaluation)
    assert "+0.0 +0.0 to +0.0" in get_page(visitor, "/families/demo").text


def test_a_member_shows_all_of_its_stages(visitor: TestClient, home: Path) -> None:
    write_family(home)
    path = home / "families" / "demo" / "4M" / TRAINING
    first = read_record(path, MemberTraining)
    assert first is not None
    last = first.model_copy(
        update={
            "kind": "prefer", "name": "<second>", "before": (first,), "held_out": {"kept": 0.75}, "seconds": 60.0,
            "config": {**first.config, "counts": {"kept": 12}}, "spent": {"sample": 540.0, "train": 60.0},
            "peak_memory_mb": 12345.6,
        }
    )  # fmt: skip
    write_record(path, last)
    page = get_page(visitor, "/families/demo").text
    assert "Stages" in page and "<second>" in page and "kept 0.75 of 12" in page and "10 min" in page
    assert "peak memory 12,346 MB" in page and "12.35K" not in page
    done = nas("family", "show", "demo")
    assert done.code == 0 and "stage\tsteps\ttokens" in done.out and "kept 0.750 of 12" in done.out
    assert "sample 9 min 00 s" in done.out and "<second>" in done.out


def test_a_family_shows_members_and_models_by_size(visitor: TestClient, home: Path) -> None:
    write_family(home)
    view = get_json(visitor, "/families/demo.json")
    assert [member["member"]["size"] for member in view["members"]] == ["4M", "12M"]
    (compared,) = view["comparisons"]
    names = ["demo 4M", "other 5M", "other 10M", "demo 12M"]
    assert [model["model"]["name"] for model in compared["models"]] == names
    assert [kind["label"] for kind in compared["kinds"]] == [
        "prefill at 1,024 tokens",
        "decode at 0 tokens",
        "peak memory at 4,096 tokens",
    ]
    assert str(home) not in json.dumps(view)
    page = get_page(visitor, "/families/demo")
    for text in ("because it is faster", "81 to 99", "\N{EN DASH} because it is faster", "2.25", "1.50",
                 "random:0", "2M tokens in 20 steps", "2 h 00 min", "No files written", HASH):  # fmt: skip
        assert text in page.text
    plots = [json.loads(str(named["data-plot"])) for _, named in page.tags if "data-plot" in named]
    prefill, decode, training = plots
    assert training["label"] == "training of 4M"
    assert decode["label"].endswith("over parameters on laptop: 4 models") and "prefill" in prefill["label"]
    members, others = decode["series"]
    assert (members["texts"], others["texts"]) == (["demo 4M", "demo 12M"], ["other 5M", "other 10M"])
    assert members["low"] == [81, 36] and others["hollow"] and decode["x"]["log"] and decode["y"]["log"]


def test_links_of_a_page_lead_somewhere(visitor: TestClient, home: Path) -> None:
    write_family(home)
    page = get_page(visitor, "/families/demo")
    links = [str(named["href"]) for tag, named in page.tags if tag == "a" and "href" in named]
    assert {"#member-1", FILE} <= set(links)
    ids = {named.get("id") for _, named in page.tags}
    for link in links:
        if link.startswith("#"):
            assert link[1:] in ids
        elif not link.startswith("/studies/study"):
            assert visitor.get(link, headers=HTML).status_code == 200, link


def test_a_listed_file_is_sent_as_it_is(visitor: TestClient, home: Path) -> None:
    write_family(home)
    answer = visitor.get(FILE)
    assert (answer.status_code, answer.content) == (200, CONTENT)
    assert answer.headers["Content-Disposition"].startswith("attachment;")
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers["ETag"] == f'"{HASH}"'
    assert visitor.get(FILE, headers={"Range": "bytes=5-7"}).content == CONTENT[5:8]


@pytest.mark.parametrize(
    "path",
    [
        "demo/4M/files/secret.txt", "demo/4M/files/files.json", "demo/4M/files/gguf", "demo/4M/files/",
        "demo/4M/files/gguf/../secret.txt", "demo/4M/files/..%2f..%2ffamily.json", "demo/4M/files//etc/passwd",
        "demo/4M/files/gguf%2f..%2f..%2ffamily.json", "demo/12M/files/gguf/model%20q4_0.gguf", "demo/..%2f4M/files/x",
        "demo/5M/files/x", "..%2fdemo/4M/files/x", "other/4M/files/x", "demo/4M/files/%00",
    ],
)  # fmt: skip
def test_nothing_else_is_sent(visitor: TestClient, home: Path, path: str) -> None:
    write_family(home)
    assert visitor.get(f"/families/{path}").status_code in (404, 422)


@pytest.mark.parametrize("path", ["../../family.json", "/etc/passwd", "link"])
def test_a_record_cannot_name_what_is_not_the_members(visitor: TestClient, home: Path, path: str) -> None:
    write_family(home)
    folder = home / "families" / "demo" / "4M"
    (folder / "link").symlink_to(home / "families" / "demo" / FAMILY)
    record = read_record(folder / FILES, MemberFiles)
    assert record is not None
    outside = record.files[0].model_copy(update={"path": path})
    write_record(folder / FILES, record.model_copy(update={"files": (outside,)}))
    answer = visitor.get(f"/families/demo/4M/files/{path.replace('/', '%2F')}")
    refused = ("outside of its folder", "leaves the member's folder")
    assert answer.status_code == 422 and any(reason in answer.text for reason in refused)


def test_a_file_that_is_not_what_was_written_is_not_sent(visitor: TestClient, home: Path) -> None:
    write_family(home)
    file = home / "families" / "demo" / "4M" / "gguf" / "model q4_0.gguf"
    file.write_bytes(CONTENT + b"!")
    assert visitor.get(FILE).status_code == 409
    file.unlink()
    assert visitor.get(FILE).status_code == 409


def test_what_records_say_never_runs(visitor: TestClient, home: Path) -> None:
    write_family(home, text=HOSTILE)
    page = get_page(visitor, "/families/demo")
    assert HOSTILE in page.text
    assert all(str(named["src"]).startswith("/assets/") for tag, named in page.tags if tag == "script")
    assert HOSTILE in get_page(visitor, "/families").text


def test_who_is_not_there_and_what_is_damaged_is_told(visitor: TestClient, home: Path) -> None:
    write_family(home)
    assert visitor.get("/families/demo-1", headers=HTML).status_code == 404
    assert visitor.get("/families/..%2f..", headers=HTML).status_code in (404, 422)
    (home / "families" / "demo" / FAMILY).write_text("{}")
    write_family(home, "sound")
    for path in ("/families/demo", "/families/demo.json"):
        answer = visitor.get(path, headers=HTML)
        assert answer.status_code == 422 and "family.json" in answer.text
    damaged, sound = get_json(visitor, "/families.json")["families"]
    assert "family.json" in damaged["problem"] and (sound["problem"], sound["name"]) == (None, "sound")
    assert "family.json" in get_page(visitor, "/families").text
    (home / "families" / "demo" / FAMILY).write_text("{")
    (cut, _) = get_json(visitor, "/families.json")["families"]
    assert "family.json: Invalid JSON" in cut["problem"]


def test_strangers_fetch_nothing(tmp_path: Path, home: Path) -> None:
    write_family(home)
    stranger = client(LiveLab(tmp_path))
    assert stranger.get(FILE).status_code == 401
    assert stranger.get("/families", headers=HTML).status_code == 303


def test_a_family_has_a_report_to_send(home: Path, tmp_path: Path) -> None:
    write_family(home)
    scores = {"q4_0": {"sums": TaskScore.of(29, 40, lost=2, gained=1)}}
    evaluation = MemberEvaluation(weights="checkpoint:1", tasks="test.jsonl", scores=scores, missing={})
    write_record(home / "families" / "demo" / "4M" / EVALUATION, evaluation)
    output = tmp_path / "report.html"
    done = nas("family", "report", "demo", "-o", str(output))
    assert done.code == 0, done.err
    text = output.read_text()
    for phrase in ("A family of 2 models", "demo 4M", "other 10M", "because it is faster", "72 %", "81 to 99"):
        assert phrase in re.sub("<[^>]*>", "", text), phrase
    assert "<script" not in text and "<link" not in text and "data-plot" not in text
    assert not re.search(r"""(?:src|href)=["'](?!#)""", text), "it fetches nothing"
    assert nas("family", "report", "dmo", "-o", str(output)).code == 3
