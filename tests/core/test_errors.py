"""Every error of the core by its text, and that what raises has changed nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from functional_fsdp.core.errors import (
    ByteBudgetError,
    DivergenceError,
    FsdpError,
    GradientError,
    HookOrderError,
    IterationError,
    unexpected,
)
from functional_fsdp.core.gradients import outstanding_grads
from functional_fsdp.core.ids import Phase, UnitId, check_key
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import UnitSpec, model_spec
from functional_fsdp.core.state import FsdpState, Running
from functional_fsdp.core.transitions import close_use, finish_grad_sync, open_use
from functional_fsdp.testing.programs import Node, Player, backward, forward, small_spec

from .scenarios import A, B, iterate, model, step

ROOT = UnitId(0)


def playing(*calls: tuple[str, *tuple[object, ...]], policy: PrefetchPolicy = PrefetchPolicy()) -> Player:
    """Return a player inside an iteration, after some hooks."""
    player = Player(small_spec((4, 8, 8), policy, frozen=1))
    player("begin_iteration", "train")
    for hook, *args in calls:
        facts = {"has_backward": True} if hook == "post_forward" else {}
        player(hook, *args, **facts)
    return player


def fails(player: Player, error: type[Exception], text: str, hook: str, *args: object, **facts: object) -> None:
    """Check the whole text of an error, and that the state is as it was."""
    before = player.state
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        player(hook, *args, **facts)
    assert player.state == before
    assert issubclass(error, (FsdpError, ValueError))


NO_ITERATION = "expected a running iteration, got none; call it inside `with fsdp.iteration(state, key=...)`."


@pytest.mark.parametrize(
    ("where", "hook", "args", "facts"),
    [
        ("open_use(unit 1 'layers.0')", "pre_forward", (A,), {}),
        ("open_use(unit 1 'layers.0')", "pre_backward", (A,), {}),
        ("open_use(unit 1 'layers.0')", "pre_recompute", (A,), {}),
        ("close_use(unit 1 'layers.0')", "post_forward", (A,), {"has_backward": True}),
        ("close_use(unit 1 'layers.0')", "post_recompute", (A,), {}),
        ("close_use(unit 1 'layers.0')", "post_backward", (A,), {}),
        ("close_use(unit 1 'layers.0')", "backward_end", (((A, ()),),), {}),
        ("grads_complete(unit 1 'layers.0')", "grads_complete", (A,), {}),
        ("boundary 'send'", "boundary", ("send",), {}),
        ("finish_grad_sync", "finish_grad_sync", (), {}),
        ("end_iteration", "end_iteration", (), {}),
    ],
)
def test_hook_outside_an_iteration(where: str, hook: str, args: tuple[object, ...], facts: dict[str, object]) -> None:
    """Every hook but those that enter and abort needs a running iteration."""
    player = Player(small_spec((4, 8)))
    fails(player, IterationError, f"{where}: {NO_ITERATION}", hook, *args, **facts)


def test_backward_end_with_nothing_open_is_allowed_outside() -> None:
    """Autograd's final callback may come after an abort."""
    player = Player(small_spec((4, 8)))
    player("backward_end", ())
    player("abort_iteration")


@pytest.mark.parametrize("unit", [3, -1, 100])
@pytest.mark.parametrize("hook", ["pre_forward", "post_recompute", "pre_backward", "post_backward", "grads_complete"])
def test_unit_out_of_range(unit: int, hook: str) -> None:
    """A unit id that is none names the number of units, inside an iteration and outside."""
    text = f"unit: expected an id below 3, the number of units, got {unit}; pass the position of its UnitSpec."
    fails(playing(), HookOrderError, text, hook, unit)
    fails(Player(small_spec((4, 8, 8))), HookOrderError, text, hook, unit)


@pytest.mark.parametrize("phase", Phase)
def test_close_without_open(phase: Phase) -> None:
    """A use of another phase does not count."""
    player = playing(*[("open_use", A, other) for other in Phase if other is not phase])
    name = f"{phase.value}(unit 1 'layers.0')"
    text = f"post_{name}: expected an open {phase.name} use, got none; call pre_{name} first."
    fails(player, HookOrderError, text, "close_use", A, phase)
    fails(player, HookOrderError, text.replace("1 'layers.0'", "2 'layers.1'"), "close_use", B, phase)


def test_iteration_errors() -> None:
    """Another key inside, and no key outside."""
    text = (
        "begin_iteration(key='eval'): expected the running iteration's key 'train' or none, got another; "
        "end that iteration, or join it."
    )
    fails(playing(), IterationError, text, "begin_iteration", "eval")
    text = (
        "begin_iteration: expected a key, since no iteration is running to join, got None; "
        'name the schedule, e.g. key="train".'
    )
    fails(Player(small_spec((4,))), IterationError, text, "begin_iteration", None)


