"""The libraries that pages load: what the lock says, and nothing that the security policy forbids."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
import vendor_assets
from vendor_assets import ASSETS, FILES, LOCK

LONGEST_LINE = 200
"""Of files written by hand: those that others packed for browsers have longer lines."""
ENTRIES = json.loads(LOCK.read_text())


def test_every_file_is_ours_or_locked() -> None:
    locked = {entry["file"] for entry in ENTRIES}
    assert locked <= {file.name for file in ASSETS.iterdir()}
    for file in ASSETS.iterdir():
        assert file.name in locked or max(map(len, file.read_text().splitlines())) <= LONGEST_LINE, file.name
    assert [(e["package"], e["version"], e["source"], e["file"]) for e in ENTRIES] == [tuple(asset) for asset in FILES]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry["file"]))
def test_a_file_is_what_was_locked(entry: dict[str, str]) -> None:
    content = (ASSETS / entry["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == entry["sha256"]
    assert entry["licence"]


@pytest.mark.parametrize("name", [asset.name for asset in FILES if asset.name.endswith(".js")])
def test_no_script_is_made_of_text(name: str) -> None:
    text = (ASSETS / name).read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.$])(?:eval|Function)\(", text)


def test_another_content_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["vendor_assets.py"])
    monkeypatch.setattr(vendor_assets, "_fetch", lambda asset, folder: (b"something else", "MIT"))
    before = {file.name: file.read_bytes() for file in ASSETS.iterdir()}
    with pytest.raises(SystemExit, match=r"not what assets\.lock says"):
        vendor_assets.main()
    assert {file.name: file.read_bytes() for file in ASSETS.iterdir()} == before
