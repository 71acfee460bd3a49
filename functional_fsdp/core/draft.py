"""A running state while one hook works out the next."""

from functional_fsdp.core.effects import Effect
from functional_fsdp.core.errors import IterationError, unexpected
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.core.state import FsdpState, Running, Transition, UnitState


class Draft:
    """The fields of a running state, open to change until the hook that made it returns ``transition()``.

    It never leaves its hook, so a hook that raises has changed nothing.

    Alternatives considered: passing ``(running, live, effects)`` to each function and back makes a record for each
    change, and is longer and slower.
    """

    __slots__ = ("effects", "grads", "live", "orders", "recording", "spec", "walks", "window")

    def __init__(self, spec: ModelSpec, state: FsdpState, hook: str, unit: UnitId | None = None) -> None:
        running = state.iteration
        if unit is not None and not 0 <= unit < len(spec.units):
            spec.name(unit)
        if not isinstance(running, Running):
            where = hook if unit is None else f"{hook}({spec.name(unit)})"
            instead = "call it inside `with fsdp.iteration(state, key=...)`"
            raise IterationError(unexpected(where, "a running iteration", "none", instead))
        self.spec, self.orders, self.live = spec, state.orders, state.live
        self.window, self.walks = running.window, running.walks
        self.recording, self.grads = running.recording, running.grads
        self.effects: list[Effect] = []

    def index(self, unit: UnitId) -> int:
        """Return the unit's index in ``live``, -1 if it is resting."""
        for index, unit_state in enumerate(self.live):
            if unit_state.unit == unit:
                return index
        return -1

    def put(self, index: int, *unit_states: UnitState) -> None:
        """Put another state, or none, in the place of the one at ``index``."""
        self.live = (*self.live[:index], *unit_states, *self.live[index + 1 :])

    def transition(self) -> Transition:
        """Return the next state and the effects."""
        running = Running(self.window, self.walks, self.recording, self.grads)
        return Transition(FsdpState(self.orders, self.live, running), tuple(self.effects))
