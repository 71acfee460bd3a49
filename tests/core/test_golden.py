"""Golden traces: one text file per scenario, written by `pytest tests/core --rewrite-golden`; read the diff."""

from __future__ import annotations

from pathlib import Path

import pytest

from functional_fsdp.core.effects import Reset
from functional_fsdp.core.render import render_trace
from functional_fsdp.core.state import FsdpState, Running
from functional_fsdp.core.transitions import abort_iteration
from functional_fsdp.testing.programs import Player
from functional_fsdp.testing.table import EffectTable

from .scenarios import SCENARIOS

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", SCENARIOS)
def test_golden_trace(name: str, request: pytest.FixtureRequest) -> None:
    """The trace is the one in the file, and the player has checked every hook of it."""
    player = SCENARIOS[name]()
    text = f"{(SCENARIOS[name].__doc__ or '').strip()}\n\n{render_trace(player.spec, player.steps)}\n"
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--rewrite-golden", default=False):
        path.write_text(text)
    assert path.read_text() == text, f"read the diff after `pytest tests/core --rewrite-golden`: {path.name}"
    assert player.checker.errors == []
    assert player.state.live == ()


def test_golden_directory_has_no_strays() -> None:
    """Every file has a scenario."""
    assert {path.stem for path in GOLDEN.iterdir()} == set(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_c13_reset_after_any_prefix_leaves_nothing(name: str) -> None:
    """C13: cut each trace at every effect and reset: the table is empty, and a second reset changes nothing."""
    player = SCENARIOS[name]()
    effects = [effect for step in player.steps for effect in step.effects]
    for cut in range(len(effects) + 1):
        table = EffectTable(player.spec)
        assert [line for effect in effects[:cut] for line in table.apply(effect)] == []
        for _ in range(2):
            assert list(table.apply(Reset())) == []
            assert table.is_empty and not table.grads.main_grads and not table.refreshed and not table.ordered


@pytest.mark.parametrize("name", SCENARIOS)
def test_c13_abort_at_any_hook_gives_back_the_state_before(name: str) -> None:
    """C13: abort each trace at every hook: the orders are as before the iteration, which can then be played again."""
    player = SCENARIOS[name]()
    begin = 0
    for position, state in enumerate(player.states):
        begin = begin if isinstance(state.iteration, Running) else position
        before = player.states[begin]
        after, effects = abort_iteration(player.spec, state)
        assert after == FsdpState(before.orders)
        assert effects == (Reset(),)
        again = Player(player.spec)
        again.state = after
        for played in player.calls[begin:]:
            again.play(played)
            if not isinstance(again.state.iteration, Running):
                break
        assert again.states[-1] == player.states[begin + len(again.states) - 1]
