"""The directories of a checkpoint: written beside, and renamed when complete.

A save to ``run`` leaves one of these, at whatever moment it is killed::

    run  run.tmp-new        before the first rename: the old one is loaded, what is beside is ignored
    run.tmp-new run.tmp-old between the two renames: the new one, complete by then, is loaded
    run  run.tmp-old        after the second: the new one is loaded

The next save puts the second right and removes what is left of any. A directory is complete once it has ``.metadata``,
which is written last, when all files of all ranks are on the disk.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from functional_fsdp.core.errors import CheckpointError, unexpected
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.checkpoint.saved import METADATA

DATA_SUFFIX = ".distcp"


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Return where a checkpoint called ``path`` is, links followed: what is renamed must be a directory.

    Raises:
        ValueError: it names no directory of its own.
    """
    found = Path(os.path.realpath(path))
    if not os.fspath(path) or not found.name:
        raise ValueError(
            unexpected("path", "a directory of its own", repr(os.fspath(path)), "name one, e.g. 'run/last'")
        )
    return found


def find_checkpoint(path: Path) -> Path:
    """Return the directory that holds the last complete checkpoint saved to ``path``.

    Raises:
        CheckpointError: there is none.
    """
    new, old = _new(path), _old(path)
    if not path.exists() and old.is_dir():
        # Killed between the two renames.
        return new if _is_complete(new) else old
    if _is_complete(path):
        return path
    expected, instead = f"a complete checkpoint, with a file {METADATA}", "load another"
    if not path.exists():
        got = "nothing" + (f", and {new.name} beside it, of a save that was killed" if new.exists() else "")
    elif not path.is_dir():
        got = "no directory"
    else:
        kept = len(_data_files(path))
        got = f"{kept} files {DATA_SUFFIX}, of a save that was killed" if kept else "a directory without one"
    raise CheckpointError(unexpected(str(path), expected, got, instead))


def begin(path: Path) -> None:
    """Clean up after killed saves, and make a new directory beside ``path`` to write into.

    Raises:
        CheckpointError: it cannot be made, or what is at ``path`` is no checkpoint, and would be lost.
    """
    with _naming(_new(path)):
        _begin(path, _new(path), _old(path))


def _begin(path: Path, new: Path, old: Path) -> None:
    if not path.exists() and old.is_dir():
        (new if _is_complete(new) else old).rename(path)
    _check_replaceable(path)
    for left in (new, old):
        if left.exists():
            shutil.rmtree(left)
    new.mkdir(parents=True)


def commit(path: Path) -> None:
    """Put the complete directory beside ``path`` in its place.

    Raises:
        CheckpointError: it cannot be done; what was at ``path`` is there again.
    """
    with _naming(path):
        _commit(path, _new(path), _old(path))
    # It is saved: what cannot be removed now is removed by the next save.
    shutil.rmtree(_old(path), ignore_errors=True)


def _commit(path: Path, new: Path, old: Path) -> None:
    _sync_directory(new)
    replaces = path.exists()
    if replaces:
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        if replaces:
            old.rename(path)
        raise
    _sync_directory(path.parent)


def discard(path: Path) -> None:
    """Remove what a failed save has written beside ``path``."""
    shutil.rmtree(_new(path), ignore_errors=True)


def write_tensors(path: Path, rank: int, tensors: Sequence[tuple[WriteItem, Tensor]]) -> list[WriteResult]:
    """Write a rank's tensors beside ``path``, into one file, and wait until they are on the disk.

    A view is written as it lies in memory; of a tensor on a device there is one copy at a time.

    Raises:
        CheckpointError: it cannot be written; the message names the file.
    """
    file = _new(path) / f"__{rank}_0{DATA_SUFFIX}"
    results = []
    with _naming(file), open(file, "xb") as stream:
        for item, tensor in tensors:
            start = stream.tell()
            torch.save(_alone(tensor), stream)
            nbytes = stream.tell() - start
            results.append(WriteResult(item.index, nbytes, _torch.storage_place(file.name, start, nbytes)))
        _sync(stream)
        _sync_directory(file.parent)
    return results


def write_metadata(path: Path, metadata: Metadata, results: Sequence[list[WriteResult]]) -> None:
    """Write what makes the directory beside ``path`` a complete checkpoint.

    Raises:
        CheckpointError: it cannot be written; the message names the file.
    """
    with _naming(_new(path) / METADATA):
        FileSystemWriter(_new(path), sync_files=True).finish(metadata, list(results))


def _alone(tensor: Tensor) -> Tensor:
    """Return ``tensor``, contiguous, on CPU and with nothing else in its storage, of which all would be written."""
    if not tensor.is_cpu:
        return tensor.cpu()
    begin = tensor.storage_offset() * tensor.element_size()
    # Not a copy: a slice of a storage shares its memory.
    storage = tensor.untyped_storage()[begin : begin + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.size(), tensor.stride())


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Raise ``CheckpointError`` with the name of ``file`` for what the system says of a write to it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = _system_error(error)
        if cause is None:
            raise
        got = f"{cause.strerror or cause} ({errno.errorcode.get(cause.errno or 0, 'no code')})"
        instead = "make room or see its rights; the checkpoint before is as it was"
        raise CheckpointError(unexpected(str(file), "to write it", got, instead)) from error


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the error of the system that an error came from; PyTorch's writer raises another in its place."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _check_replaceable(path: Path) -> None:
    if not path.exists():
        return
    expected, instead = "nothing or a checkpoint, which is replaced", "move it away or save elsewhere"
    if not path.is_dir():
        raise CheckpointError(unexpected(str(path), expected, "no directory", instead))
    others = sorted(
        entry.name for entry in path.iterdir() if entry.suffix != DATA_SUFFIX and not entry.name.startswith(METADATA)
    )
    if others:
        raise CheckpointError(unexpected(str(path), expected, f"a directory with {others[0]!r}", instead))


def _is_complete(directory: Path) -> bool:
    return (directory / METADATA).is_file()


def _data_files(directory: Path) -> list[Path]:
    return [entry for entry in directory.iterdir() if entry.suffix == DATA_SUFFIX]


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _sync_directory(directory: Path) -> None:
    """Wait until what was made or renamed in ``directory`` is on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot, and need not.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-new")


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-old")
