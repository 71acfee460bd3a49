"""Fixtures for the tests that run on gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.runtime.worlds import Worlds

# It has an extra of its own, since it is large: `pip install -e ".[test,hf]"`.
collect_ignore = [] if find_spec("transformers") else ["test_transformers.py"]


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Ranks by world size, `worlds(2).run(case, ...)`; started once and killed at the end."""
    made = Worlds()
    yield made
    made.close()
