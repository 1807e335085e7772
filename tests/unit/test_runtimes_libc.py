"""Which C library programs ask for, and which devices have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nas.measure.runtimes.build_cache import first_that_runs, has_glibc, needed_glibc


def test_what_is_needed_is_the_newest_that_any_file_asks_for(tmp_path: Path) -> None:
    for name, content in (
        ("a", b"\0GLIBC_2.17\0GLIBC_2.36\0GLIBC_2.4\0"),
        ("b", b"\0GLIBC_2.27\0GLIBC_2.99.1\0xGLIBC_2.98\0"),
        ("none", b"\0GLIBCXX_3.4.29\0"),
    ):
        (tmp_path / name).write_bytes(content)
    assert needed_glibc((tmp_path / "a", tmp_path / "b")) == "2.36"
    assert needed_glibc((tmp_path / "none",)) is None


@pytest.mark.parametrize(
    ("libc", "needed", "has"),
    [
        ("glibc 2.36", "2.36", True),
        ("glibc 2.9", "2.36", False),
        ("glibc 2.40", "2.4", True),
        ("bionic", "2.17", False),
        (None, "2.17", None),
        (None, None, True),
        ("bionic", None, True),
    ],
)
def test_what_a_device_has(libc: str | None, needed: str | None, has: bool | None) -> None:
    assert has_glibc(libc, needed) is has


def test_what_surely_runs_goes_before_what_may() -> None:
    builds = {"new": "2.40", "old": "2.17", "static": None}
    assert first_that_runs(builds, "glibc 2.31", builds.get) == "old"
    assert first_that_runs(builds, "bionic", builds.get) == "static"
    assert first_that_runs(builds, None, builds.get) == "static"
    assert first_that_runs(["new"], None, builds.get) == "new"
    assert first_that_runs(["new"], "bionic", builds.get) is None
