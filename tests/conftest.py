"""Options of the test session."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and none fails for the time that a busy machine takes.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs more than the suite's share of a large grid."""
    parser.addoption(
        "--full-grid", action="store_true", help="run the whole product of settings, not only a pairwise cover"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker."""
    config.addinivalue_line("markers", "full_grid: runs only with --full-grid")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `--full-grid` asks for."""
    if config.getoption("--full-grid"):
        return
    left_out = [item for item in items if item.get_closest_marker("full_grid")]
    items[:] = [item for item in items if not item.get_closest_marker("full_grid")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
