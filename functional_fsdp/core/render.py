"""Printing: one stable line per effect, and a trace of hooks with an arrow at a failing step."""

from collections.abc import Iterable
from typing import NamedTuple

from functional_fsdp.core.effects import Effect, OrderAfterUpdate, Report, Reset
from functional_fsdp.core.spec import ModelSpec


class Step(NamedTuple):
    """One hook of a trace: what was called, e.g. ``"pre_forward 0"``, and what it asked for."""

    hook: str
    effects: tuple[Effect, ...]


def render_effect(spec: ModelSpec, effect: Effect) -> str:
    """Return the effect's line with its unit's name, e.g. ``unshard 3 forward  # layers.3``."""
    if isinstance(effect, (OrderAfterUpdate, Report, Reset)):
        return str(effect)
    return f"{effect}  # {spec.units[effect.unit].name}"


def render_trace(spec: ModelSpec, steps: Iterable[Step], *, failed: int | None = None, why: str = "") -> str:
    """Return the trace as text: a line per hook, and its effects indented below.

    The step at index ``failed`` is marked with an arrow and followed by ``why``.
    """
    lines: list[str] = []
    for index, step in enumerate(steps):
        arrow = "-> " if index == failed else "   " if failed is not None else ""
        lines.append(f"{arrow}{step.hook}" + (f"   <- {why}" if index == failed and why else ""))
        lines.extend(f"{arrow and '   '}    {render_effect(spec, effect)}" for effect in step.effects)
    return "\n".join(lines)
