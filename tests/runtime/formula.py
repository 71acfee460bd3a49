"""What lookahead must gather, and how much may be live: computed anew from the words of DESIGN.md.

This is the oracle for counts and peaks, so it shares no code with the package and knows only:
a use opens after its own gather; then successors are promised while the elements taken so far are
below the budget; a unit is released when no use of it is open and it is not promised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

ALIGNMENT_NUMEL = 4
"""Elements to which each rank's start is aligned."""


@dataclass(frozen=True, slots=True)
class Event:
    """A use of a unit opens or closes; `backward` says in which phase."""

    unit: str
    backward: bool
    opens: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What a replay must do.

    Attributes:
        gathers: units in the order in which their gathers are launched.
        num_on_demand: gathers launched by the use that needs them.
        peak_nbytes: bytes of the largest set of open and promised units.
    """

    gathers: tuple[str, ...]
    num_on_demand: int
    peak_nbytes: int


def chain_events(path: str, root: str = "") -> list[Event]:
    """Return what happens in one iteration of a root that runs its blocks one after the other."""
    forward = [Event(name, False, opens) for name in path for opens in (True, False)]
    backward = [Event(name, True, opens) for name in reversed(path) for opens in (True, False)]
    events = [Event(root, False, True), *forward, Event(root, False, False)]
    return [*events, Event(root, True, True), *backward, Event(root, True, False)]


def replay_plan(
    events: Sequence[Event],
    numels: Mapping[str, int],
    itemsize: int,
    forward_numel: int | None,
    backward_numel: int | None,
) -> Plan:
    """Follow a replay of `events`, which were recorded before.

    Args:
        events: in order; every use that opens is an item of the order.
        numels: of each unit's full storage, padding included.
        itemsize: bytes of an element.
        forward_numel: element budget of forward uses; None is one successor.
        backward_numel: the same for backward uses.
    """
    order = [event for event in events if event.opens]
    resident: set[str] = set()
    open_uses: dict[str, int] = dict.fromkeys(numels, 0)
    gathers, num_on_demand, peak_nbytes = [], 0, 0
    used = passed = 0
    for event in events:
        if event.opens:
            if event.unit not in resident:
                gathers.append(event.unit)
                resident.add(event.unit)
                num_on_demand += 1
            open_uses[event.unit] += 1
            used += 1
            passed = max(passed, used)
            budget = backward_numel if event.backward else forward_numel
            while passed < len(order):
                taken = [numels[item.unit] for item in order[used:passed]]
                if taken if budget is None else sum(taken) >= budget:
                    break
                successor = order[passed].unit
                if successor not in resident:
                    gathers.append(successor)
                    resident.add(successor)
                passed += 1
        else:
            open_uses[event.unit] -= 1
            promised = {item.unit for item in order[used:passed]}
            if not open_uses[event.unit] and event.unit not in promised:
                resident.discard(event.unit)
        peak_nbytes = max(peak_nbytes, sum(numels[unit] for unit in resident) * itemsize)
    return Plan(tuple(gathers), num_on_demand, peak_nbytes)


def padded_numel(numel: int, world_size: int) -> int:
    """Return the elements of a flat storage whose ranks all start aligned."""
    stride = world_size * ALIGNMENT_NUMEL
    return -(-numel // stride) * stride


def unit_numels(model: nn.Module, units: tuple[type[nn.Module], ...], world_size: int) -> dict[str, int]:
    """Return the elements of each unit's full storage by module path, the root's under "".

    For models whose parameters have one dtype and all train. A parameter counts for the innermost
    unit around it.
    """
    owners = [name for name, module in model.named_modules() if isinstance(module, units)]
    numels = dict.fromkeys(["", *owners], 0)
    for name, parameter in model.named_parameters():
        inside = [owner for owner in owners if name.startswith(f"{owner}.")]
        numels[max(inside, key=len, default="")] += parameter.numel()
    return {name: padded_numel(numel, world_size) for name, numel in numels.items()}
