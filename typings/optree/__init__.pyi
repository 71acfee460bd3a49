"""The part of optree that functional_fsdp uses, typed for mypy strict (optree's own `PyTree[T]` is not a type)."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Node = TypeVar("Node")
Tree = TypeVar("Tree")

# Read-only containers, so that a dict[str, Tensor] is a PyTree[Tensor]. A registered class is typed by its own name.
PyTree: TypeAlias = T | Sequence[PyTree[T]] | Mapping[str, PyTree[T]] | None

class PyTreeSpec:
    num_leaves: int
    num_nodes: int
    def unflatten(self, leaves: Iterable[object]) -> object: ...
    def paths(self) -> list[tuple[object, ...]]: ...
    def __hash__(self) -> int: ...

def tree_map(
    func: Callable[..., object],
    tree: Tree,
    *rests: Tree,
    is_leaf: Callable[[object], bool] | None = None,
    none_is_leaf: bool = False,
    namespace: str = "",
) -> Tree: ...
def tree_leaves(
    tree: object, is_leaf: Callable[[object], bool] | None = None, *, none_is_leaf: bool = False, namespace: str = ""
) -> list[object]: ...
def tree_structure(
    tree: object, is_leaf: Callable[[object], bool] | None = None, *, none_is_leaf: bool = False, namespace: str = ""
) -> PyTreeSpec: ...
def tree_flatten(
    tree: object, is_leaf: Callable[[object], bool] | None = None, *, none_is_leaf: bool = False, namespace: str = ""
) -> tuple[list[object], PyTreeSpec]: ...
def tree_flatten_with_path(
    tree: object, is_leaf: Callable[[object], bool] | None = None, *, none_is_leaf: bool = False, namespace: str = ""
) -> tuple[list[tuple[object, ...]], list[object], PyTreeSpec]: ...
def tree_is_leaf(
    tree: object, is_leaf: Callable[[object], bool] | None = None, *, none_is_leaf: bool = False, namespace: str = ""
) -> bool: ...
def tree_flatten_one_level(
    tree: object, is_leaf: Callable[[object], bool] | None = None, *, none_is_leaf: bool = False, namespace: str = ""
) -> tuple[list[object], object, tuple[object, ...], Callable[[object, Sequence[object]], object]]: ...
def tree_unflatten(treespec: PyTreeSpec, leaves: Iterable[object]) -> object: ...
def register_pytree_node(
    cls: type[Node],
    flatten_func: Callable[
        [Node], tuple[Iterable[object], Hashable] | tuple[Iterable[object], Hashable, Iterable[object]]
    ],
    unflatten_func: Callable[[Hashable, Sequence[object]], Node],
    *,
    namespace: str,
) -> type[Node]: ...
