"""Take two training steps through the pure hooks: no torch, no GPU, no process group.

    python examples/transitions.py

Three units: a root and the two blocks inside it. The first iteration records the order of its uses and gathers on demand. The
second one replays that order: each gather is launched before its unit is asked for, while another one computes. The lines below
a hook are the effects it returns, which is all that the interpreter would do.
"""

from __future__ import annotations

from functools import partial

from functional_fsdp import FsdpState, PrefetchOrder, PrefetchPolicy, Transition, UnitId, UnitSpec, model_spec
from functional_fsdp.core.render import Step, render_trace
from functional_fsdp.core.transitions import (
    StillOpen,
    backward_end,
    begin_iteration,
    end_iteration,
    finish_grad_sync,
    post_backward,
    post_forward,
    pre_backward,
    pre_forward,
)

ROOT, FIRST, SECOND = UnitId(0), UnitId(1), UnitId(2)
SPEC = model_spec(
    [
        UnitSpec("gpt", parent=None, numel=64, nbytes=256),
        UnitSpec("gpt.blocks.0", parent=ROOT, numel=128, nbytes=512),
        UnitSpec("gpt.blocks.1", parent=ROOT, numel=128, nbytes=512),
    ],
    PrefetchPolicy(order=PrefetchOrder.RECORDED),
)
HOOKS: tuple[partial[Transition], ...] = (
    partial(begin_iteration, key="train"),
    partial(pre_forward, unit=ROOT),
    partial(pre_forward, unit=FIRST),
    partial(post_forward, unit=FIRST, has_backward=True),
    partial(pre_forward, unit=SECOND),
    partial(post_forward, unit=SECOND, has_backward=True),
    partial(post_forward, unit=ROOT, has_backward=True),
    partial(pre_backward, unit=ROOT, outermost=True),
    partial(pre_backward, unit=SECOND),
    partial(post_backward, unit=SECOND),
    partial(pre_backward, unit=FIRST),
    partial(post_backward, unit=FIRST),
    # The root's inputs want no gradient, so only the end of the backward pass closes its use.
    partial(backward_end, still_open=(StillOpen(ROOT),)),
    partial(finish_grad_sync),
    partial(end_iteration),
)


def run_iteration(state: FsdpState) -> tuple[FsdpState, list[Step]]:
    """Call the hooks of a training step; return the next state, and what each hook asked for."""
    steps = []
    for hook in HOOKS:
        state, effects = hook(SPEC, state)
        name = f"{hook.func.__name__} {hook.keywords.get('unit', '')}".rstrip()
        steps.append(Step(name, effects))
    return state, steps


def main() -> None:
    """Print both traces."""
    state, recorded = run_iteration(FsdpState())
    print("recorded\n" + render_trace(SPEC, recorded))
    _, replayed = run_iteration(state)
    print("\nreplayed\n" + render_trace(SPEC, replayed))


if __name__ == "__main__":
    main()
