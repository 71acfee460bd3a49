"""Where in a file of ``torch.save`` the elements of a tensor lie, so that any part of them can be read into place.

``torch.load`` makes a tensor of its own, of all there is, from which the part is copied: twice the memory traffic, and
new memory for each. Such a file is a zip archive whose entry ``data/0`` has the elements as they are, and ``data.pkl``
says what tensor they are. Here that is compared with what the metadata of the checkpoint has promised: where it is the
same, a contiguous tensor and nothing more, its elements can be read as bytes.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from functional_fsdp.runtime.checkpoint.saved import SavedChunk

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_LOCAL_HEADER = struct.Struct("<4s22x2H")
"""Of an entry, in front of its name, an extra field and its bytes: a signature, ..., the lengths of the two."""

_MAX_DESCRIPTION_NBYTES = 1 << 16

_END_NBYTES = 1 << 12
"""All but the elements is at the two ends of a file; read in blocks, it takes two reads instead of some fifteen."""


def elements_start(file: FileSlice, dtype: torch.dtype, sizes: Sequence[int]) -> int | None:
    """Return where in ``file`` the elements of a contiguous tensor begin, None if it has anything else.

    Nothing that the file names is called. ``file`` cannot be used afterwards.
    """
    try:
        start = _elements_start(
            io.BufferedReader(file, _END_NBYTES), torch.empty(tuple(sizes), dtype=dtype, device="meta")
        )
    except Exception:
        # What is damaged fails with almost anything: then torch.load is asked, whose errors say what.
        return None
    return start


def _elements_start(stream: io.BufferedReader, like: torch.Tensor) -> int | None:
    with zipfile.ZipFile(stream) as archive:
        root = archive.infolist()[0].filename.partition("/")[0]
        entries = [archive.getinfo(f"{root}/{name}") for name in ("data.pkl", "byteorder", "data/0")]
        description, byteorder, elements = entries
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            return None
        if description.file_size > _MAX_DESCRIPTION_NBYTES or archive.read(byteorder) != sys.byteorder.encode():
            return None
        storage, *rest = _Unpickler(io.BytesIO(archive.read(description))).load()
    # Of a storage the device, of a tensor whether it wants a gradient is left out.
    found = (*storage[:3], *storage[4:], *rest[:3], *rest[4:])
    if found != ("storage", like.dtype, "0", like.numel(), 0, like.size(), like.stride(), {}):
        return None
    stream.seek(elements.header_offset)
    signature, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    start: int = elements.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
    is_whole = elements.file_size == like.nbytes and start + like.nbytes <= stream.seek(0, os.SEEK_END)
    return start if is_whole and signature == b"PK\x03\x04" else None


class _Unpickler(pickle.Unpickler):
    """Returns the arguments of the call that would make a tensor."""

    def find_class(self, module: str, name: str) -> object:
        """Return what stands for three names; there are no others."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _arguments
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, place: object) -> object:
        """Return what is said of a storage: a word, the dtype, its name, a device, the number of elements."""
        return place


def _arguments(*arguments: object) -> tuple[object, ...]:
    return arguments


_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
"""The dtypes of storages, by the names of their classes. Others are left to ``torch.load``."""


class FileSlice(io.RawIOBase):
    """The bytes of a file that hold a chunk, as a file of their own.

    Attributes:
        nbytes: how many there are.
    """

    def __init__(self, stream: io.FileIO, chunk: SavedChunk) -> None:
        self._stream, self._start, self.nbytes = stream, chunk.start, chunk.nbytes
        self._position = 0

    def readable(self) -> bool:
        """See ``io.IOBase``."""
        return True

    def seekable(self) -> bool:
        """See ``io.IOBase``."""
        return True

    def tell(self) -> int:
        """See ``io.IOBase``."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """See ``io.IOBase``."""
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.nbytes}[whence]
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """See ``io.RawIOBase``."""
        self._stream.seek(self._start + self._position)
        num_read = self._stream.readinto(memoryview(buffer)[: max(self.nbytes - self._position, 0)])
        self._position += num_read
        return num_read