@pytest.mark.parametrize(
    "key", [True, None, 1.5, b"train", ["train"], ("train", True), ("a", ("b", None)), frozenset()]
)
def test_key_of_another_type(key: object) -> None:
    """A key is a str, an int or a tuple of them, to any depth."""
    wrong = key
    while isinstance(wrong, tuple):
        wrong = wrong[-1]
    text = (
        f"key: expected a str, an int or a tuple of them, got {type(wrong).__name__} {wrong!r}; "
        'name the schedule, e.g. key="train" or key=("train", 4).'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        check_key(key)
    if key is not None:
        fails(Player(small_spec((4,))), ValueError, text, "begin_iteration", key)
        fails(playing(), ValueError, text, "begin_iteration", key)


def test_keys_that_are_allowed() -> None:
    """They come back as they are."""
    for key in ("train", 0, -3, (), ("train", 4), ("a", ("b", 1), 2)):
        assert check_key(key) == key


def test_use_open_at_the_end() -> None:
    """Closing an order needs that nothing is open."""
    for phase in (Phase.FORWARD, Phase.RECOMPUTE):
        for hook in ("finish_grad_sync", "end_iteration"):
            text = (
                f"{hook}: expected no open use, got {phase.name} of unit 1 'layers.0'; "
                "call it after the forward or backward ends."
            )
            fails(playing(("open_use", A, phase)), HookOrderError, text, hook)


def test_gradient_errors() -> None:
    """Gradients that are outstanding, of frozen units, while backward is open, or too late."""
    waiting = playing(("pre_forward", B), ("post_forward", B))
    text = (
        "finish_grad_sync: expected no outstanding gradients, got those of unit 2 'layers.1'; "
        "call grads_complete for each of outstanding_grads."
    )
    with pytest.raises(GradientError, match=f"^{re.escape(text)}$"):
        finish_grad_sync(waiting.spec, waiting.state)
    where = "grads_complete(unit 1 'layers.0')"
    text = f"{where}: expected a unit that trains, got a frozen one; call it only for units in outstanding_grads."
    fails(waiting, GradientError, text, "grads_complete", A)
    text = "grads_complete(unit 2 'layers.1'): expected no open BACKWARD use, got one; call post_backward first."
    fails(playing(("pre_backward", B)), HookOrderError, text, "grads_complete", B)
    text = (
        "end_iteration: expected gradients to be synchronised, got a backward without finish_grad_sync; "
        "call it before the iteration ends."
    )
    fails(playing(("pre_backward", B), ("post_backward", B)), GradientError, text, "end_iteration")
    fails(playing(("grads_complete", B)), GradientError, text, "end_iteration")


def test_gradient_after_the_order_is_closed() -> None:
    """A backward of a unit that trains would be lost; that of a frozen one, and a forward, are on demand."""
    player = playing(("pre_forward", B), ("post_forward", B), ("finish_grad_sync",))
    rest = (
        "(unit 2 'layers.1'): expected no gradients after finish_grad_sync, got more; "
        "run every backward before it, or in the next iteration."
    )
    fails(player, GradientError, f"open_use{rest}", "pre_backward", B)
    fails(player, GradientError, f"grads_complete{rest}", "grads_complete", B)
    for hook in ("pre_backward", "post_backward"):
        player(hook, A)
    for played in forward(Node(B)):
        player.play(played)
    assert isinstance(player.state.iteration, Running)
    assert outstanding_grads(player.spec, player.state.iteration.grads) == (), "no backward of it can come"
    player("finish_grad_sync")
    player("end_iteration")


def test_divergence_raises_if_the_policy_says_so() -> None:
    """A changed, an extra and a missing item each name key, position, expected and observed."""
    policy = PrefetchPolicy(PrefetchOrder.RECORDED, on_divergence="raise")
    player = Player(small_spec((4, 8, 8), policy))
    iterate(player, step(model(A)), key=("train", 2))
    player("begin_iteration", ("train", 2))
    player("pre_forward", ROOT)
    rest = "run the recorded schedule, or begin with rerecord=True or another key."
    text = (
        "key ('train', 2), position 1 of 4: expected FORWARD of unit 1 'layers.0', "
        f"observed FORWARD of unit 2 'layers.1', which had come 0 times; {rest}"
    )
    fails(player, DivergenceError, text, "pre_forward", B)
    fails(player, DivergenceError, text.replace("FORWARD of unit 2", "BACKWARD of unit 2"), "pre_backward", B)
    text = (
        "key ('train', 2), position 1 of 4: expected FORWARD of unit 1 'layers.0', "
        f"observed boundary 'send' host_sync, which had come 0 times; {rest}"
    )
    fails(player, DivergenceError, text, "boundary", "send", host_sync=True)
    player("post_forward", ROOT, has_backward=False)
    text = (
        "key ('train', 2), position 1 of 4: expected FORWARD of unit 1 'layers.0', "
        f"got the end of the iteration (incomplete); {rest}"
    )
    fails(player, DivergenceError, text, "finish_grad_sync")
    fails(player, DivergenceError, text, "end_iteration")
    player("abort_iteration")
    player("begin_iteration", ("train", 2))
    for played in step(model(A)):
        player.play(played)
    text = (
        "key ('train', 2), position 4 of 4: expected the end of the iteration, "
        f"observed FORWARD of unit 0 'root', which had come 1 times; {rest}"
    )
    fails(player, DivergenceError, text, "pre_forward", ROOT)


def test_byte_budget_that_the_open_units_exceed() -> None:
    """The message says how much is needed; nothing was launched."""
    policy = PrefetchPolicy(max_unsharded_nbytes=64)
    player = playing(("pre_forward", ROOT), ("pre_forward", A), policy=policy)
    text = (
        "open_use(unit 2 'layers.1'): expected the open units to fit max_unsharded_nbytes=64, got 80 bytes with "
        "unit 0 'root', unit 1 'layers.0' open; raise the budget to at least 80."
    )
    fails(player, ByteBudgetError, text, "pre_forward", B)
    fails(player, ByteBudgetError, text, "pre_forward", B, evaluating=True)


def bad_parent() -> object:
    """Make a spec whose child comes first."""
    return model_spec([UnitSpec("a", UnitId(1), 4, 16), UnitSpec("b", None, 4, 16)])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: model_spec([]), "model_spec: expected at least one unit, got none; pass a root module."),
        (bad_parent, "model_spec: unit 0 'a': expected a parent before it, got parent 1; list the units depth-first."),
        (
            lambda: model_spec([UnitSpec("a", None, -4, 16)]),
            "model_spec: unit 0 'a': expected sizes of at least 0, and no bytes without elements, got -4 elements "
            "and 16 bytes; give those of the full storage.",
        ),
        (
            lambda: model_spec([UnitSpec("a", None, 0, 16)]),
            "model_spec: unit 0 'a': expected sizes of at least 0, and no bytes without elements, got 0 elements "
            "and 16 bytes; give those of the full storage.",
        ),
        (
            lambda: model_spec([UnitSpec("a", None, 4, 16)], PrefetchPolicy(max_unsharded_nbytes=15)),
            "model_spec: unit 0 'a': expected at most max_unsharded_nbytes=15, got 16 bytes; "
            "raise the budget or split the unit.",
        ),
        (
            lambda: PrefetchPolicy(order="recorded"),  # type: ignore[arg-type]
            "PrefetchPolicy.order: expected a PrefetchOrder, got 'recorded'; pass one of its two members.",
        ),
        (
            lambda: PrefetchPolicy(on_divergence="stop"),  # type: ignore[arg-type]
            "PrefetchPolicy.on_divergence: expected 'continue' or 'raise', got 'stop'; "
            "choose to report a divergence or to raise.",
        ),
    ],
)
def test_configuration_errors(make: Callable[[], object], text: str) -> None:
    """They are ValueErrors."""
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        make()


