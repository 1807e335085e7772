"""The set-up hands on what pip is configured with, and recognises an environment that works."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest
import setup_venv

LISTING = """:env:.find-links='/one /two'
global.cert='/etc/ca.pem'
global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple'
global.find-links='/other'
download.no-binary='thing'
install.index-url='https://mirror.example/simple'
"""


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip whose `config list` prints `LISTING`."""
    script = tmp_path / "pip.py"
    script.write_text(f"print({LISTING!r}, end='')")
    monkeypatch.setattr(setup_venv, "pip_command", lambda: [sys.executable, str(script)])


@pytest.mark.usefixtures("fake_pip")
def test_later_sources_win_and_other_commands_do_not_count() -> None:
    assert setup_venv.pip_settings() == {
        "cert": "/etc/ca.pem",
        "extra-index-url": "https://a.example/simple\nhttps://b.example/simple",
        "find-links": "/one /two",
        "index-url": "https://mirror.example/simple",
    }


@pytest.mark.usefixtures("fake_pip")
def test_uv_is_told_of_them_in_its_own_terms() -> None:
    assert setup_venv.uv_environment(setup_venv.pip_settings()) == {
        "SSL_CERT_FILE": "/etc/ca.pem",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_FIND_LINKS": "/one,/two",
        "UV_INDEX": "https://a.example/simple https://b.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_PYTHON_DOWNLOADS": "never",
    }


def test_nothing_configured_changes_nothing() -> None:
    assert setup_venv.uv_environment({}) == {"UV_PYTHON_DOWNLOADS": "never"}


def test_an_environment_is_usable_when_its_python_runs(tmp_path: Path) -> None:
    assert not setup_venv.usable(tmp_path / "none")
    venv.create(tmp_path / "good", with_pip=False)
    assert setup_venv.usable(tmp_path / "good")
    broken = tmp_path / "broken" / "bin" / "python"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert not setup_venv.usable(tmp_path / "broken")


def test_a_failing_step_ends_the_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        setup_venv.run([sys.executable, "-c", "raise SystemExit(3)"])
    assert end.value.code == 1
    assert "ended with 3" in capsys.readouterr().err
