"""Bytes of real text to train on: by default the source of the running interpreter's own standard library."""

from __future__ import annotations

import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_FRACTION = 16
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Text:
    """The bytes to train on and the bytes held out, each uint8 `[num_bytes]`."""

    train: Tensor
    held_out: Tensor


def is_ours(file: Path, is_library: bool) -> bool:
    """Return whether to read a file: no hidden one, and of the library neither tests nor what was installed."""
    return not any(part.startswith(".") or (is_library and part in NOT_LIBRARY) for part in file.parts)


def text_files(path: Path | None) -> list[Path]:
    """List the files to read, in an order that the same files have on every rank."""
    root = path or Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        return [root]
    if not root.is_dir():
        sys.exit(f"--data {root}: expected a file or a folder, got neither; check the path")
    files = (file.relative_to(root) for file in root.rglob("*" if path else "*.py"))
    ours = (file for file in files if is_ours(file, path is None) and (root / file).is_file())
    # By checksum of the name: a folder's files are alike, so what is held out should come from all of them.
    return [root / file for file in sorted(ours, key=lambda file: (zlib.crc32(file.as_posix().encode()), file))]


def read_text(path: Path | None, sequence: int) -> Text:
    """Read the text and split it by file; a sixteenth is held out (of a single file, its last sixteenth)."""
    contents = [file.read_bytes() for file in text_files(path)]
    if len(contents) == 1:
        cut = len(contents[0]) - len(contents[0]) // HELD_OUT_FRACTION
        train, held_out = contents[0][:cut], contents[0][cut:]
    else:
        cut = max(1, len(contents) // HELD_OUT_FRACTION)
        held_out, train = b"".join(contents[:cut]), b"".join(contents[cut:])
    for name, part in (("train on", train), ("hold out", held_out)):
        if len(part) <= sequence:
            need = f"expected more than {sequence} bytes to {name}, got {len(part)}"
            sys.exit(f"--data {path}: {need}; give more text or a smaller --sequence")
    return Text(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out)))


def windows(text: Tensor, starts: Tensor, sequence: int, device: torch.device) -> Tensor:
    """Cut int64 `[*starts.shape, sequence + 1]` from the text: the inputs, and shifted by one the targets."""
    positions = starts[..., None] + torch.arange(sequence + 1)
    return text[positions].long().to(device)
