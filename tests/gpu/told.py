# SPDX-License-Identifier: Apache-2.0
"""Prints each failure of pytest as it comes, for a run that is cut short prints no summary."""

from __future__ import annotations


def pytest_runtest_logreport(report):
    """Called where the reports of all workers come together."""
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)
