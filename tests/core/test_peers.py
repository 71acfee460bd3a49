"""What ranks make of what their peers say; it runs where torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from functional_fsdp.core.errors import FsdpError, PeerFault, PeerMismatch
from functional_fsdp.core.ids import Boundary, Item, Phase, UnitId, Use
from functional_fsdp.core.order import ExecutionOrder
from functional_fsdp.core.spec import UnitSpec, model_spec
from functional_fsdp.runtime.verdict import (
    Post,
    check_answers,
    digest,
    first_difference,
    judge,
    name_ranks,
    render_order,
)

SPEC = model_spec([UnitSpec("root", None, 4, 16), UnitSpec("layers.0", UnitId(0), 4, 16)])


def test_an_order_has_a_line_for_each_item() -> None:
    items: tuple[Item, ...] = (Use(UnitId(1), Phase.FORWARD), Boundary("send", True), Use(UnitId(0), Phase.BACKWARD))
    lines = ("forward 1  # layers.0", "boundary 'send' host_sync", "backward 0  # root")
    assert render_order(SPEC, ExecutionOrder(items)) == lines


def test_a_digest_is_the_same_in_every_process() -> None:
    program = "from functional_fsdp.runtime.verdict import digest; print(digest(['a', 'b']).hex())"
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert there == digest(["a", "b"]).hex() and len(digest([])) == 16
    assert digest(["a", "b"]) != digest(["b", "a"])


def test_first_difference_names_position_and_ranks() -> None:
    assert first_difference({0: "abc", 1: "abc"}) is None
    assert first_difference({0: "abc", 1: "axc", 3: "abd"}) == "position 1: 'b' on ranks 0, 3, 'x' on rank 1"
    assert first_difference({0: "ab", 1: "a"}) == "position 1: 'b' on rank 0, 'the end' on rank 1"
    assert first_difference({0: "", 1: ""}) is None


def test_an_order_is_named_where_ranks_differ() -> None:
    check_answers("train", {0: ["same"], 1: ["same"]})
    with pytest.raises(PeerMismatch) as caught:
        check_answers("train", {0: ["forward 0", "forward 1"], 1: ["forward 0", "forward 2"]})
    assert str(caught.value) == (
        "begin_iteration(key='train'): expected the same order on all ranks, got position 1: 'forward 1' on rank 0, "
        "'forward 2' on rank 1; begin with rerecord=True on all, or give each its own key."
    )


def post(rank: int, kind: str = "stopped", iteration: int = 5, where: str = "here", launched: str = "abc") -> Post:
    return Post(rank, kind, iteration, where, f"text {rank}", tuple(launched))


@pytest.mark.parametrize(
    ("posts", "kind", "text"),
    [
        (
            [post(0), post(1, "diverged"), post(2, "failed")],
            PeerMismatch,
            "here: expected all ranks to leave the order alike, or none, got rank 1, here: text 1; rank 0 was at here; "
            "rank 2 was at here; let all ranks take the same branch.",
        ),
        (
            [post(0), post(1, "diverged")],
            PeerMismatch,
            "here: expected all ranks to leave the order alike, or none, got rank 1, here: text 1; rank 0 was at here; "
            "rank 2 said nothing; let all ranks take the same branch.",
        ),
        (
            [post(0), post(1, "failed", launched="x")],
            PeerFault,
            "here: expected all ranks to go on, got rank 1 at here with text 1; this iteration is dropped: if every "
            "rank drops it, run it again from the same state, else start anew.",
        ),
        (
            [post(0), post(1, launched="ax"), post(2, launched="abcd")],
            PeerMismatch,
            "here: expected the same collectives on all ranks, got position 1: 'b' on ranks 0, 2, 'x' on rank 1; let "
            "all ranks run the same units in the same order.",
        ),
        (
            [post(0), post(1, iteration=4, launched="ax")],
            PeerFault,
            "here: expected all ranks to come within 7 s, got nothing of rank 2 (text 0); it has ended, hangs, is in "
            "other code or had fewer batches: give all ranks as many.",
        ),
        (
            [post(0), post(1, where="there"), post(2)],
            PeerMismatch,
            "here: expected all ranks at one place, got rank 0 at here; rank 1 at there; rank 2 at here; let all ranks "
            "make the same calls, with as many batches.",
        ),
        (
            [post(0), post(1), post(2)],
            PeerFault,
            "here: expected an answer within 7 s, got text 0; this iteration is dropped: if every rank drops it, run "
            "it again from the same state, else start anew.",
        ),
    ],
)
def test_what_posts_mean(posts: list[Post], kind: type[FsdpError], text: str) -> None:
    error = judge(posts[0], {post.rank: post for post in posts}, 3, 7.0)
    assert type(error) is kind and str(error) == text


def test_posts_travel_as_text() -> None:
    assert Post.decode(post(1).encode()) == post(1)
    assert name_ranks([3]) == "rank 3" and name_ranks([0, 2]) == "ranks 0, 2"
