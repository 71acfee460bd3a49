"""Row B11 on one rank: the norm of all gradients, and clipping by it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from functional_fsdp.runtime.norms import clip_by_global_norm, global_norm

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def shards(dtype: torch.dtype, scale: float = 1.0) -> dict[str, Tensor]:
    """Return three shards, one without elements."""
    generator = torch.Generator().manual_seed(2)
    sizes = {"b": 1001, "a": 37, "empty": 0}
    return {key: (torch.randn(size, generator=generator) * scale).to(dtype) for key, size in sizes.items()}


def own(total: Tensor) -> Tensor:
    """Sum over the shards of one rank."""
    return total


@pytest.mark.parametrize("dtype", DTYPES)
def test_b11_norm_of_all_keys_together(dtype: torch.dtype) -> None:
    grads = shards(dtype)
    norm = global_norm(grads, own)
    exact = torch.cat(list(grads.values())).double().norm()
    assert norm.shape == ()
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(norm, exact.to(norm.dtype)) or dtype == torch.float64
    assert abs(norm.double() - exact) <= 1e-15 * exact if dtype == torch.float64 else True


def test_b11_one_double_gradient_makes_the_norm_double() -> None:
    assert global_norm({"a": torch.ones(2), "b": torch.ones(2).double()}, own).dtype == torch.float64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_norm", [0.5, 1e6, float("inf")])
def test_b11_clips_as_torch_does(dtype: torch.dtype, max_norm: float) -> None:
    """Bit for bit, given the same norm; in place."""
    grads, params = shards(dtype), [torch.nn.Parameter(torch.zeros_like(grad)) for grad in shards(dtype).values()]
    for param, grad in zip(params, shards(dtype).values(), strict=True):
        param.grad = grad
    norm = global_norm(grads, own)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    clipped = clip_by_global_norm(grads, norm, max_norm)
    assert clipped.keys() == grads.keys()
    for (key, grad), param in zip(clipped.items(), params, strict=True):
        assert param.grad is not None
        assert grad is grads[key]
        assert grad.dtype == dtype
        assert torch.equal(grad, param.grad)
    changed = max_norm < norm
    assert torch.equal(grads["b"], shards(dtype)["b"]) != changed


def test_b11_sums_over_shards_once_and_the_order_of_keys_changes_no_bit() -> None:
    seen: list[Tensor] = []

    def three_alike(total: Tensor) -> Tensor:
        seen.append(total)
        return total * 3

    grads = shards(torch.float32)
    norm = global_norm(grads, three_alike)
    other = global_norm(dict(reversed(grads.items())), three_alike)
    assert torch.equal(norm, other)
    assert [(total.shape, total.dtype) for total in seen] == [((), torch.float64)] * 2
    torch.testing.assert_close(norm, 3**0.5 * global_norm(grads, own))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e30), (torch.float32, 1e-30), (torch.float16, 5e3)])
def test_b11_large_and_small_gradients_do_not_overflow(dtype: torch.dtype, scale: float) -> None:
    grads = shards(dtype, scale)
    norm = global_norm(grads, own)
    exact = torch.cat(list(grads.values())).double().norm().float()
    assert norm.isfinite()
    assert torch.equal(norm, exact)
    assert norm > 0


def test_b11_many_elements_lose_no_digits() -> None:
    """PyTorch's float32 norm on CPU is off by 1e-5 here."""
    ones = torch.full((3_000_001,), 0.1)
    norm = float(global_norm({"a": ones}, own))
    assert abs(norm - (3_000_001**0.5) * float(ones[0])) < 1e-7 * norm


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_b11_one_element_that_is_not_finite_shows_in_the_norm(dtype: torch.dtype, bad: float) -> None:
    grads = shards(dtype)
    grads["a"][5] = bad
    assert not global_norm(grads, own).isfinite()


def test_b11_no_gradients_have_norm_zero() -> None:
    assert global_norm({}, own) == 0
    assert global_norm({"a": torch.zeros(3)}, own) == 0
    assert torch.equal(clip_by_global_norm({"a": torch.zeros(3)}, torch.zeros(()), 1.0)["a"], torch.zeros(3))


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_b11_a_bound_that_is_not_above_zero_is_refused(max_norm: float) -> None:
    grads = shards(torch.float32)
    with pytest.raises(
        ValueError, match=r"clip_by_global_norm: expected max_norm above 0, got .*; leave it out to clip"
    ):
        clip_by_global_norm(grads, torch.ones(()), max_norm)
    assert torch.equal(grads["a"], shards(torch.float32)["a"])
