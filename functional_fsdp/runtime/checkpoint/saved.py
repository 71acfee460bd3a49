"""What a checkpoint of ``torch.distributed.checkpoint`` says of itself, read without running anything of it.

Its ``.metadata`` is a pickle, and a pickle may call any function there is. So only DCP's own records are let in, by name,
and what they hold is checked and copied into the records of this file before anything looks at it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from pathlib import Path, PurePath

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from functional_fsdp.core.errors import CheckpointError, unexpected
from functional_fsdp.runtime.checkpoint.boxes import Box

METADATA = ".metadata"
"""Name of the file that is written last, so that a directory with it is a complete checkpoint."""

_DCP = "torch.distributed.checkpoint"
_ALLOWED = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        # Returns one of the layouts, such as torch.strided, by name.
        ("torch.serialization", "_get_layout"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        (f"{_DCP}.metadata", "BytesStorageMetadata"),
        (f"{_DCP}.metadata", "ChunkStorageMetadata"),
        (f"{_DCP}.metadata", "Metadata"),
        (f"{_DCP}.metadata", "MetadataIndex"),
        (f"{_DCP}.metadata", "StorageMeta"),
        (f"{_DCP}.metadata", "TensorProperties"),
        (f"{_DCP}.metadata", "TensorStorageMetadata"),
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    }
)
_PATHS = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"})


@dataclass(frozen=True, slots=True)
class SavedChunk:
    """A box of a tensor, and the bytes of a file that hold it."""

    box: Box
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint, in chunks; empty ones are left out."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[SavedChunk, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint.

    Attributes:
        directory: where it is.
        tensors: by name.
        digest: of its metadata: equal where ranks read the same one.
    """

    directory: Path
    tensors: dict[str, SavedTensor]
    digest: str

    @property
    def metadata_file(self) -> Path:
        """The file that says what there is."""
        return self.directory / METADATA


def read_saved(directory: Path) -> Saved:
    """Return what a checkpoint says of itself.

    Raises:
        CheckpointError: it cannot be read, names something that is no record of DCP, or is damaged.
    """
    file = directory / METADATA
    text = _read(file)
    try:
        metadata: object = _Unpickler(BytesIO(text), file).load()
        tensors = {tensor.name: tensor for tensor in _tensors(metadata, file)}
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged pickle fails with almost anything.
        got = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            unexpected(str(file), "metadata of a checkpoint", got, "it is damaged: load another")
        ) from error
    return Saved(directory, tensors, _digest(text))


def check_unchanged(saved: Saved) -> None:
    """Check that a checkpoint is still the one that was read: each save writes other metadata.

    Raises:
        CheckpointError: it was replaced in between, so that what was read may be of both.
    """
    if _digest(_read(saved.metadata_file)) != saved.digest:
        expected, got = "it to stay as it is while it is read", "another save, which replaced it"
        raise CheckpointError(unexpected(str(saved.directory), expected, got, "load it again"))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        got, instead = error.strerror or str(error), "see its rights, and whether it was replaced meanwhile"
        raise CheckpointError(unexpected(str(file), "a file", got, instead)) from error


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=16).hexdigest()


class _Unpickler(pickle.Unpickler):
    """Finds what a list allows, and nothing else."""

    def __init__(self, stream: BytesIO, file: Path) -> None:
        super().__init__(stream)
        self._file = file

    def find_class(self, module: str, name: str) -> object:
        """Return the class of that name, if it is a record of DCP."""
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return PurePath
        # Not getattr: torch imports some of its parts when they are asked for.
        found = vars(torch).get(name) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        expected, got = "only records of torch.distributed.checkpoint", f"{module}.{name}, which could run code"
        raise CheckpointError(unexpected(str(self._file), expected, got, "do not trust this file: load another"))


def _tensors(metadata: object, file: Path) -> Iterator[SavedTensor]:
    _check(isinstance(metadata, Metadata), f"a record of Metadata, got {type(metadata).__name__}")
    assert isinstance(metadata, Metadata)
    stored: object = metadata.storage_data
    _check(isinstance(stored, dict), f"a dict of storage_data, got {type(stored).__name__}")
    assert isinstance(stored, dict)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            got = f"{name!r} as bytes, a pickle that could run code"
            raise CheckpointError(unexpected(str(file), "tensors only", got, "save it without that item"))
        _check(isinstance(entry, TensorStorageMetadata), f"a tensor {name!r}, got {type(entry).__name__}")
        dtype, shape = entry.properties.dtype, tuple(entry.size)
        _check(isinstance(dtype, torch.dtype), f"a dtype of {name!r}, got {dtype!r}")
        _check(_are_lengths(shape), f"a shape of {name!r}, got {shape!r}")
        chunks = tuple(_chunk(name, shape, chunk, stored) for chunk in entry.chunks if 0 not in chunk.sizes)
        yield SavedTensor(name, dtype, shape, chunks)


def _chunk(name: str, shape: tuple[int, ...], chunk: ChunkStorageMetadata, stored: dict[object, object]) -> SavedChunk:
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    _check(_are_lengths(box.offsets + box.sizes) and box.fits(shape), f"a chunk of {name!r} inside {shape}, got {box}")
    place: object = stored.get(MetadataIndex(name, box.offsets))
    _check(place is not None, f"a place of the chunk of {name!r} at {box.offsets}, got none")
    transforms = getattr(place, "transform_descriptors", None)
    _check(not transforms, f"{name!r} as it is, got it transformed by {transforms!r}")
    found, start, nbytes = (getattr(place, field, None) for field in ("relative_path", "offset", "length"))
    _check(_are_lengths((start, nbytes)), f"a range of bytes of {name!r}, got {start!r} and {nbytes!r}")
    is_inside = isinstance(found, str) and PurePath(found).name == found and found not in ("", ".", "..")
    _check(is_inside, f"a file beside it for {name!r}, got {found!r}")
    assert isinstance(found, str) and isinstance(start, int) and isinstance(nbytes, int)
    return SavedChunk(box, found, start, nbytes)


def _are_lengths(values: tuple[object, ...]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)


def _check(is_good: bool, text: str) -> None:
    if not is_good:
        raise ValueError(f"expected {text}")
