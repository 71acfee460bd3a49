"""Row B6: frozen beside trainable, and ``fsdp, state = fsdp.unfreeze(state, names)``."""

from __future__ import annotations

import pytest
import torch

from tests.runtime import cases_unfreeze as cases
from tests.runtime.cases_unfreeze import PARTLY
from tests.runtime.strategies import BF16, Setup
from tests.runtime.worlds import Worlds

SETUPS = {
    2: (
        Setup("zero3", scenario=PARTLY, grouped=True),
        Setup("ddp", scenario=PARTLY),
        Setup("zero2", scenario=PARTLY, optimizer="momentum", reduce_grads="last", num_micro=2),
        Setup("zero3", scenario=PARTLY, dtype=torch.float32, optimizer="momentum", precision=BF16),
    ),
    4: (Setup("zero3", scenario=PARTLY), Setup("hsdp", scenario=PARTLY, grouped=True), Setup("hfsdp", scenario=PARTLY)),
}


@pytest.mark.parametrize("world_size", [2, 4])
def test_b6_unfreezing_equals_add_param_group(worlds: Worlds, world_size: int) -> None:
    worlds(world_size).run(cases.steps, SETUPS[world_size], 2)


def test_b6_unfreezing_before_the_first_step(worlds: Worlds) -> None:
    worlds(2).run(cases.steps, SETUPS[2][:1] + SETUPS[2][2:3], 0)


def test_b6_weights_and_momenta_keep_their_bits(worlds: Worlds) -> None:
    worlds(2).run(cases.kept_bits, ("zero3", "ddp"))
    worlds(4).run(cases.kept_bits, ("hfsdp",))


def test_b6_frozen_ones_are_not_reduced_and_have_no_state(worlds: Worlds) -> None:
    """Four buckets train: of the root, b, c and d; with a parameter of a it is one more."""
    assert worlds(2).run(cases.frozen_is_not_reduced) == [[4, 4, 5]] * 2


def test_b6_compute_reads_unfrozen_ones_in_the_policys_precision(worlds: Worlds) -> None:
    assert worlds(2).run(cases.in_precision) == [{torch.bfloat16}] * 2


def test_b6_at_most_one_unit_is_gathered(worlds: Worlds) -> None:
    for peak, state, layer in worlds(2).run(cases.peak_of_unfreeze, "zero3"):
        # Beside the new state: a full layer, and this rank's half of it to give.
        assert state + 1.4 * layer < peak < state + 1.9 * layer


MESSAGES = {
    "unknown": ["ValueError: unfreeze: 'a.up.weigth'", "did you mean 'a.up.weight'?"],
    "unlike any": ["ValueError: unfreeze: 'xyz'", "the names are"],
    "tied name": ["ValueError: unfreeze: 'tied.weight'", "did you mean 'stem.weight'?"],
    "trains": ["ValueError: unfreeze: 'b.up.weight'", "one that trains"],
    "one bad": ["ValueError: unfreeze: 'b.up.weight'", "one that trains"],
    "integer": ["ValueError: unfreeze: 'ids'", "torch.int64"],
    "expanded": ["ValueError: unfreeze: 'wide'", "(0, 1)"],
    "text": ["ValueError: unfreeze", "'a.up.weight'", "['head.weight']"],
    "pattern": ["ValueError: unfreeze: 'a.*'"],
    "none": ["ValueError: unfreeze", "[]"],
    "no names": ["ValueError: unfreeze", "None"],
    "no text": ["ValueError: unfreeze", "[1]"],
    "running": ["IterationError: unfreeze", "after the with block"],
    "donated": ["DonatedStateError: unfreeze"],
    "another model": ["ValueError: unfreeze", "flat shards"],
    "other names": ["PeerMismatch", "unfreeze", "'a.up.bias'", "rank 0", "rank 1"],
}


def test_b6_names_and_states_that_do_not_fit(worlds: Worlds) -> None:
    for texts in worlds(2).run(cases.errors_of):
        assert set(texts) == set(MESSAGES)
        for name, parts in MESSAGES.items():
            for part in parts:
                assert part in texts[name], f"{name}: {texts[name]}"


def test_b6_the_program_and_the_state_before_say_what_to_use(worlds: Worlds) -> None:
    for texts in worlds(2).run(cases.old_ones):
        for name, text in texts.items():
            if name.startswith("fsdp"):
                assert text.startswith("FsdpError: fsdp: expected the program that unfreeze returned"), (
                    f"{name}: {text}"
                )
                assert "fsdp, state = fsdp.unfreeze(state, names)" in text, f"{name}: {text}"
            elif name.startswith("state"):
                assert text.startswith("DonatedStateError") and "went to unfreeze" in text, f"{name}: {text}"
        assert texts["grads"].startswith("ValueError: update"), texts["grads"]
        assert texts["graph"].startswith("StaleGraphError"), texts["graph"]
        assert texts["hook of the old iteration"].startswith("IterationError"), texts


def test_c10_hooks_of_the_user_keep_their_place(worlds: Worlds) -> None:
    for seen in worlds(2).run(cases.hooks_keep_their_place):
        assert seen == [
            "pre, after sharding: weights",
            "post, before sharding: weights",
            "post, after sharding: placeholder",
        ]


def test_the_program_before_is_freed_at_once(worlds: Worlds) -> None:
    assert worlds(2).run(cases.old_program_is_freed) == [True, True]
