"""Options of the core's tests; give them with ``tests/core`` on the command line."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes the golden traces anew; read the diff."""
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write tests/core/golden anew (run it on tests/core)"
    )
    parser.addoption("--programs", type=int, default=500, help="random programs for several ranks to play")
    parser.addoption(
        "--search", nargs="*", default=[], metavar="UNITSxMICROBATCHES", help="larger searches to run too, e.g. 2x3"
    )
