"""What a rank makes of what its peers say: their lines, and their posts once a collective has failed. Pure, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import zip_longest

from functional_fsdp.core.errors import FsdpError, PeerFault, PeerMismatch, unexpected
from functional_fsdp.core.ids import Boundary, Item, Key
from functional_fsdp.core.order import ExecutionOrder
from functional_fsdp.core.spec import ModelSpec

_AGAIN = "this iteration is dropped: if every rank drops it, run it again from the same state, else start anew"


def render_order(spec: ModelSpec, order: ExecutionOrder[Item]) -> tuple[str, ...]:
    """Return a line for each item, e.g. ``forward 3  # layers.3``; orders are equal exactly if their lines are."""
    items = order.items
    return tuple(str(i) if isinstance(i, Boundary) else f"{i}  # {spec.units[i.unit].name}" for i in items)


def digest(lines: Iterable[str]) -> bytes:
    """Return 16 bytes that stand for the lines, the same in every process."""
    return blake2b("\n".join(lines).encode(), digest_size=16).digest()


def first_difference(lines: Mapping[int, Sequence[str]]) -> str | None:
    """Return the first position at which ranks have different lines, and what each has there; None if nowhere."""
    for position, there in enumerate(zip_longest(*lines.values(), fillvalue="the end")):
        if len(set(there)) > 1:
            ranks: dict[str, list[int]] = {}
            for rank, line in zip(lines, there, strict=True):
                ranks.setdefault(line, []).append(rank)
            return f"position {position}: " + ", ".join(f"{line!r} on {name_ranks(on)}" for line, on in ranks.items())
    return None


def check_answers(key: Key, answers: Mapping[int, Sequence[str]]) -> None:
    """Check that all ranks have named the same order for ``key``, by its digest or its lines.

    Raises:
        PeerMismatch: they have not.
    """
    difference = first_difference(answers)
    if difference:
        expected, instead = "the same order on all ranks", "begin with rerecord=True on all, or give each its own key"
        raise PeerMismatch(unexpected(f"begin_iteration(key={key!r})", expected, difference, instead))


@dataclass(frozen=True, slots=True)
class Post:
    """What a rank says when it stops.

    Attributes:
        rank: who.
        kind: ``"diverged"``: its replay left the order; ``"failed"``: an error of its own; ``"stopped"``: a collective
            of it failed, which says nothing of its cause.
        iteration: number of the iteration, counted from 1.
        where: what it was doing.
        text: what happened.
        launched: a line for each gather and reduction of the iteration, in order of launch.
    """

    rank: int
    kind: str
    iteration: int
    where: str
    text: str
    launched: tuple[str, ...]

    def encode(self) -> str:
        """Return the post as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> Post:
        """Return the post that ``encode`` made a text of."""
        fields = json.loads(text)
        return Post(**{**fields, "launched": tuple(fields["launched"])})


def name_ranks(ranks: Iterable[int]) -> str:
    """Return e.g. ``ranks 0, 2``."""
    ranks = tuple(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def judge(mine: Post, posts: Mapping[int, Post], num_ranks: int, timeout_s: float) -> FsdpError:
    """Return the error that says what the peers' posts, this rank's among them, mean.

    A divergence or an error of its own that some rank posted is the cause. Without one it is what ranks launched
    differently, and without that the ranks that posted nothing.

    Args:
        mine: this rank's post.
        posts: by rank.
        num_ranks: of the group.
        timeout_s: how long this rank has waited at most.
    """
    diverged = [post for post in posts.values() if post.kind == "diverged"]
    if diverged:
        got = "; ".join(f"rank {post.rank}, {post.where}: {post.text}" for post in diverged)
        others = [f"rank {post.rank} was at {post.where}" for post in posts.values() if post.kind != "diverged"]
        silent = [rank for rank in range(num_ranks) if rank not in posts]
        others += [f"{name_ranks(silent)} said nothing"] if silent else []
        expected = "all ranks to leave the order alike, or none"
        got = "; ".join([got.rstrip("."), *others])
        return PeerMismatch(unexpected(mine.where, expected, got, "let all ranks take the same branch"))
    failed = [post for post in posts.values() if post.kind == "failed"]
    if failed:
        got = "; ".join(f"rank {post.rank} at {post.where} with {post.text.rstrip('.')}" for post in failed)
        return PeerFault(unexpected(mine.where, "all ranks to go on", got, _AGAIN))
    launched = {post.rank: post.launched for post in posts.values() if post.iteration == mine.iteration}
    difference = compare_started(launched)
    if difference:
        instead = "let all ranks run the same units in the same order"
        return PeerMismatch(unexpected(mine.where, "the same collectives on all ranks", difference, instead))
    silent = [rank for rank in range(num_ranks) if rank not in posts]
    if silent:
        instead = "it has ended, hangs, is in other code or had fewer batches: give all ranks as many"
        got = f"nothing of {name_ranks(silent)} ({mine.text})"
        return PeerFault(unexpected(mine.where, f"all ranks to come within {timeout_s:g} s", got, instead))
    places = {post.where for post in posts.values()}
    if len(places) > 1:
        got = "; ".join(f"rank {post.rank} at {post.where}" for post in sorted(posts.values(), key=lambda p: p.rank))
        instead = "let all ranks make the same calls, with as many batches"
        return PeerMismatch(unexpected(mine.where, "all ranks at one place", got, instead))
    return PeerFault(unexpected(mine.where, f"an answer within {timeout_s:g} s", mine.text, _AGAIN))


def compare_started(launched: Mapping[int, Sequence[str]]) -> str | None:
    """Return the first difference between what ranks have launched so far; being further on is none."""
    length = min(map(len, launched.values()))
    return first_difference({rank: lines[:length] for rank, lines in launched.items()})
