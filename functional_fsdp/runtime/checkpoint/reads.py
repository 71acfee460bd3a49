"""Reading boxes of a checkpoint's tensors into place, each chunk once."""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import dataclass
from typing import BinaryIO, cast

import torch
from torch import Tensor

from functional_fsdp.core.errors import CheckpointError, unexpected
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.checkpoint.boxes import Box, fill, narrow_to, overlap
from functional_fsdp.runtime.checkpoint.saved import Saved, SavedChunk, SavedTensor, check_unchanged
from functional_fsdp.runtime.checkpoint.tensor_file import FileSlice, elements_start

_DAMAGED = "it is damaged: load another"


@dataclass(frozen=True, slots=True)
class Read:
    """A chunk to read, and what of it goes where.

    Attributes:
        name: of the tensor in the checkpoint.
        dtype: of the tensor.
        chunk: that holds the parts.
        parts: boxes of the tensor, with the views that they are copied to.
    """

    name: str
    dtype: torch.dtype
    chunk: SavedChunk
    parts: list[tuple[Box, Tensor]]

    @property
    def end(self) -> int:
        """One past the last byte in the file."""
        return self.chunk.start + self.chunk.nbytes


class Reads:
    """What is to be read of a checkpoint.

    Args:
        saved: the checkpoint.
    """

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self._reads: dict[tuple[str, int, str], Read] = {}

    def add(self, tensor: SavedTensor, box: Box, target: Tensor) -> None:
        """Let ``box`` of a tensor be read into ``target``, contiguous and of as many elements.

        Raises:
            CheckpointError: the chunks of the tensor do not fill the box.
        """
        found = [(chunk, part) for chunk in tensor.chunks if (part := overlap(chunk.box, box)) is not None]
        if box.numel and not fill(box, [part for _, part in found]):
            where = f"{self._saved.metadata_file}: {tensor.name!r}"
            got = ", ".join(str(part) for _, part in found[:4]) or "none"
            raise CheckpointError(unexpected(where, f"chunks with each element of {box} once", got, _DAMAGED))
        view = target.view(box.sizes)
        for chunk, part in found:
            key = chunk.file, chunk.start, tensor.name
            read = self._reads.setdefault(key, Read(tensor.name, tensor.dtype, chunk, []))
            read.parts.append((part, narrow_to(view, box, part)))

    def check_files(self) -> None:
        """Check that all files are there and long enough.

        Raises:
            CheckpointError: one is not.
        """
        last: dict[str, Read] = {}
        for read in self._reads.values():
            if read.end >= last.setdefault(read.chunk.file, read).end:
                last[read.chunk.file] = read
        for name, read in last.items():
            file = self._saved.directory / name
            found = file.stat().st_size if file.is_file() else None
            if found is None or found < read.end:
                expected = f"a file of at least {read.end} bytes, for {read.name!r}"
                got = "none" if found is None else f"one of {found}"
                raise CheckpointError(unexpected(str(file), expected, got, _DAMAGED))

    def run(self) -> None:
        """Read all, file by file from begin to end.

        Raises:
            CheckpointError: something there is not what the metadata says, or the checkpoint was replaced meanwhile.
        """
        try:
            for _, read in sorted(self._reads.items()):
                self._run_one(read)
        except CheckpointError:
            check_unchanged(self._saved)
            raise
        check_unchanged(self._saved)

    def _run_one(self, read: Read) -> None:
        file = self._saved.directory / read.chunk.file
        where = f"{file}: {read.name!r} in bytes {read.chunk.start} to {read.end}"
        expected = f"a tensor of {read.dtype} {[*read.chunk.box.sizes]}"
        try:
            with open(file, "rb", buffering=0) as stream:
                got = _read(stream, read)
        except pickle.UnpicklingError as error:
            # Not from it: PyTorch's text goes on to advise to load the file with all that it may run.
            raise CheckpointError(unexpected(where, expected, _refused(error), _DAMAGED)) from None
        except Exception as error:
            got = f"{type(error).__name__}: {_first_line(str(error))}"
            raise CheckpointError(unexpected(where, expected, got, _DAMAGED)) from error
        if got is not None:
            raise CheckpointError(unexpected(where, expected, got, _DAMAGED))


def _refused(error: pickle.UnpicklingError) -> str:
    """Return what PyTorch says of a pickle that is not only tensors, e.g. which function it names, without advice."""
    told, _, _ = str(error).partition("\n\nCheck the documentation")
    reason = re.split(r"WeightsUnpickler error:|\n\n", told)[-1]
    return f"a pickle that is refused: {_first_line(reason).partition('. ')[0].rstrip('.')}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _read(stream: io.FileIO, read: Read) -> str | None:
    """Read the parts of a chunk; return what is there instead of its tensor, None if it is there."""
    start = elements_start(FileSlice(stream, read.chunk), read.dtype, read.chunk.box.sizes)
    file, parts = FileSlice(stream, read.chunk), read.parts
    if start is not None:
        parts = [pair for pair in parts if not _read_in_place(file, start, read, *pair)]
    if not parts:
        return None
    file.seek(0)
    # With weights_only it builds tensors and containers, whatever the file says.
    values: object = torch.load(cast("BinaryIO", file), map_location="cpu", weights_only=True)
    if type(values) is not Tensor or values.layout != torch.strided:
        return f"a {type(values).__name__}"
    if values.dtype != read.dtype or tuple(values.shape) != read.chunk.box.sizes:
        return f"{values.dtype} {[*values.shape]}"
    for part, target in parts:
        target.copy_(narrow_to(values, read.chunk.box, part))
    return None


def _read_in_place(file: FileSlice, start: int, read: Read, part: Box, target: Tensor) -> bool:
    """Read a part into its place, if it is one range of bytes here and there; return whether it was."""
    source = narrow_to(torch.empty(read.chunk.box.sizes, dtype=read.dtype, device="meta"), read.chunk.box, part)
    if not (source.is_contiguous() and target.is_contiguous() and target.is_cpu):
        return False
    file.seek(start + int(source.storage_offset()) * source.element_size())
    left = _torch.writable_bytes(target)
    while left:
        num_read = file.readinto(left)
        if num_read == 0:
            raise EOFError(f"the file ends {len(left)} bytes too early")
        left = left[num_read:]
    return True
