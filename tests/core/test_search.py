"""Every interleaving of a few microbatches, recorded and replayed with at most one fault anywhere."""

from __future__ import annotations

import pytest

from functional_fsdp.core import draft, transitions, walks
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec, UnitSpec, model_spec
from functional_fsdp.testing.programs import BrokenInvariant
from functional_fsdp.testing.search import Found, Search, microbatch

LARGE = 1 << 40


def chain_spec(num_units: int, ahead: int | None = None, budget: int | None = None) -> ModelSpec:
    """Return equal units, each a root of four bytes."""
    policy = PrefetchPolicy(PrefetchOrder.RECORDED, ahead, ahead, budget)
    return model_spec([UnitSpec(f"layers.{unit}", None, 1, 4) for unit in range(num_units)], policy)


def search(num_units: int, num_microbatches: int, ahead: int | None = None, budget: int | None = None) -> Found:
    """Search so many microbatches of so many units."""
    lane = microbatch([UnitId(unit) for unit in range(num_units)])
    return Search(chain_spec(num_units, ahead, budget), [lane] * num_microbatches).run()


@pytest.mark.parametrize(
    ("num_units", "num_microbatches", "ahead", "budget"),
    [(2, 2, None, None), (3, 1, None, None), (3, 1, LARGE, 8), (3, 1, 0, 8)],
)
def test_every_interleaving_with_one_fault(
    capsys: pytest.CaptureFixture[str], num_units: int, num_microbatches: int, ahead: int | None, budget: int | None
) -> None:
    """Every invariant holds in every state; each kind of fault was planted; the count is printed."""
    found = search(num_units, num_microbatches, ahead, budget)
    with capsys.disabled():
        print(f"\n{num_units} units x {num_microbatches} microbatches, ahead {ahead}, budget {budget}: {found}")
    assert found.num_states > (100_000 if num_microbatches == 2 else 800) // 2
    # One microbatch has one order, which nothing but the other faults can leave.
    idle = [name for name, count in found.num_faults if not count]
    assert idle == ([] if num_microbatches > 1 else ["divergence"])


def test_larger_searches(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of ``--search``; without it none."""
    for size in request.config.getoption("--search", default=[]):
        num_units, _, num_microbatches = size.partition("x")
        for ahead in (None, LARGE):
            found = search(int(num_units), int(num_microbatches), ahead)
            with capsys.disabled():
                print(f"\n{size}, ahead {ahead}: {found}")


def test_the_search_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that forgets promises is found, with the hooks that lead to it."""
    for module in (draft, transitions):
        monkeypatch.setattr(module, "is_promised", lambda draft, unit: False)
    with pytest.raises(BrokenInvariant, match="T4: promised but resting(.|\n)*begin_iteration train\n"):
        search(2, 1)


def test_a_fault_after_a_divergence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A divergence that keeps what it had gathered is found in a replay."""
    monkeypatch.setattr(walks, "release", lambda draft, keep=None: None)
    with pytest.raises(BrokenInvariant, match="T6: neither open nor promised"):
        search(2, 1)
