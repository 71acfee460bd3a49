"""Strategies when steps go wrong: rows A25, C1, and a unit used again after its outer reduction was launched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.runtime import cases_strategy_faults as cases
from tests.runtime.cases_peers import Told
from tests.runtime.cases_strategy_faults import Trouble
from tests.runtime.strategies import BF16, Setup
from tests.runtime.strategies_formula import ONE_AXIS, TWO_AXES
from tests.runtime.twins import REGISTRATION
from tests.runtime.worlds import Worlds

TIMEOUT_S = 3.0
SLACK_S = 12.0
"""For a machine that is busy with other things; a rank that hangs would take ten minutes."""


def test_c1_a_fault_in_the_last_backward_on_all_ranks(worlds: Worlds) -> None:
    setups = [Setup(strategy, num_micro=2) for strategy in (*ONE_AXIS, *TWO_AXES)]
    setups += [Setup(s, policy=REGISTRATION, num_micro=2, reduce_grads="last") for s in ("ddp", "zero1", "hsdp")]
    setups.append(Setup("hfsdp", dtype=torch.float32, optimizer="sgd", precision=BF16))
    worlds(4, limit_s=120.0).run(cases.fault_in_the_last_backward, setups)


@pytest.mark.filterwarnings("ignore")
def test_b9_a_unit_used_again_after_its_outer_reduction(worlds: Worlds) -> None:
    """A replay that goes on beyond its order reduces over the outer axis again, and adds."""
    setups = [Setup(strategy) for strategy in TWO_AXES]
    setups += [Setup(strategy, reduce_grads="last") for strategy in ("hsdp", "hfsdp")]
    numbers = (1, 1, 2, 2, 1)
    for counts in worlds(4, limit_s=120.0).run(cases.other_numbers_of_microbatches, setups, numbers):
        for setup, steps in zip(setups, counts, strict=True):
            again = [sum(count) > 3 for count in steps]
            # Only in the step that leaves its order is what was last not the last; fewer uses than expected are none.
            assert again == [False, False, True, False, False], (setup, steps)
            assert all(count in (1, 2) for step in steps for count in step), (setup, steps)


def check_told(answers: list[Told], *kinds: str) -> None:
    """Check that every rank was told, and soon."""
    for answer in answers:
        assert answer.kind in kinds and answer.seconds < TIMEOUT_S + SLACK_S, answer


@pytest.mark.parametrize("strategy", ["hfsdp", "zero1", "ddp"])
def test_a25_one_rank_leaves_a_replay(worlds: Worlds, strategy: str) -> None:
    trouble = Trouble(rank=3, path="ba", raises=False, at=2)
    setup = Setup(strategy, num_micro=2, peer_timeout_s=TIMEOUT_S)
    answers = worlds(4).run(cases.trouble_on_one_rank, setup, trouble)
    check_told(answers, "PeerMismatch")
    for answer in answers:
        for part in ("rank 3, iteration 3", "position 1 of", "expected FORWARD of unit 1 'a'"):
            assert part in answer.text, answer


@pytest.mark.parametrize(("strategy", "how"), [("hsdp", "each"), ("zero1", "last"), ("ddp", "last")])
def test_a25_one_rank_takes_another_branch_without_an_order(worlds: Worlds, strategy: str, how: str) -> None:
    trouble = Trouble(rank=3, path="a", raises=False, at=1)
    setup = Setup(strategy, policy=REGISTRATION, peer_timeout_s=TIMEOUT_S)
    setup = replace(setup, reduce_grads="last" if how == "last" else "each")
    answers = worlds(4).run(cases.trouble_on_one_rank, setup, trouble)
    check_told(answers, "PeerMismatch", "PeerFault")
    assert any("'b'" in answer.text or "# b" in answer.text for answer in answers), answers


@pytest.mark.parametrize("strategy", ["hsdp", "ddp"])
def test_c1_a_fault_on_one_rank(worlds: Worlds, strategy: str) -> None:
    trouble = Trouble(rank=1, path=None, raises=True, at=2)
    setup = Setup(strategy, num_micro=2, peer_timeout_s=TIMEOUT_S)
    answers = worlds(4).run(cases.trouble_on_one_rank, setup, trouble)
    assert answers[1].kind == "Planted"
    for rank in (0, 2, 3):
        check_told([answers[rank]], "PeerFault")
        assert "rank 1 at iteration 3 (key 'train') with Planted: in backward" in answers[rank].text, answers[rank]
