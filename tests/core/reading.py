"""Reading what a player played: orders, reports, gathers, cursors."""

from __future__ import annotations

from functional_fsdp.core.effects import Install, Report, Unshard
from functional_fsdp.core.ids import Item, Phase, UnitId, Use
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.state import Running
from functional_fsdp.testing.programs import Player

THREE = (4, 8, 8, 8)
POLICIES = [PrefetchPolicy(order, n, n) for order in PrefetchOrder for n in (None, 0, 9, 1000)]


def learned(player: Player, key: str = "train") -> tuple[Item, ...]:
    """Return the items that a key has learned."""
    (order,) = [stored.committed for stored in player.state.orders if stored.key == key]
    assert order is not None
    return order.items


def reports(player: Player, begin: int = 0) -> list[str]:
    """Return the texts of the reports since a step."""
    effects = [effect for step in player.steps[begin:] for effect in step.effects]
    return [effect.message for effect in effects if isinstance(effect, Report)]


def gathers(player: Player, begin: int = 0) -> list[tuple[UnitId, Phase]]:
    """Return what was gathered since a step."""
    effects = [effect for step in player.steps[begin:] for effect in step.effects]
    return [(effect.unit, effect.phase) for effect in effects if isinstance(effect, Unshard)]


def on_demand(player: Player, begin: int = 0) -> int:
    """Return how many gathers were launched in the hook that needed them, since a step."""
    count = 0
    for played in player.steps[begin:]:
        installed = {effect.unit for effect in played.effects if isinstance(effect, Install)}
        count += sum(isinstance(effect, Unshard) and effect.unit in installed for effect in played.effects)
    return count


def use(unit: UnitId, phase: Phase = Phase.FORWARD) -> Use:
    """Return a use."""
    return Use(unit, phase)


def cursors(player: Player) -> list[tuple[int, int]]:
    """Return the cursors of the running iteration's walks."""
    assert isinstance(player.state.iteration, Running)
    return [(walk.execution_cursor, walk.prefetch_cursor) for walk in player.state.iteration.walks]
