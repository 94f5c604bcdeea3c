"""The table of clients at the end of `make test-agents`."""

from __future__ import annotations

import pytest
from agents import report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print it where a session was run."""
    ran = [one for found in ("passed", "failed") for one in terminalreporter.stats.get(found, [])]
    if any("test_a_scripted_session" in one.nodeid for one in ran):
        terminalreporter.write_line(report.table())
