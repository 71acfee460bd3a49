"""Checkpoints: rows C3 and C4. What is saved is what is loaded, whoever saves and whoever loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.runtime import cases_saving as cases
from tests.runtime.models import GPT, Scenario
from tests.runtime.models_saved import ASSORTED, check_same, plain_model
from tests.runtime.worlds import Worlds

BEHIND = ("ignore:torch.distributed is disabled", "ignore:.*buffers 'mean' are left out")
pytestmark = [pytest.mark.filterwarnings(text) for text in BEHIND]

STRATEGIES = ("zero3", "ddp", "zero1", "zero2", "hsdp", "hfsdp")


def test_c4_four_ranks_two_one_and_back(worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    want = worlds(4).run(cases.save, str(path), "zero3")[0]
    worlds(2).run(cases.load, str(path), "ddp", want, save_to=f"{path}-2")
    worlds(1).run(cases.load, f"{path}-2", "zero3", want, save_to=f"{path}-1")
    worlds(4).run(cases.load, f"{path}-1", "zero2", want, grouped=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c4_any_placement_to_any(worlds: Worlds, tmp_path: Path, strategy: str) -> None:
    path = tmp_path / "saved"
    want = worlds(4).run(cases.save, str(path), strategy)[0]
    following = STRATEGIES[(STRATEGIES.index(strategy) + 1) % len(STRATEGIES)]
    worlds(4).run(cases.load, str(path), following, want)
    # Written once, whoever holds it.
    numel = sum(tensor.numel() for tensors in want.values() for tensor in tensors.values())
    assert sum(file.stat().st_size for file in path.iterdir()) < 8 * numel + 600_000


def test_c4_plain_pytorch_reads_it(worlds: Worlds, tmp_path: Path) -> None:
    path, whole = tmp_path / "saved", tmp_path / "whole.pt"
    want = worlds(2).run(cases.save, str(path), "zero3")[0]
    dcp_to_torch_save(path, whole)
    plain = torch.load(whole, weights_only=True)
    model = plain_model(seed=8)
    missing, unexpected = model.load_state_dict(plain["model"], strict=False)
    assert (missing, unexpected) == (["mean"], []), "all names of a tied parameter are there, buffers are not"
    check_same("model", {"model": dict(model.named_parameters())}, {"model": want["model"]})
    kept = plain["optimizer"]["state"]
    for name in want["exp_avg"]:
        assert torch.equal(kept[name]["exp_avg"], want["exp_avg"][name])
        assert kept[name]["step"] == 3
    assert "frozen" not in kept
    # And back: the plain file has all that the checkpoint had.
    torch_save_to_dcp(whole, tmp_path / "again")
    worlds(4).run(cases.load, str(tmp_path / "again"), "zero3", want)


def test_c4_plain_pytorch_writes_it(worlds: Worlds, tmp_path: Path) -> None:
    model = plain_model()
    dcp_save({"model": model.state_dict()}, checkpoint_id=tmp_path / "plain", no_dist=True)
    weights = {name: param.detach() for name, param in model.named_parameters()}
    worlds(2).run(cases.load_plain, str(tmp_path / "plain"), "zero3", weights)
    worlds(1).run(cases.load_plain, str(tmp_path / "plain"), "ddp", weights)


def test_c4_fsdp2_writes_it(worlds: Worlds, tmp_path: Path) -> None:
    want = worlds(2).run(cases.save_fsdp2, str(tmp_path / "saved"))[0]
    worlds(4).run(cases.load_fsdp2, str(tmp_path / "saved"), "zero3", want)
    worlds(1).run(cases.load_fsdp2, str(tmp_path / "saved"), "ddp", want)


def test_c4_an_optimizer_without_tensors(worlds: Worlds, tmp_path: Path) -> None:
    want = worlds(2).run(cases.save, str(tmp_path / "saved"), "zero3", "sgd")[0]
    worlds(1).run(cases.load, str(tmp_path / "saved"), "zero3", want, optimizer="sgd")


@pytest.mark.parametrize(
    ("world_size", "strategy", "scenario"),
    [(1, "zero3", GPT), (2, "zero3", GPT), (2, "zero3", ASSORTED), (2, "zero1", ASSORTED), (4, "hfsdp", GPT)],
    ids=["1-zero3-gpt", "2-zero3-gpt", "2-zero3-assorted", "2-zero1-assorted", "4-hfsdp-gpt"],
)
def test_training_goes_on_to_the_last_bit(
    worlds: Worlds, tmp_path: Path, world_size: int, strategy: str, scenario: Scenario
) -> None:
    worlds(world_size).run(cases.goes_on, str(tmp_path / "saved"), strategy, scenario)


def test_orders_are_of_one_model(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(cases.orders_of_another_model, str(tmp_path / "saved"))


def test_what_was_unfrozen_has_its_own_step(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(cases.unfrozen, str(tmp_path / "saved"))


def test_what_is_beside_tensors_comes_back(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(cases.beside_tensors, str(tmp_path / "saved"))


def test_c3_saved_while_gathers_are_outstanding(worlds: Worlds, tmp_path: Path) -> None:
    for num_outstanding, error in worlds(2).run(cases.while_gathers_are_outstanding, str(tmp_path / "saved")):
        assert num_outstanding > 0
        assert error == "load_checkpoint: expected no running iteration, got one; load before the with block, or after."


def test_a_donated_state_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    for text in worlds(2).run(cases.donated, str(tmp_path / "all"), None):
        assert text.startswith("DonatedStateError: save_checkpoint: expected a usable state")
    first, second = worlds(2).run(cases.donated, str(tmp_path / "one"), 1)
    assert second.startswith("DonatedStateError: save_checkpoint")
    assert first.startswith("CheckpointError: rank 1: save_checkpoint: expected a usable state")


def test_halves_of_the_world_save_their_own(worlds: Worlds, tmp_path: Path) -> None:
    worlds(4).run(cases.groups_of_ranks, str(tmp_path))


def test_saving_takes_no_copies(worlds: Worlds, tmp_path: Path) -> None:
    ((nbytes, unit_nbytes, above),) = worlds(1).run(cases.memory_above, str(tmp_path / "saved"))
    assert nbytes > 30 * unit_nbytes
    assert above < unit_nbytes, f"{above} bytes above"
    shutil.rmtree(tmp_path)
