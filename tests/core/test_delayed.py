"""Delayed gradients (B12): reduced once, when the caller says that they are written; and what each mistake is called."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from functional_fsdp.core.effects import PackGrads, ReduceGrads, ZeroGrads
from functional_fsdp.core.errors import GradientError
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.spec import ModelSpec, UnitSpec, model_spec
from functional_fsdp.core.transitions import finish_grad_sync
from functional_fsdp.testing.programs import Call, Player, backward, forward

from .scenarios import RECORDED, ROOT, A, B, iterate, model, step


def delayed_spec() -> ModelSpec:
    """Return a root and two layers, the first with delayed gradients."""
    units = [UnitSpec("root", None, 4, 16), UnitSpec("layers.0", ROOT, 8, 32, delayed_grads=True)]
    return model_spec([*units, UnitSpec("layers.1", ROOT, 8, 32)], RECORDED)


def reduced(player: Player) -> list[UnitId]:
    """Return the units of all reductions."""
    return [effect.unit for played in player.steps for effect in played.effects if isinstance(effect, ReduceGrads)]


@pytest.fixture
def player() -> Iterator[Player]:
    """A player inside an iteration, whose trace is right in the end."""
    player = Player(delayed_spec())
    player("begin_iteration", "train")
    yield player
    assert player.checker.errors == []


def play(player: Player, calls: tuple[Call, ...]) -> None:
    """Play some hooks."""
    for played in calls:
        player.play(played)


def fails(player: Player, text: str, hook: str, *args: object) -> None:
    """Check the whole text of an error, and that the state is as it was."""
    before = player.state
    with pytest.raises(GradientError, match=f"^{re.escape(text)}$"):
        player(hook, *args)
    assert player.state == before


def test_b12_reduced_once_when_the_caller_says_so(player: Player) -> None:
    """B12: two microbatches are reduced together when told, with what is missing; the others by their backward."""
    play(player, step(model(A, B), model(A, B)))
    assert A not in reduced(player)
    player("grads_written", A, missing=(1,))
    assert player.steps[-1].effects[-2:] == (PackGrads(A, 0, (1,)), ReduceGrads(A, 0, False))
    player("finish_grad_sync")
    player("end_iteration")
    assert reduced(player).count(A) == 1
    iterate(player, (*step(model(A, B), model(A, B)), Call("grads_written", (A,))))
    assert reduced(player).count(A) == 2


def test_b12_forgotten_is_named(player: Player) -> None:
    """B12: closing the order without being told names the unit and what to call."""
    play(player, step(model(A, B)))
    text = (
        "finish_grad_sync: expected no delayed gradients left to write, got those of unit 1 'layers.0'; "
        "call it.grads_written(module) after writing them."
    )
    with pytest.raises(GradientError, match=f"^{re.escape(text)}$"):
        # The player would tell.
        finish_grad_sync(player.spec, player.state)
    player("grads_written", A)
    player("finish_grad_sync")
    player("end_iteration")


DROPPED = "call it once, after the last; a forward whose output is dropped belongs in it.evaluate()."


def test_b12_told_too_early_or_twice(player: Player) -> None:
    """B12: before any backward, while one is to come, or again."""
    where = "grads_written(unit 1 'layers.0'): expected the unit's backwards to have run, got"
    fails(player, f"{where} none since the last call; {DROPPED}", "grads_written", A)
    play(player, (*forward(model(A)), *forward(model(A))))
    fails(player, f"{where} 2 to come; {DROPPED}", "grads_written", A)
    play(player, tuple(backward(model(A)))[:2])
    fails(player, f"{where} 2 to come; {DROPPED}", "grads_written", A)
    play(player, tuple(backward(model(A)))[2:])
    fails(player, f"{where} 1 to come; {DROPPED}", "grads_written", A)
    play(player, tuple(backward(model(A))))
    player("grads_written", A)
    fails(player, f"{where} none since the last call; {DROPPED}", "grads_written", A)


def test_b12_unit_that_is_not_declared(player: Player) -> None:
    """B12: a unit whose backward reduces is told so."""
    play(player, step(model(A, B)))
    text = (
        "grads_written(unit 2 'layers.1'): expected a unit with delayed gradients, got one whose backward reduces; "
        "name its module in fully_shard(..., delayed_grads=(module, ...)), or leave the call out."
    )
    fails(player, text, "grads_written", B)


def test_b12_without_a_backward_there_is_nothing_to_tell(player: Player) -> None:
    """B12: a unit that was not used gets zeros, one whose output was dropped takes part with zeros."""
    play(player, step(model(B)))
    player("finish_grad_sync")
    assert ZeroGrads(A) in player.steps[-1].effects
    player("end_iteration")
    iterate(player, (*forward(model(A, B)), *backward(model(B))))
    assert reduced(player).count(A) == 1


def test_b12_abort_forgets(player: Player) -> None:
    """B12: after an abort nothing waits to be written."""
    play(player, step(model(A, B)))
    player("abort_iteration")
    iterate(player, step(model(B)))
