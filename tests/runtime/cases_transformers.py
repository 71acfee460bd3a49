"""Cases of Hugging Face models that are built from a configuration: trained, checkpointed, and generated with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from functional_fsdp import FullySharded, PrefetchPolicy, TrainState, fully_shard, make_mesh, optim
from functional_fsdp.core.errors import FsdpError
from tests.runtime.models import seeded
from tests.runtime.reference import Reference, check_close, check_tensors
from tests.runtime.twins import OPTIMIZERS

SYMBOLS = 17
NUM_STEPS = 3


def llama() -> nn.Module:
    """Return a decoder with rotary positions and grouped key and value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SYMBOLS, hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


def gpt2() -> nn.Module:
    """Return a decoder whose head is its embedding, and whose linear maps are stored transposed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=SYMBOLS, n_embd=16, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def t5() -> nn.Module:
    """Return an encoder and a decoder that share an embedding; their first blocks give the others their positions."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=SYMBOLS, d_model=16, d_kv=4, d_ff=20, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model: nn.Module = T5ForConditionalGeneration(config)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (llama, "LlamaDecoderLayer"),
    "gpt2": (gpt2, "GPT2Block"),
    "t5": (t5, "T5Block"),
}
"""For each model: how it is made, and the class of its units."""


def ids_of(step: int, rank: int) -> Tensor:
    """Return tokens `[2, 7]` that differ by step and rank."""
    return torch.randint(3, SYMBOLS, (2, 7), generator=seeded(1000 * step + rank))


class Twin:
    """A model sharded by layers, and its unsharded twin, both in float64."""

    def __init__(
        self, rank: int, world_size: int, name: str, policy: PrefetchPolicy, methods: tuple[str, ...] = ()
    ) -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.rank, self.world_size = rank, world_size
        make, unit = MODELS[name]
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.model: Any = make().double().train()
        optimizer_class, options = OPTIMIZERS["adamw"]
        self.reference = Reference(self.model, lambda params: optimizer_class(params, **options))
        units = tuple({type(module) for module in self.model.modules() if type(module).__name__ == unit})
        assert units, f"{name} has no {unit}"
        mesh = make_mesh((world_size,))
        self.fsdp: FullySharded = fully_shard(
            self.model, mesh, units=units, prefetch=policy, methods={type(self.model): methods} if methods else None
        )
        self.optimizer = optim.from_torch(optimizer_class, **options)
        self.state: TrainState = self.fsdp.init(self.optimizer)

    def train(self, step: int, loss_of: Callable[[Any, int, int], Tensor]) -> None:
        """Train both on the loss of a model, a step and a rank; compare all."""
        expected = self.reference.expect(
            [lambda twin, other=other: loss_of(twin, step, other) for other in range(self.world_size)]  # type: ignore[misc]
        )
        with self.fsdp.iteration(self.state, key="train") as it:
            loss = loss_of(self.model, step, self.rank)
            torch.autograd.backward(loss)
            grads = it.finish_grad_sync()
        check_close(f"step {step}: loss", loss.detach(), expected.losses[self.rank], 1e-9)
        check_tensors(f"step {step}: gradient of", self.fsdp.full_tensors(grads), expected.grads, 1e-9)
        self.state = self.fsdp.update(it.state, grads, self.optimizer)
        self.reference.step()
        weights = self.fsdp.full_tensors(self.state.params)
        check_tensors(f"step {step}: weight", weights, self.reference.weights(), 1e-9)
        assert self.fsdp.unsharded_nbytes() == 0

    def generates(self, **options: Any) -> int:
        """Generate while evaluating; compare with the twin, and return how many tokens came."""
        prompt = ids_of(90, self.rank)
        options = {"max_new_tokens": 5, "attention_mask": torch.ones_like(prompt), **options}
        self.model.eval()
        self.reference.model.eval()
        with self.fsdp.iteration(self.state, key="eval") as it, it.evaluate():
            got = self.model.generate(prompt, **options)
        self.state = it.state
        twin: Any = self.reference.model
        want = twin.generate(prompt, **options)
        assert torch.equal(got, want), (got, want)
        self.model.train()
        twin.train()
        return int(got.numel())


def loss_with(use_cache: bool | None) -> Callable[[Any, int, int], Tensor]:
    """Return the model's own loss on its labels, with `use_cache` or as the model does by default."""
    options = {} if use_cache is None else {"use_cache": use_cache}

    def loss_of(model: Any, step: int, rank: int) -> Tensor:
        ids = ids_of(step, rank)
        loss = model(input_ids=ids, labels=ids, **options).loss
        assert isinstance(loss, Tensor)
        return loss

    return loss_of


def trained(rank: int, world_size: int, name: str, policy: PrefetchPolicy, use_cache: bool | None) -> None:
    """Train on labels."""
    twin = Twin(rank, world_size, name, policy)
    for step in range(NUM_STEPS):
        twin.train(step, loss_with(use_cache))


def checkpointed(rank: int, world_size: int, name: str, policy: PrefetchPolicy, reentrant: bool) -> None:
    """Train with gradient checkpointing, the reference without."""
    twin = Twin(rank, world_size, name, policy)
    twin.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for step in range(NUM_STEPS):
        twin.train(step, loss_with(False))


def generated(rank: int, world_size: int, name: str, policy: PrefetchPolicy, options: dict[str, Any]) -> int:
    """Train, generate and train on; return how many tokens came."""
    twin = Twin(rank, world_size, name, policy, methods=("generate",) if name == "t5" else ())
    twin.train(0, loss_with(False))
    num_tokens = twin.generates(**options)
    twin.train(1, loss_with(False))
    return num_tokens


def prefix_of_a_cache(rank: int, world_size: int, name: str, policy: PrefetchPolicy) -> None:
    """Train on two chunks, the second of which attends to the first by its cache."""

    def loss_of(model: Any, step: int, rank: int) -> Tensor:
        first, second = ids_of(step, rank), ids_of(step + 50, rank)
        before = model(input_ids=first, labels=first, use_cache=True)
        after = model(input_ids=second, labels=second, past_key_values=before.past_key_values, use_cache=True)
        loss = before.loss + after.loss
        assert isinstance(loss, Tensor)
        return loss

    twin = Twin(rank, world_size, name, policy)
    for step in range(NUM_STEPS):
        twin.train(step, loss_of)


def generated_unregistered(rank: int, world_size: int) -> str:
    """Generate with a model whose `generate` calls its encoder alone; return the text of the error."""
    twin = Twin(rank, world_size, "t5", PrefetchPolicy())
    try:
        twin.generates()
    except FsdpError as error:
        assert twin.fsdp.unsharded_nbytes() == 0
        return f"{type(error).__name__}: {error}"
    return "no error"
