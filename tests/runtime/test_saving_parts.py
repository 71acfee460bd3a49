"""The parts of a checkpoint that need no ranks: boxes, the record, and where elements lie in a file."""

from __future__ import annotations

import io
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functional_fsdp.core.ids import Boundary, Item, Key, Phase, UnitId, Use
from functional_fsdp.core.order import commit_order
from functional_fsdp.core.state import StoredOrder
from functional_fsdp.loss_scale import LossScale
from functional_fsdp.runtime.checkpoint.boxes import Box, fill, narrow_to, overlap, range_boxes, whole
from functional_fsdp.runtime.checkpoint.record import (
    Record,
    decode_orders,
    decode_record,
    encode_orders,
    encode_record,
)
from functional_fsdp.runtime.checkpoint.saved import SavedChunk
from functional_fsdp.runtime.checkpoint.tensor_file import FileSlice, elements_start

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Draw a shape and a range of its elements."""
    shape = draw(SHAPES)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


def numbered(shape: tuple[int, ...]) -> Tensor:
    """Return a tensor whose elements are their own positions."""
    return torch.arange(prod(shape)).view(shape)


@given(ranges())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_boxes_are_the_range_in_order(drawn: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = drawn
    boxes = [*range_boxes(shape, start, stop)]
    values = [value for box in boxes for value in narrow_to(numbered(shape), whole(shape), box).flatten().tolist()]
    assert values == [*range(start, stop)]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box in boxes:
        assert box.fits(shape)
        assert narrow_to(numbered(shape), whole(shape), box).is_contiguous()


def test_boxes_of_what_has_no_elements() -> None:
    assert [*range_boxes((), 0, 1)] == [Box((), ())]
    assert [*range_boxes((3, 0, 2), 0, 0)] == []


@given(ranges(), st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_parts_of_other_boxes_fill_a_box(drawn: tuple[tuple[int, ...], int, int], data: st.DataObject) -> None:
    shape, start, stop = drawn
    cut = data.draw(st.integers(0, prod(shape)))
    chunks = [*range_boxes(shape, 0, cut), *range_boxes(shape, cut, prod(shape))]
    target = torch.full(shape, -1)
    for box in range_boxes(shape, start, stop):
        parts = [part for chunk in chunks if (part := overlap(chunk, box)) is not None]
        assert fill(box, parts)
        assert not fill(box, parts[1:])
        assert not fill(box, [*parts, parts[0]])
        for part in parts:
            narrow_to(target, whole(shape), part).copy_(narrow_to(numbered(shape), whole(shape), part))
    assert target.flatten()[start:stop].tolist() == [*range(start, stop)]


def test_an_overlap_does_not_make_up_for_a_hole() -> None:
    box = Box((0, 0), (2, 4))
    assert fill(box, [Box((0, 0), (2, 2)), Box((0, 2), (2, 2))])
    assert not fill(box, [Box((0, 0), (2, 3)), Box((0, 2), (1, 2))])
    assert not fill(box, [Box((0, 0), (1, 4)), Box((0, 0), (1, 4))])
    assert not fill(Box((), ()), [])


NUMELS = (10, 20, 30)
ITEMS = st.one_of(
    st.builds(Use, st.sampled_from([UnitId(0), UnitId(1), UnitId(2)]), st.sampled_from(Phase)),
    st.builds(Boundary, st.text(max_size=5), st.booleans()),
)
KEYS = st.recursive(st.one_of(st.text(max_size=5), st.integers()), lambda inner: st.lists(inner, max_size=3).map(tuple))


@given(KEYS, st.lists(ITEMS, max_size=20), st.integers(0, 5), st.booleans())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_orders_come_back(key: Key, items: list[Item], num_divergences: int, on_demand: bool) -> None:
    committed = None if on_demand else commit_order(items, NUMELS, (2, 1 << 40))
    orders = (StoredOrder(key, committed, num_divergences), StoredOrder("other", commit_order([], NUMELS)))
    scale = LossScale(2.0**16, growth_interval=10, num_good_steps=num_divergences)
    record = Record("digest", 123, scale, {"step": False}, encode_orders(orders))
    read = decode_record(encode_record(record))
    assert (read.digest, read.step, read.loss_scale, read.scalars) == ("digest", 123, scale, {"step": False})
    decoded = decode_orders(read.orders, NUMELS)
    assert decoded == orders
    for order, original in zip(decoded, orders, strict=True):
        if order.committed is not None and original.committed is not None:
            assert order.committed.positions == original.committed.positions
            assert order.committed.numel_before == original.committed.numel_before


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"version":1', '"version":2', "version 1, got 2"),
        ('"step":3', '"step":-3', "at least 0"),
        ('"step":3', '"step":true', "expected int, got True"),
        ('"F2"', '"F9"', "one of the model's units, got 'F9'"),
        ('"F2"', '"F-1"', "one of the model's units"),
        ('"F2"', "7", "expected list, got 7"),
        ('"key":"train"', '"key":null', "expected a str, an int or a tuple"),
        ('"scale":8.0', '"scale":0.0', "a normal number of float32"),
        ('"scale":8.0', '"scale":"8"', "expected float"),
        ('"scale":8.0', '"other":8.0', "expected a loss scale of"),
        ('"digest":"d",', "", "expected str, got None"),
    ],
)
def test_a_damaged_record_is_refused(old: str, new: str, text: str) -> None:
    orders = encode_orders([StoredOrder("train", commit_order([Use(UnitId(2), Phase.FORWARD)], NUMELS))])
    written = encode_record(Record("d", 3, LossScale(8.0), {}, orders)).decode()
    assert old in written
    with pytest.raises(ValueError, match=text):
        decode_orders(decode_record(written.replace(old, new, 1).encode()).orders, NUMELS)


def in_a_file(tmp_path: Path, saved: object) -> tuple[FileSlice, bytes]:
    """Return what `torch.save` writes, in the middle of a file."""
    stream = io.BytesIO()
    torch.save(saved, stream)
    (tmp_path / "file").write_bytes(b"before" + stream.getvalue() + b"after")
    chunk = SavedChunk(whole(()), "file", 6, len(stream.getvalue()))
    return FileSlice(open(tmp_path / "file", "rb", buffering=0), chunk), stream.getvalue()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (0, 2)])
def test_elements_are_found_in_a_file(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(1, 1 + prod(shape)).view(shape).to(dtype)
    file, written = in_a_file(tmp_path, tensor)
    start = elements_start(file, dtype, shape)
    assert start is not None
    assert written[start : start + tensor.nbytes] == bytes(tensor.view(-1).view(torch.uint8).tolist())
    file, written = in_a_file(tmp_path, tensor)
    assert elements_start(file, dtype, (*shape, 2)) is None
    file, written = in_a_file(tmp_path, tensor)
    assert elements_start(file, torch.int16, shape) is None
    file, written = in_a_file(tmp_path, tensor)
    assert torch.equal(torch.load(file, weights_only=True), tensor)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "saved",
    [
        torch.arange(6.0).view(3, 2).t(),
        torch.arange(12.0).view(4, 3)[1:3],
        torch.arange(6.0).view(2, 3).to_sparse(),
        torch.ones(2, 3, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(2, 3)),
        {"a": torch.ones(2, 3)},
        [torch.ones(2, 3)],
        "text",
    ],
    ids=["transposed", "part", "sparse", "conjugate", "parameter", "dict", "list", "text"],
)
def test_what_is_no_plain_tensor_is_left_to_torch(tmp_path: Path, saved: object) -> None:
    file, _ = in_a_file(tmp_path, saved)
    assert elements_start(file, torch.float32, (2, 3)) is None


def test_a_file_cut_anywhere_is_left_to_torch(tmp_path: Path) -> None:
    _, written = in_a_file(tmp_path, torch.arange(6.0).view(2, 3))
    for length in range(0, len(written), 7):
        (tmp_path / "cut").write_bytes(written[:length])
        with open(tmp_path / "cut", "rb", buffering=0) as stream:
            assert (
                elements_start(FileSlice(stream, SavedChunk(whole(()), "cut", 0, length)), torch.float32, (2, 3))
                is None
            )
