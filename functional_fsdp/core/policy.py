"""What to prefetch and how much may be live: set once, never changed by a hook."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

from functional_fsdp.core.errors import unexpected
from functional_fsdp.core.ids import Phase

OnDivergence: TypeAlias = Literal["continue", "raise"]


class PrefetchOrder(Enum):
    """Which order lookahead follows: that of the modules, or what a key's first successful iteration recorded."""

    REGISTRATION = "registration"
    RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """How far ahead to gather; a negative budget or an unknown choice is a ``ValueError``.

    Successors of a use, resident or not, are taken while the sum of their elements so far is below the budget, so the
    last may overshoot. ``None`` takes one successor, 0 none. ``backward_numel`` holds for RECOMPUTE uses too.
    ``max_unsharded_nbytes`` bounds all live unsharded storage, what is demanded included. ``on_divergence``: whether a
    replay that leaves its order is reported and goes on, or raises.
    """

    order: PrefetchOrder = PrefetchOrder.REGISTRATION
    forward_numel: int | None = None
    backward_numel: int | None = None
    max_unsharded_nbytes: int | None = None
    on_divergence: OnDivergence = "continue"

    def __post_init__(self) -> None:
        self._check("order", isinstance(self.order, PrefetchOrder), "a PrefetchOrder", "pass one of its two members")
        instead = "0 takes no successor, None means one successor (or no bound on bytes)"
        for name in ("forward_numel", "backward_numel", "max_unsharded_nbytes"):
            value = getattr(self, name)
            is_budget = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
            self._check(name, is_budget, "None or an int of at least 0", instead)
        is_known = self.on_divergence in ("continue", "raise")
        self._check("on_divergence", is_known, "'continue' or 'raise'", "choose to report a divergence or to raise")

    def _check(self, name: str, is_right: bool, expected: str, instead: str) -> None:
        if not is_right:
            raise ValueError(unexpected(f"PrefetchPolicy.{name}", expected, repr(getattr(self, name)), instead))

    def budget(self, phase: Phase) -> int:
        """Return the element budget of a use; one successor is one element, since a unit with weights has one."""
        numel = self.forward_numel if phase is Phase.FORWARD else self.backward_numel
        return 1 if numel is None else numel
