"""Optimizers with explicit state: what PyTorch's keep inside themselves is an argument and a result here.

``update(grads, opt_state, params) -> opt_state`` writes ``params`` and the tensors of ``opt_state`` in place: memory for
a second copy of either is what sharding is there to save. A record remembers nothing; the same arguments give the same
result, whatever it was called with before. A ``Schedule`` is an optimizer whose numbers depend on the step.

Invariant: only elementwise optimizers get through ``from_torch``. A flat shard is a range of elements of many
parameters, and a rule that looks at a matrix, a row or a norm would see borders that are not there.
"""

from functional_fsdp.optim.optimizer import Optimizer, OptState
from functional_fsdp.optim.schedule import Schedule, with_schedule
from functional_fsdp.optim.trial import from_torch

__all__ = ["OptState", "Optimizer", "Schedule", "from_torch", "with_schedule"]
