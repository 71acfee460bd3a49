"""Reading boxes of a checkpoint's tensors into place, each chunk once."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, cast

import torch
from torch import Tensor

from functional_fsdp.core.errors import CheckpointError, unexpected
from functional_fsdp.runtime.checkpoint.boxes import Box, fill, narrow_to, overlap
from functional_fsdp.runtime.checkpoint.saved import Saved, SavedChunk, SavedTensor

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_DAMAGED = "it is damaged: load another"


@dataclass(frozen=True, slots=True)
class Read:
    """A chunk to read, and what of it goes where.

    Attributes:
        name: of the tensor in the checkpoint.
        dtype: of the tensor.
        chunk: that is read whole.
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
            CheckpointError: something there is not what the metadata says.
        """
        for _, read in sorted(self._reads.items()):
            values = self._load(read)
            for part, target in read.parts:
                target.copy_(narrow_to(values, read.chunk.box, part))

    def _load(self, read: Read) -> Tensor:
        file = self._saved.directory / read.chunk.file
        where = f"{file}: {read.name!r} in bytes {read.chunk.start} to {read.end}"
        expected = f"a tensor of {read.dtype} {[*read.chunk.box.sizes]}"
        try:
            with open(file, "rb") as stream:
                # With weights_only it builds tensors and containers, whatever the file says.
                part = cast("BinaryIO", _Slice(stream, read.chunk))
                values: object = torch.load(part, map_location="cpu", weights_only=True)
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            got = f"{type(error).__name__}: {first_line}"
            raise CheckpointError(unexpected(where, expected, got, _DAMAGED)) from error
        if type(values) is not Tensor or values.layout != torch.strided:
            raise CheckpointError(unexpected(where, expected, f"a {type(values).__name__}", _DAMAGED))
        if values.dtype != read.dtype or tuple(values.shape) != read.chunk.box.sizes:
            raise CheckpointError(unexpected(where, expected, f"{values.dtype} {[*values.shape]}", _DAMAGED))
        return values


class _Slice(io.RawIOBase):
    """The bytes of a file that hold a chunk, as a file of their own."""

    def __init__(self, stream: io.BufferedReader, chunk: SavedChunk) -> None:
        self._stream, self._start, self._nbytes = stream, chunk.start, chunk.nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        self._stream.seek(self._start + self._position)
        num_read = self._stream.readinto(memoryview(buffer)[: max(self._nbytes - self._position, 0)])
        self._position += num_read
        return num_read