@pytest.mark.parametrize("value", [-1, 1.5, True, "all"])
@pytest.mark.parametrize("name", ["forward_numel", "backward_numel", "max_unsharded_nbytes"])
def test_a14_wrong_budget_is_rejected_by_name(name: str, value: object) -> None:
    """A14: a budget that is negative or no int."""
    text = (
        f"PrefetchPolicy.{name}: expected None or an int of at least 0, got {value!r}; "
        "0 takes no successor, None means one successor (or no bound on bytes)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        PrefetchPolicy(**{name: value})  # type: ignore[arg-type]


def test_words_of_every_message() -> None:
    """Where, expected, got, what to do."""
    assert unexpected("here", "this", "that", "do so") == "here: expected this, got that; do so."


def test_a_hook_that_raises_has_changed_nothing() -> None:
    """The same state can be used again, with the same answer."""
    spec = small_spec((4, 8), PrefetchPolicy(max_unsharded_nbytes=32))
    player = Player(spec)
    player("begin_iteration", "train")
    player("pre_forward", A)
    state = player.state
    for _ in range(2):
        with pytest.raises(ByteBudgetError):
            open_use(spec, state, ROOT, Phase.FORWARD)
    again = FsdpState(state.orders, state.live, state.iteration)
    assert state == again and hash(state) == hash(again)
    assert close_use(spec, state, A, Phase.FORWARD).effects == (spec.uninstall[A], spec.reshard[A])


def test_backward_end_that_fails_has_closed_nothing() -> None:
    """Either all uses are closed or none."""
    player = Player(small_spec((4, 8)))
    player("begin_iteration", "train")
    player("pre_backward", A)
    name = "backward(unit 0 'root')"
    text = f"post_{name}: expected an open BACKWARD use, got none; call pre_{name} first."
    fails(player, HookOrderError, text, "backward_end", ((A, ()), (ROOT, ())))
    assert [*backward(Node(A, stays_open=True))][-1].args == (((A, ()),),)
