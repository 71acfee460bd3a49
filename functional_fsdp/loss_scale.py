"""The factor that keeps gradients of a half-precision backward above zero: a value that each step replaces."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from functional_fsdp.core.errors import unexpected

LARGEST = float.fromhex("0x1.fffffep127")
"""The largest float32. The loss is multiplied in float32, so that a scale beyond would make every gradient infinite."""

SMALLEST = 2.0**-126
"""The smallest normal float32; below it a scale and its reciprocal are not exact."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """A factor for the loss, and when it changes: the rule of ``torch.amp.GradScaler``.

    Attributes:
        scale: the factor, a power of two where no bit of a gradient may change.
        growth_interval: good steps in a row after which it grows.
        growth_factor: by what it is multiplied then.
        backoff_factor: by what it is multiplied after a step whose gradients are not finite.
        num_good_steps: good steps since it last changed.

    Raises:
        ValueError: a value cannot be meant.
    """

    scale: float
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    num_good_steps: int = 0

    def __post_init__(self) -> None:
        wanted = {
            "scale": (SMALLEST <= self.scale <= LARGEST, "a normal number of float32 above 0"),
            "growth_interval": (self.growth_interval >= 1, "at least 1"),
            "growth_factor": (1 < self.growth_factor < math.inf, "above 1"),
            "backoff_factor": (0 < self.backoff_factor < 1, "between 0 and 1"),
            "num_good_steps": (0 <= self.num_good_steps < self.growth_interval, "at least 0 and below growth_interval"),
        }
        for name, (is_good, text) in wanted.items():
            if not is_good:
                raise ValueError(unexpected(f"LossScale.{name}", text, str(getattr(self, name)), "choose another"))

    def after(self, is_finite: bool) -> LossScale:
        """Return the scale for the step after one whose gradients were finite, or were not."""
        if not is_finite:
            return replace(self, scale=max(self.scale * self.backoff_factor, SMALLEST), num_good_steps=0)
        if self.num_good_steps + 1 < self.growth_interval:
            return replace(self, num_good_steps=self.num_good_steps + 1)
        grown = self.scale * self.growth_factor
        return replace(self, scale=grown if grown <= LARGEST else self.scale, num_good_steps=0)
