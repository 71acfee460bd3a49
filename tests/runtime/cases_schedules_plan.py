"""What a lane's replay must gather, from its schedule alone: `formula` on the uses that the schedule spells out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from examples.schedules import Pass
from tests.runtime.cases_schedules_lane import Lane, PathStage, Setting
from tests.runtime.formula import Event, Plan, replay_plan, unit_numels
from tests.runtime.models import Block


def lane_numels(lane: Lane) -> dict[str, int]:
    """Return the elements of each unit's full storage, by its name in events: "0" is a root and "0.a" a block of it."""
    assert not lane.setting.nested
    roots = nn.ModuleList(lane.reference.model.get_submodule(f"list.{stage}") for stage in lane.setting.mine)
    return unit_numels(roots, (PathStage, Block), lane.world_size)


def unit_names(lane: Lane) -> list[str]:
    """Return the name of each unit in events."""
    return [str(root) + block for root in range(len(lane.roots)) for block in ("", ".a", ".b", ".c")]


def segments(setting: Setting) -> list[list[Event]]:
    """Return the uses between one host synchronisation and the next; lookahead does not cross that."""
    found: list[list[Event]] = [[]]
    for slot in setting.slots():
        for one in slot:
            if setting.host_sync and one.stage != (setting.num_stages - 1 if one.is_backward else 0):
                found.append([])
        found[-1] += _backward(setting, slot[0], slot[1:]) if slot[0].is_backward else _forward(setting, slot[0])
    return [segment for segment in found if segment]


def _forward(setting: Setting, one: Pass) -> list[Event]:
    root = str(setting.mine.index(one.stage))
    blocks = setting.path(one.microbatch).replace("|", "")
    inside = [Event(f"{root}.{name}", False, opens) for name in blocks for opens in (True, False)]
    return [Event(root, False, True), *inside, Event(root, False, False)]


def _backward(setting: Setting, one: Pass, inside: Sequence[Pass]) -> list[Event]:
    root = str(setting.mine.index(one.stage))
    events = [Event(root, True, True)]
    path = setting.path(one.microbatch)
    # The gradient at the bar opens the block before it, whose output it is of, and then comes the forward inside.
    before = path[path.index("|") - 1] if path.index("|") else ""
    blocks = path.replace("|", "")
    last = len(blocks) - 1 if not before else path.index("|") - 1
    for index, name in reversed(list(enumerate(blocks))):
        events.append(Event(f"{root}.{name}", True, True))
        if before and index == last:
            events += [event for forward in inside for event in _forward(setting, forward)]
        events.append(Event(f"{root}.{name}", True, False))
    if not before:
        events += [event for forward in inside for event in _forward(setting, forward)]
    return [*events, Event(root, True, False)]


def lane_plan(setting: Setting, numels: Mapping[str, int], itemsize: int = 8) -> Plan:
    """Return what a replay must do without a byte budget."""
    policy = setting.policy
    plans = [
        replay_plan(events, numels, itemsize, policy.forward_numel, policy.backward_numel)
        for events in segments(setting)
    ]
    gathers = tuple(unit for plan in plans for unit in plan.gathers)
    return Plan(gathers, sum(plan.num_on_demand for plan in plans), max(plan.peak_nbytes for plan in plans))


def reductions(setting: Setting) -> Counter[str]:
    """Return how often each unit's gradients are reduced: when no forward waits for its backward any more."""
    pending: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for event in (event for segment in segments(setting) for event in segment if not event.opens):
        pending[event.unit] += -1 if event.backward else 1
        found[event.unit] += event.backward and not pending[event.unit]
    return found


def late_units(setting: Setting, numels: Mapping[str, int], itemsize: int = 8) -> list[str]:
    """Return the units, in order of use, that lookahead of one successor may gather late under the byte budget.

    At the use before, the units that were open then left no room for it.
    """
    budget = setting.policy.max_unsharded_nbytes
    late: list[str] = []
    for events in segments(setting):
        open_uses = dict.fromkeys(numels, 0)
        held: set[str] | None = None
        for event in events:
            if event.opens:
                if held is None or (budget is not None and _nbytes({*held, event.unit}, numels, itemsize) > budget):
                    late.append(event.unit)
            open_uses[event.unit] += 1 if event.opens else -1
            if event.opens:
                held = {unit for unit, count in open_uses.items() if count}
    return late


def _nbytes(units: set[str], numels: Mapping[str, int], itemsize: int) -> int:
    return sum(numels[unit] for unit in units) * itemsize
