"""Options of the core's tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes the golden traces anew; read the diff."""
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write tests/core/golden anew (run it on tests/core)"
    )
