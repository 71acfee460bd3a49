"""Parameter groups: which parameters have optimizer options of their own, by name or by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from functional_fsdp.core.errors import unexpected
from functional_fsdp.optim.optimizer import check_group_name
from functional_fsdp.runtime.units import UnitModule

Members: TypeAlias = Callable[[str, nn.Parameter], bool] | Iterable[str]
"""What is in a group: a function of a parameter and its name, or patterns of names such as ``"*.bias"``."""

ParamGroups: TypeAlias = Mapping[str, Members]


def assign_groups(found: Sequence[UnitModule], param_groups: ParamGroups) -> tuple[UnitModule, ...]:
    """Return the units with ``group`` set where ``param_groups`` name a parameter; the rest stay in the nameless group.

    Names are those of the layout: a parameter bound in several places has that of the first. Frozen ones are asked for
    too, since they may train later.

    Raises:
        ValueError: a group's name or members are not as they should be, a member is no parameter, or a parameter is in
            two groups.
    """
    given: object = param_groups
    if not isinstance(given, Mapping):
        instead = "pass e.g. {'no_decay': ['*.bias']}"
        raise ValueError(unexpected("fully_shard: param_groups", "a dict by name", repr(given), instead))
    params = [pair for unit in found for pair in zip(unit.specs, unit.params, strict=True)]
    group_of: dict[str, str] = {}
    for group, members in param_groups.items():
        check_group_name("fully_shard: param_groups", group)
        where = f"fully_shard: param_groups[{group!r}]"
        named = [(spec.name, param) for spec, param in params]
        chosen = _asked(where, members, named) if callable(members) else _matched(where, members, named)
        for name in chosen:
            if name in group_of:
                got = f"{name!r}, which is in {group_of[name]!r} too"
                raise ValueError(
                    unexpected(where, "parameters that are in one group", got, "leave it out of the other")
                )
            group_of[name] = group
    return tuple(
        replace(unit, specs=tuple(replace(spec, group=group_of.get(spec.name, "")) for spec in unit.specs))
        for unit in found
    )


def _asked(
    where: str, belongs: Callable[[str, nn.Parameter], bool], named: Sequence[tuple[str, nn.Parameter]]
) -> list[str]:
    chosen = []
    for name, param in named:
        answer: object = belongs(name, param)
        if not isinstance(answer, bool):
            raise ValueError(unexpected(where, f"True or False for {name!r}", repr(answer), "return a bool"))
        if answer:
            chosen.append(name)
    if not chosen:
        expected, instead = "a function that returns True for some parameter", f"the names are {_some(named)}"
        raise ValueError(unexpected(where, expected, "True for none", instead))
    return chosen


def _matched(where: str, members: Iterable[str], named: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    given: object = members
    patterns: list[object] = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if isinstance(given, str) or not all(isinstance(pattern, str) for pattern in patterns):
        expected = "a function of name and parameter, or a list of patterns of names"
        raise ValueError(unexpected(where, expected, repr(given), "pass e.g. ['*.bias']"))
    unmatched = {str(pattern) for pattern in patterns}
    chosen = []
    for name, _ in named:
        matching = [str(pattern) for pattern in patterns if fnmatchcase(name, str(pattern))]
        unmatched.difference_update(matching)
        if matching:
            chosen.append(name)
    if unmatched or not chosen:
        got = ", ".join(map(repr, sorted(unmatched))) or "no pattern"
        raise ValueError(unexpected(where, "patterns that match parameters", got, f"the names are {_some(named)}"))
    return chosen


def _some(named: Sequence[tuple[str, nn.Parameter]]) -> str:
    names = [repr(name) for name, _ in named]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
