"""Row C5, a save that is killed or fails, and row C6, checkpoints that are damaged, foreign or do harm."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.runtime import cases_saving_faults as cases
from tests.runtime.models import PATHS, Scenario
from tests.runtime.models_saved import Assorted, plain_model
from tests.runtime.ranks import Returned
from tests.runtime.worlds import Died, Worlds

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_c5_killed_at_any_use_of_the_file_system(worlds: Worlds, tmp_path: Path) -> None:
    ((num_moments, found),) = worlds(1).run(cases.killed_anywhere, str(tmp_path))
    assert num_moments > 12
    # Between the two renames, and after them, the new one is there.
    assert found["nothing"] > 5 and found["old"] > 5 and found["new"] > 1, found


def test_c5_all_ranks_killed_while_writing(worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    outcomes = worlds(2).outcomes(cases.killed_together, str(path))
    # The store dies with rank 0, which the other may notice before it comes so far.
    assert isinstance(outcomes[0], Died) and not isinstance(outcomes[1], Returned), outcomes
    assert (tmp_path / "saved.tmp-new").is_dir()
    worlds(1).run(cases.loads, str(path), 0)


def test_c5_a_full_disk_on_one_rank(worlds: Worlds, tmp_path: Path) -> None:
    texts = worlds(2).run(cases.disk_full, str(tmp_path / "saved"))
    file = tmp_path / "saved.tmp-new" / "__1_0.distcp"
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"CheckpointError: rank 1: {file}: expected to write it, got File too large (EFBIG);")


def test_ranks_that_do_not_save_alike_are_named(worlds: Worlds, tmp_path: Path) -> None:
    for texts in worlds(2).run(cases.not_alike, str(tmp_path)):
        path = tmp_path / "saved"
        assert f"the same path on all ranks, got {path}-0 on rank 0 and {path}-1 on rank 1" in texts["path"]
        assert "the same step on all ranks, got 0 on rank 0 and 1 on rank 1" in texts["step"]
        assert "the same model on all ranks, got 0 on rank 0 and 1 on rank 1" in texts["digest"]
        assert "rank 1: " in texts["half"] and "expected flat shards ['float32', " in texts["half"]
        assert "rank 0: " in texts["dtype"] and "'float64' of torch.float64" in texts["dtype"]


def test_what_is_no_checkpoint_is_not_replaced(worlds: Worlds, tmp_path: Path) -> None:
    for texts in worlds(2).run(cases.no_place_to_save, str(tmp_path)):
        replaced = "expected nothing or a checkpoint, which is replaced"
        assert f"{tmp_path / 'file'}: {replaced}, got no directory" in texts["file"]
        assert f"{tmp_path / 'notes'}: {replaced}, got a directory with 'notes.txt'" in texts["notes"]
        assert f"{tmp_path / 'file' / 'saved'}.tmp-new: expected to write it, got Not a directory" in texts["inside"]
        assert "expected a directory of its own, got '/'" in texts["nothing"]
        assert "expected a directory of its own, got ''" in texts["no name"]


class Poison:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.marker}'",)


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks; tests take copies."""
    path = tmp_path_factory.mktemp("good") / "saved"
    worlds(2).run(cases.save_some, str(path))
    return path


def edited(saved: Path, to: Path, edit: Callable[[Metadata], None]) -> Path:
    """Return a copy whose metadata was changed."""
    shutil.copytree(saved, to)
    metadata = FileSystemReader(to).read_metadata()
    edit(metadata)
    (to / ".metadata").write_bytes(pickle.dumps(metadata))
    return to


def replaced(saved: Path, to: Path, name: str, value: object) -> Path:
    """Return a copy in which the bytes of a tensor are those of another object, and the metadata says where."""
    shutil.copytree(saved, to)
    metadata = FileSystemReader(to).read_metadata()
    for index, place in metadata.storage_data.items():
        if index.fqn == name:
            file = to / place.relative_path
            place.offset = file.stat().st_size
            with open(file, "ab") as stream:
                torch.save(value, stream)
            place.length = file.stat().st_size - place.offset
    (to / ".metadata").write_bytes(pickle.dumps(metadata))
    return to


