"""The ranks that the runtime tests stand on: any failure is reported, and the next case runs."""

from __future__ import annotations

import time

import pytest

from tests.runtime import cases_worlds as cases
from tests.runtime.ranks import Raised, Returned
from tests.runtime.worlds import Died, Hung, RanksFailed, World, Worlds


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_answers_and_torch_has_one_thread(worlds: Worlds, world_size: int) -> None:
    ranks = worlds(world_size)
    assert ranks.run(cases.sum_of_ranks, scale=10) == [10.0 * sum(range(world_size))] * world_size
    assert ranks.run(cases.num_threads) == [1] * world_size


def test_ranks_are_kept_between_cases(worlds: Worlds) -> None:
    ranks = worlds(2)
    assert ranks.run(cases.pid) == ranks.run(cases.pid) == ranks.world.pids()


def test_exception_text_of_every_rank_comes_back(worlds: Worlds) -> None:
    ranks = worlds(2)
    with pytest.raises(RanksFailed) as failure:
        ranks.run(cases.raise_on, ranks=(0, 1))
    for rank in range(2):
        assert f"rank {rank}: raised ValueError: planted on rank {rank}" in str(failure.value)
    assert "in raise_on" in str(failure.value)


def test_ranks_that_failed_are_started_again() -> None:
    world = World(1)
    try:
        assert isinstance(world.outcomes(30.0, cases.die_on, ranks=())[0], Returned)
        assert world.outcomes(30.0, cases.die_on, ranks=(0,)) == [Died(7)]
        raised = world.outcomes(30.0, cases.unpicklable)[0]
        assert isinstance(raised, Raised) and "pickle" in raised.text
        assert world.outcomes(30.0, cases.sum_of_ranks, scale=1) == [Returned(0.0)]
        assert world.num_starts == 3
    finally:
        world.close()
    assert world.pids() == []


def test_hung_rank_is_reported_with_its_stack(worlds: Worlds) -> None:
    first, second = worlds(2, limit_s=2.0).outcomes(cases.hang_on, ranks=(1,))
    assert first == Returned("fine")
    assert isinstance(second, Hung) and "in hang_on" in second.stack


def test_peer_of_a_rank_that_raised_does_not_take_the_whole_limit(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.runtime.worlds.PEER_GRACE_S", 0.5)
    ranks = worlds(2, limit_s=60.0)
    ranks.run(cases.sum_of_ranks, scale=1)
    began_s = time.monotonic()
    first, second = ranks.outcomes(cases.wait_for_peer_that_raises)
    assert time.monotonic() - began_s < 20.0
    assert isinstance(first, Raised) and first.text == "left the others alone"
    assert isinstance(second, (Hung, Raised))
