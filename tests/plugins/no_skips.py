"""A pytest plugin that fails a run with a skipped test: in CI every test has what it needs, or says so by failing."""

from __future__ import annotations

import pytest

CATEGORIES = ("skipped", "xfailed")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return  # a worker of xdist: the run as a whole is judged by the one who hands out the tests
    skipped = [report for category in CATEGORIES for report in reporter.stats.get(category, [])]
    if skipped and exitstatus == pytest.ExitCode.OK:
        reporter.write_line(f"{len(skipped)} skipped: a failure in CI", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
