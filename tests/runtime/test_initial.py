"""Row C9: initialised shard by shard from meta and CPU, equal by check or by broadcast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from functional_fsdp.runtime.same_model import CHUNK_NUMEL, checksum
from tests.runtime import cases_initial as cases
from tests.runtime.models_meta import WRONG
from tests.runtime.worlds import Worlds


def test_c9_from_meta_on_two_ranks(worlds: Worlds) -> None:
    worlds(2).run(cases.from_meta, ("zero3", "ddp", "zero2"))


def test_c9_from_meta_on_four_ranks(worlds: Worlds) -> None:
    worlds(4).run(cases.from_meta, ("hfsdp",))


def test_c9_partly_on_meta(worlds: Worlds) -> None:
    worlds(2).run(cases.partly_on_meta)


def test_c9_what_cannot_be_initialised_is_named_and_nothing_is_changed(worlds: Worlds) -> None:
    for texts in worlds(2).run(cases.wrong, tuple(WRONG)):
        for kind, (_, parts) in WRONG.items():
            text = texts.get(kind, "no error")
            assert text.startswith("ArithmeticError" if kind == "raises" else "ValueError: fully_shard"), text
            for part in parts:
                assert part in text, f"{kind}: {part!r} is not in: {text}"


@pytest.mark.parametrize("broadcast", [False, True])
def test_c9_one_unit_at_a_time_is_in_memory(worlds: Worlds, broadcast: bool) -> None:
    for peak, shards, layer in worlds(2).run(cases.peak_of_init, 8, broadcast):
        # Beside one layer there is what the checksum of a part of it takes; together they are less than two.
        room = 4 * 8 * CHUNK_NUMEL
        assert shards + layer <= peak < shards + layer + room < shards + 2 * layer


@pytest.mark.parametrize("from_rank", ["others", "meta", "all meta"])
def test_c9_broadcast_on_two_ranks(worlds: Worlds, from_rank: str) -> None:
    worlds(2).run(cases.broadcast, "zero3", from_rank)


@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp", "ddp"])
def test_c9_broadcast_on_four_ranks(worlds: Worlds, strategy: str) -> None:
    worlds(4).run(cases.broadcast, strategy, "others")


def test_c9_broadcast_of_every_dtype(worlds: Worlds) -> None:
    worlds(2).run(cases.dtypes_that_no_backend_sends)


def test_c9_a_broadcast_writes_no_tensor_of_the_caller(worlds: Worlds) -> None:
    worlds(2).run(cases.untouched_original)


def test_c9_any_difference_is_named(worlds: Worlds) -> None:
    for texts in worlds(2).run(cases.differ):
        for kind, (name, _) in cases.OTHERS.items():
            text = texts[kind]
            assert text.startswith("PeerMismatch: init: expected the same weights and buffers on all ranks"), text
            assert f"other bits in {name!r} on rank 1 than on rank 0" in text and "broadcast_weights=True" in text, text


@pytest.mark.parametrize(
    ("what", "parts"), [("parameter", ["'a.up.weight'", "(12, 8)"]), ("buffer", ["buffer 'b.inv_freq' (3,)"])]
)
def test_c9_broadcast_between_other_models(worlds: Worlds, what: str, parts: list[str]) -> None:
    for text in worlds(2).run(cases.broadcast_of_other_models, what):
        for part in ["PeerMismatch: fully_shard", "on rank 0", "on rank 1", *parts]:
            assert part in text, text


def test_c9_the_others_hear_of_a_rank_that_cannot_initialise(worlds: Worlds) -> None:
    first, second = worlds(2).run(cases.broadcast_of_other_models, "fails")
    assert first.startswith("ArithmeticError")
    assert second.startswith("PeerFault") and "rank 0" in second and "planted" in second, second


def numel(count: int) -> Tensor:
    """Return as many bytes that are all different from their neighbours."""
    return torch.arange(count, dtype=torch.int64).mul_(37).to(torch.uint8)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 8 * CHUNK_NUMEL - 1, 8 * CHUNK_NUMEL, 8 * CHUNK_NUMEL + 5])
def test_a_checksum_sees_every_bit_and_place(count: int) -> None:
    values = numel(count)
    seen = {int(checksum(values))}
    places = {0, count // 2, count - 1}
    for place in places:
        for bit in range(8):
            changed = values.clone()
            changed[place] ^= 1 << bit
            seen.add(int(checksum(changed)))
    assert len(seen) == 1 + 8 * len(places)


def test_a_checksum_is_of_values_not_of_memory() -> None:
    values = torch.randn(70, 30)
    unaligned = torch.empty(2101)[1:]
    unaligned.copy_(values.reshape(-1))
    assert int(checksum(values)) == int(checksum(values.t().contiguous().t())) == int(checksum(unaligned))
    assert int(checksum(values)) != int(checksum(values.t()))
    assert int(checksum(torch.empty(0))) == 0


def test_a_checksum_sees_pairs_that_cancel() -> None:
    """Swapped elements, two flipped signs, what is added to one and taken from another."""
    values = torch.randn(64, dtype=torch.float64)
    changed = [values.clone() for _ in range(4)]
    changed[0][[3, 9]] = changed[0][[9, 3]]
    changed[1][[3, 9]] *= -1
    changed[2].view(torch.int64)[3] += 1
    changed[2].view(torch.int64)[9] -= 1
    changed[3] = changed[3].roll(1)
    assert len({int(checksum(tensor)) for tensor in [values, *changed]}) == 5
