"""Every interleaving of a few microbatches, recorded and replayed with at most one fault anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from functional_fsdp.core import draft, transitions, walks
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec, ReducePolicy, UnitSpec, model_spec
from functional_fsdp.testing.programs import BrokenInvariant
from functional_fsdp.testing.search import Found, Search, microbatch

LARGE = 1 << 40


PLAIN, AT_LAST, OUTER = ReducePolicy(), ReducePolicy(at_last=True), ReducePolicy(has_outer=True)
BOTH = ReducePolicy(at_last=True, has_outer=True)


def chain_spec(kinds: Sequence[str], reduce: ReducePolicy, ahead: int | None, budget: int | None) -> ModelSpec:
    """Return units of four bytes, each a root, of kinds: plain, kept, refreshed, kept and refreshed, in place."""
    policy = PrefetchPolicy(PrefetchOrder.RECORDED, ahead, ahead, budget)
    units = [
        UnitSpec(f"layers.{i}", None, 1, 4 * (kind != "in place"), kept="kept" in kind, refreshes="refreshed" in kind)
        for i, kind in enumerate(kinds)
    ]
    return model_spec(units, policy, reduce)


def search(
    kinds: Sequence[str],
    num_microbatches: int,
    reduce: ReducePolicy = PLAIN,
    ahead: int | None = None,
    budget: int | None = None,
) -> Found:
    """Search so many microbatches of units of these kinds."""
    lane = microbatch([UnitId(unit) for unit in range(len(kinds))])
    return Search(chain_spec(kinds, reduce, ahead, budget), [lane] * num_microbatches).run()


@pytest.mark.parametrize(
    ("kinds", "num_microbatches", "reduce", "ahead", "budget", "num_states"),
    [
        (("refreshed", "plain"), 2, BOTH, None, None, 110_000),
        (("plain",), 3, OUTER, None, None, 10_000),
        (("kept",), 3, AT_LAST, None, None, 10_000),
        (("kept refreshed", "in place"), 1, BOTH, None, None, 100),
        (("plain",) * 3, 1, PLAIN, None, None, 700),
        (("plain",) * 3, 1, BOTH, LARGE, 8, 700),
        (("refreshed",) * 3, 1, OUTER, 0, 8, 700),
        (("kept", "plain", "refreshed"), 1, BOTH, LARGE, 12, 600),
        (("in place",) * 3, 1, OUTER, None, None, 600),
    ],
    ids=lambda value: value if isinstance(value, int) else str(value),
)
def test_every_interleaving_with_one_fault(
    capsys: pytest.CaptureFixture[str],
    kinds: Sequence[str],
    num_microbatches: int,
    reduce: ReducePolicy,
    ahead: int | None,
    budget: int | None,
    num_states: int,
) -> None:
    """Every invariant holds in every state; each kind of fault was planted; the count is printed."""
    found = search(kinds, num_microbatches, reduce, ahead, budget)
    with capsys.disabled():
        print(f"\n{kinds} x {num_microbatches} microbatches, {reduce}, ahead {ahead}, budget {budget}: {found}")
    assert found.num_states > num_states // 2
    # One microbatch has one order, which nothing but the other faults can leave; one unit has no other.
    idle = [name for name, count in found.num_faults if not count]
    assert idle == ([] if num_microbatches > 1 else ["divergence"])
    assert ("another unit" in dict(found.num_faults)) is (len(kinds) > 1)


def test_larger_searches(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of ``--search``; without it none."""
    for size in request.config.getoption("--search", default=[]):
        num_units, _, num_microbatches = size.partition("x")
        for ahead in (None, LARGE):
            for reduce in (PLAIN, BOTH):
                found = search(("plain",) * int(num_units), int(num_microbatches), reduce, ahead)
                with capsys.disabled():
                    print(f"\n{size}, {reduce}, ahead {ahead}: {found}")


def test_the_search_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that forgets promises is found, with the hooks that lead to it."""
    for module in (draft, transitions):
        monkeypatch.setattr(module, "is_promised", lambda draft, unit: False)
    with pytest.raises(BrokenInvariant, match="T4: promised but resting(.|\n)*begin_iteration train\n"):
        search(("plain",) * 2, 1)


def test_a_fault_after_a_divergence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A divergence that keeps what it had gathered is found in a replay."""
    monkeypatch.setattr(walks, "release", lambda draft, keep=None: None)
    with pytest.raises(BrokenInvariant, match="T6: neither open nor promised"):
        search(("plain",) * 2, 1)