def test_c6_no_code_of_a_file_is_run(worlds: Worlds, saved: Path, tmp_path: Path) -> None:
    marker = tmp_path / "was here"
    poison = Poison(marker)

    def into_storage(metadata: Metadata) -> None:
        metadata.storage_data[MetadataIndex("x")] = poison

    in_whole = tmp_path / "whole"
    shutil.copytree(saved, in_whole)
    (in_whole / ".metadata").write_bytes(pickle.dumps(poison))
    in_old = tmp_path / "old"
    shutil.copytree(saved, in_old)
    (in_old / ".metadata").write_bytes(pickle.dumps(poison, protocol=0))
    paths = [
        in_whole,
        in_old,
        edited(saved, tmp_path / "part", into_storage),
        replaced(saved, tmp_path / "tensor", "model.one", poison),
        replaced(saved, tmp_path / "record", "functional_fsdp", poison),
        replaced(saved, tmp_path / "inside", "model.cube", [torch.ones(2), poison]),
    ]
    both = worlds(2).run(cases.refusals, [str(path) for path in paths])
    assert not marker.exists()
    for texts in both:
        for path, text in zip(paths[:3], texts[:3], strict=True):
            assert (
                f"{path / '.metadata'}: expected only records of torch.distributed.checkpoint, got posix.system" in text
            )
        assert "__0_0.distcp: 'model.one' in bytes" in texts[3] and "posix.system" in texts[3]
        assert "__0_0.distcp: 'functional_fsdp' in bytes" in texts[4] and "posix.system" in texts[4]
        assert "distcp: 'model.cube' in bytes" in texts[5] and "posix.system" in texts[5]
    # The poison works: else this test shows nothing.
    pickle.loads((in_whole / ".metadata").read_bytes())
    assert marker.exists()


