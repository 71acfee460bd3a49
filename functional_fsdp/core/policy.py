"""What to prefetch and how much may be live: set once, never changed by a hook."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

from functional_fsdp.core.ids import Phase

OnDivergence: TypeAlias = Literal["continue", "raise"]


class PrefetchOrder(Enum):
    """Which order lookahead follows."""

    REGISTRATION = "registration"
    """Depth-first order of units in forward, children reversed in backward; nothing is recorded."""
    RECORDED = "recorded"
    """A key's first successful iteration records its uses; later ones replay them."""


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """How far ahead to gather.

    A budget of elements bounds the successors of a use: they are taken while the sum of their
    elements so far is below it, so that the first is always taken and the last may overshoot. A
    resident successor counts like any other. ``None`` takes one successor, 0 takes none.

    Attributes:
        order: which order lookahead follows.
        forward_numel: budget of a FORWARD use, in elements.
        backward_numel: budget of a BACKWARD or RECOMPUTE use, in elements.
        max_unsharded_nbytes: bound on all live unsharded storage, what is demanded included.
        on_divergence: report a replay that leaves its order and go on, or raise.

    Raises:
        ValueError: a budget is negative, or ``on_divergence`` is neither of its two values.
    """

    order: PrefetchOrder = PrefetchOrder.REGISTRATION
    forward_numel: int | None = None
    backward_numel: int | None = None
    max_unsharded_nbytes: int | None = None
    on_divergence: OnDivergence = "continue"

    def __post_init__(self) -> None:
        if not isinstance(self.order, PrefetchOrder):
            raise ValueError(
                f"PrefetchPolicy.order: expected a PrefetchOrder, got {self.order!r}; "
                "pass PrefetchOrder.REGISTRATION or PrefetchOrder.RECORDED."
            )
        for name in ("forward_numel", "backward_numel", "max_unsharded_nbytes"):
            _check_budget(name, getattr(self, name))
        if self.on_divergence not in ("continue", "raise"):
            raise ValueError(
                f"PrefetchPolicy.on_divergence: expected 'continue' or 'raise', got {self.on_divergence!r}."
            )

    def budget(self, phase: Phase) -> int:
        """Return the element budget of a use of ``phase``.

        One successor is the budget of one element: the first successor is taken while the sum is
        0, the next is not, since every unit with weights has at least one element.
        """
        numel = self.forward_numel if phase is Phase.FORWARD else self.backward_numel
        return 1 if numel is None else numel


def _check_budget(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(
            f"PrefetchPolicy.{name}: expected None or an int of at least 0, got {value!r}; "
            "0 takes no successor, None means one successor (or no bound on bytes)."
        )
