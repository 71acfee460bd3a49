"""Leave out what only a GPU can show where there is none."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``cuda`` on a machine without a GPU."""
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("cuda")]
    items[:] = [item for item in items if not item.get_closest_marker("cuda")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
