"""Counts of many units can be printed, compared and changed."""

from __future__ import annotations

import pickle

from functional_fsdp.core.state import Counts


def test_counts_of_many_units_print_compare_and_pickle() -> None:
    counts = Counts()
    for unit in range(5_000):
        counts = counts.add(unit, 1)
    assert repr(counts).startswith("Counts(0: 1, 1: 1, ")
    assert pickle.loads(pickle.dumps(counts)) == counts
    assert counts.add(7, 1).add(7, -1) == counts
    assert repr(Counts().add(3, 2)) == "Counts(3: 2)"
