"""Fixtures for the tests that run on gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.worlds import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Ranks by world size, `worlds(2).run(case, ...)`; started once and killed at the end."""
    made = Worlds()
    yield made
    made.close()
