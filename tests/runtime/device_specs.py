"""Models for the recording device: a root and its layers, plain or with everything that a unit can be."""

from __future__ import annotations

from dataclasses import replace

from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.policy import PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec, ReducePolicy, UnitSpec, model_spec

REDUCE_POLICIES = [ReducePolicy(at_last, has_outer) for at_last in (False, True) for has_outer in (False, True)]


def plain(policy: PrefetchPolicy, num_layers: int = 4) -> ModelSpec:
    """Return a root and its layers, ten float32 elements each."""
    layers = [UnitSpec(f"layers.{i}", UnitId(0), 10, 40) for i in range(num_layers)]
    return model_spec([UnitSpec("root", None, 10, 40), *layers], policy)


def mixed(policy: PrefetchPolicy, reduce: ReducePolicy, num_layers: int = 4) -> ModelSpec:
    """Return the same with the root's shard refreshed, and layers that are kept too, in place, or plain, in turn."""
    root, *layers = plain(policy, num_layers).units
    kinds: list[dict[str, object]] = [{"kept": True, "refreshes": True}, {"nbytes": 0}, {}]
    changed = [replace(layer, **kinds[i % 3]) for i, layer in enumerate(layers)]  # type: ignore[arg-type]
    return model_spec([replace(root, refreshes=True), *changed], policy, reduce)
