"""The check of names that are pronouns or participles."""

import ast
import json
import sys
from pathlib import Path

import check_names
import pytest


def test_names_that_are_assigned_or_defined_count_in_any_case_and_other_names_do_not() -> None:
    tree = ast.parse(
        "for each in trials: found = each.kept\n"
        "class Given:\n    made: int\n    def _own(self, TAKEN_, trial): self._left = told(each=1)\n"
        "async def some(): self.here.ended = KNOWN\n"
    )
    expected = ["Given", "TAKEN_", "_left", "_own", "each", "ended", "found", "made", "some"]
    assert sorted(name for _, name in check_names.names(tree)) == expected


def test_one_more_than_the_limit_fails_and_limits_only_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = tmp_path / "names.json"
    monkeypatch.setattr(check_names, "LIMITS", limits)
    monkeypatch.setattr(check_names, "occurrences", lambda: {"nas/a": ["nas/a/x.py:1: each", "nas/a/x.py:2: own"]})
    monkeypatch.setattr(sys, "argv", ["check_names.py"])
    limits.write_text(json.dumps({"nas/a": 1, "nas/gone": 4}))
    assert check_names.main() == 1
    assert "nas/a/x.py:2: own" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["check_names.py", "--write"])
    assert check_names.main() == 1 and json.loads(limits.read_text()) == {"nas/a": 1}
    limits.write_text(json.dumps({"nas/a": 5}))
    assert check_names.main() == 0 and json.loads(limits.read_text()) == {"nas/a": 2}