def test_c6_damaged_ones_are_refused(worlds: Worlds, saved: Path, tmp_path: Path) -> None:
    expected: dict[Path, tuple[str, ...]] = {}

    def copy(name: str, *text: str) -> Path:
        expected[tmp_path / name] = text
        return tmp_path / name

    def hole(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["model.cube"]
        del entry.chunks[0]

    def twice(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["model.turned"]
        entry.chunks.append(entry.chunks[0])

    def outside(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = f"../{saved.name}/{place.relative_path}"

    def transformed(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.transform_descriptors = ["stream.zstd"]

    def lost(metadata: Metadata) -> None:
        metadata.storage_data = {i: p for i, p in metadata.storage_data.items() if i.fqn != "model.cube"}

    def no_list(metadata: Metadata) -> None:
        metadata.state_dict_metadata = [1, 2]  # type: ignore[assignment]

    edited(saved, copy("hole", ".metadata: 'model.cube': expected chunks with each element"), hole)
    edited(saved, copy("twice", ".metadata: 'model.turned': expected chunks with each element"), twice)
    edited(saved, copy("outside", ".metadata: expected metadata of", "a file beside it for"), outside)
    edited(saved, copy("transformed", ".metadata: expected metadata of", "transformed by ['stream.zstd']"), transformed)
    edited(saved, copy("lost", ".metadata: expected metadata of", "a place of the chunk of 'model.cube'"), lost)
    edited(saved, copy("no list", ".metadata: expected metadata of a checkpoint"), no_list)
    cut = copy("cut", "distcp: expected a file of at least", "got one of")
    shutil.copytree(saved, cut)
    os.truncate(cut / "__1_0.distcp", 3000)
    gone = copy("gone", "__0_0.distcp: expected a file of at least", "got none")
    shutil.copytree(saved, gone)
    (gone / "__0_0.distcp").unlink()
    short = copy("short", ".metadata: expected metadata of a checkpoint")
    shutil.copytree(saved, short)
    os.truncate(short / ".metadata", 1000)
    zeroed = copy("zeroed", "__1_0.distcp: ", "expected a tensor of")
    shutil.copytree(saved, zeroed)
    (zeroed / "__1_0.distcp").write_bytes(bytes((saved / "__1_0.distcp").stat().st_size))
    for name, value in {
        "other dtype": torch.ones(1, dtype=torch.float64),
        "other shape": torch.ones(2),
        "a list": [torch.ones(1)],
        "a number": 3,
    }.items():
        replaced(
            saved,
            copy(name, "__0_0.distcp: 'model.one' in bytes", "expected a tensor of torch.float32 [1]"),
            "model.one",
            value,
        )
    replaced(
        saved,
        copy("record", "__0_0.distcp: 'functional_fsdp' in bytes", "got torch.uint8 [0]"),
        "functional_fsdp",
        torch.zeros(0, dtype=torch.uint8),
    )
    incomplete = copy(
        "incomplete", "incomplete: expected a complete checkpoint", "got 2 files .distcp, of a save that was killed"
    )
    shutil.copytree(saved, incomplete)
    (incomplete / ".metadata").unlink()
    copy("empty", "got a directory without one").mkdir()
    copy("file", "got no directory").write_text("")
    copy("nowhere", "got nothing")
    for texts in worlds(2).run(cases.refusals, [str(path) for path in expected]):
        for (path, wanted), text in zip(expected.items(), texts, strict=True):
            assert str(path) in text and all(part in text for part in wanted), f"{path.name}: {text}"


class Wider(Assorted):
    """Another width."""

    def __init__(self) -> None:
        super().__init__(width=12)


class Longer(Assorted):
    """One parameter more."""

    def __init__(self) -> None:
        super().__init__(with_extra=True)


class AllDouble(Assorted):
    """One parameter of another dtype."""

    def to(self, *args: object, **kwargs: object) -> Assorted:  # type: ignore[override]
        """Have nothing in float32."""
        super().to()
        self.one.data = self.one.data.double()
        return self


class Frozen(Assorted):
    """One parameter that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.one.requires_grad_(False)


class Thawed(Assorted):
    """One parameter more that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen.requires_grad_(True)


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        (PATHS, "expected the parameters of this model, got 'stem.weight', 'stem.bias', 'a.norm.weight'"),
        (Scenario(Wider), "parameter 'first.up.weight' to be torch.float64 [12, 8], got torch.float64 [11, 8]"),
        (Scenario(Longer), "expected the parameters of this model, got 'extra' missing"),
        (Scenario(AllDouble), "parameter 'one' to be torch.float64 [1], got torch.float32 [1]"),
        (Scenario(Frozen), "expected no optimizer tensors of 'one', which does not train, got"),
        (Scenario(Thawed), "expected optimizer tensors 'exp_avg', 'exp_avg_sq', 'step' of 'frozen', got none"),
    ],
    ids=["other", "shape", "missing", "dtype", "frozen", "thawed"],
)
def test_c6_another_model_is_refused(worlds: Worlds, saved: Path, scenario: Scenario, text: str) -> None:
    for (got,) in worlds(2).run(cases.refusals, [str(saved)], scenario):
        assert f"CheckpointError: {saved / '.metadata'}: expected" in got and text in got, got


def test_c6_what_is_not_known_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    weights = plain_model().state_dict()
    kept = {name: {"exp_avg": torch.zeros_like(value)} for name, value in weights.items() if name != "mean"}
    items: dict[str, dict[str, object]] = {
        "bytes": {"model": weights, "epoch": 3},
        "tensor": {"model": weights, "epoch": torch.tensor(3)},
        "parameter": {"model": weights | {"new": torch.ones(2)}},
        "optimizer": {"model": weights, "optimizer": {"state": {"new": {"exp_avg": torch.ones(2)}}}},
        "shape": {"model": weights, "optimizer": {"state": kept | {"one": {"exp_avg": torch.ones(2)}}}},
        "pickles": {"model": weights, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}},
    }
    wanted = {
        "bytes": "expected tensors only, got 'epoch' as bytes, a pickle that could run code",
        "tensor": "got 'epoch' unknown",
        "parameter": "got 'model.new' unknown",
        "optimizer": "got 'optimizer.state.new.exp_avg' unknown",
        "shape": "'exp_avg' of 'one' to be torch.float32 [1], got torch.float32 [2]",
        "pickles": "expected tensors only, got 'optimizer.param_groups.0.lr' as bytes",
    }
    for name, item in items.items():
        dcp_save(item, checkpoint_id=tmp_path / name, no_dist=True)
    for texts in worlds(2).run(cases.refusals, [str(tmp_path / name) for name in items]):
        for name, text in zip(items, texts, strict=True):
            assert f"{tmp_path / name / '.metadata'}: " in text and wanted[name] in text, f"{name}: {text}"


def test_c6_another_optimizer_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(cases.save_some, str(tmp_path / "saved"), optimizer="sgd")
    for text in worlds(2).run(cases.other_optimizer, str(tmp_path / "saved")):
        assert "expected optimizer tensors 'exp_avg', 'exp_avg_sq', 'step' of 'scale', got none" in text


def test_ranks_that_do_not_load_alike_are_named(worlds: Worlds, saved: Path, tmp_path: Path) -> None:
    worlds(2).run(cases.save_some, str(tmp_path / "other"))
    for text in worlds(2).run(cases.other_checkpoint, [str(saved), str(tmp_path / "other")]):
        assert "expected the same checkpoint on all ranks, got another on rank 1 than on rank 0" in text
    first, second = worlds(2).run(cases.other_checkpoint, [str(saved), str(tmp_path / "nowhere")])
    assert first.startswith(f"CheckpointError: load_checkpoint: rank 1: CheckpointError: {tmp_path / 'nowhere'}")
    assert second.startswith(f"CheckpointError: {tmp_path / 'nowhere'}: expected a complete checkpoint")


def test_a_checkpoint_that_is_replaced_while_it_is_read(worlds: Worlds, tmp_path: Path) -> None:
    (text,) = worlds(1).run(cases.replaced_meanwhile, str(tmp_path / "saved"))
    assert f"{tmp_path / 'saved'}: expected it to stay as it is while it is read, got another save" in text


def test_saving_and_loading_after_an_abort(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(cases.after_an_abort, str(tmp_path / "saved"))


def test_parameters_of_one_key_have_one_step(worlds: Worlds, tmp_path: Path) -> None:
    for text in worlds(2).run(cases.unequal_steps, str(tmp_path)):
        assert (
            "expected one 'step' for all parameters of 'float64', got 2.0 for 'scale' and 1.0 for 'head.weight'" in text
        )
