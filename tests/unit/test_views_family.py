"""What is on record about families, and names that must not leave their folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nas.core.errors import InvalidInput, UnknownName
from nas.core.family import (
    FAMILY,
    FILES,
    Comparison,
    Family,
    Member,
    MemberFiles,
    family_folder,
    member_folder,
    read_family,
    write_record,
)
from nas.serve.views.family import family_view, list_families

LAYOUT = "d64 v256 ffn=swiglu:128 [C3 A4/2]"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_HOME", str(tmp_path))


def write_family(name: str, size: str = "4M") -> None:
    member = Member(
        size=size, layout=LAYOUT, parameters=5, active=5, non_embedding=4, decisions=(), tried=(),
    )  # fmt: skip
    family = Family(name=name, made="2026-01-01T00:00:00Z", seed=0, pattern="C A", sources=(), decisions=(),
                    members=(member,))  # fmt: skip
    write_record(family_folder(name) / FAMILY, family)


def test_families_are_listed_by_name() -> None:
    assert list_families() == []
    write_family("second")
    write_family("first")
    assert [family.name for family in list_families()] == ["first", "second"]


def test_a_view_holds_what_was_done_to_members_and_comparisons() -> None:
    write_family("one")
    assert family_view("one").members[0].files is None
    files = MemberFiles(layout=LAYOUT, weights="random:0", loads={}, files=())
    write_record(member_folder("one", "4M") / FILES, files)
    comparison = Comparison(family="one", device="here", conditions={}, made="", models=(), ratios=())
    write_record(family_folder("one") / "comparison-here.json", comparison)
    view = family_view("one")
    assert view.members[0].files == files
    assert view.members[0].training is None
    assert view.comparisons == (comparison,)


def test_an_unknown_family_is_told_with_the_nearest() -> None:
    write_family("demo-1")
    with pytest.raises(UnknownName, match="did you mean 'demo-1'"):
        read_family("demo-2")


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "a\n", "x" * 65])
def test_no_name_leads_out_of_the_folder(name: str) -> None:
    with pytest.raises(InvalidInput, match="not "):
        family_view(name)


def test_a_size_in_a_record_leads_nowhere_else() -> None:
    write_family("one")
    record = family_folder("one") / FAMILY
    record.write_text(record.read_text().replace('"4M"', '"../../x"'))
    with pytest.raises(InvalidInput, match=r"family\.json: members.*size"):
        family_view("one")
    with pytest.raises(InvalidInput, match="a size has"):
        member_folder("one", "../../x")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "gguf/../../x", "", "."])
def test_a_file_in_a_record_lies_nowhere_else(path: str) -> None:
    write_family("one")
    file = {"path": path, "kind": "gguf", "sha256": "0" * 64, "size": 1}
    text = json.dumps({"layout": LAYOUT, "weights": "random:0", "loads": {}, "files": [file]})
    folder = member_folder("one", "4M")
    folder.mkdir()
    (folder / FILES).write_text(text)
    with pytest.raises(InvalidInput, match=r"files\.json: files.*leaves the member's folder"):
        family_view("one")


def test_a_damaged_record_is_named() -> None:
    write_family("one")
    (family_folder("one") / FAMILY).write_text('{"v": 1}')
    with pytest.raises(InvalidInput, match=r"one/family\.json: name"):
        list_families()
