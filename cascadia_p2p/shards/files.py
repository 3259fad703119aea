"""Writes files that are either whole or absent, and knows their sha256 when they are done."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from cascadia_p2p.shards.manifest import FileEntry

_PIECE = 4 * 2**20
PART = ".part"
"""Suffix of a file that is not finished."""


class WholeFile:
    """A file of known size that appears under its name only when `finish` has put it on the disk.

    Pieces may come in any order; where they come in the order of the file they are hashed as they
    pass, the rest is read back. Bytes that nobody writes are zero. Use it as a context manager: left
    without `finish`, it leaves only the unfinished `.part`.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._part = path.with_name(path.name + PART)
        self._file = self._part.open("w+b", buffering=0)
        self._file.truncate(size)
        self._digest = hashlib.sha256()
        self._hashed = 0

    def write(self, offset: int, values: npt.NDArray[np.generic]) -> None:
        """Put the bytes of an array at an offset.

        Args:
            offset: from the start of the file; the bytes must end within the file.
            values: any shape and type, written in row-major order.
        """
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        self._file.seek(offset)
        written = 0
        while written < len(data):
            written += self._file.write(data[written:])
        if offset == self._hashed:
            self._digest.update(data)
            self._hashed += len(data)

    def settle(self, end: int) -> None:
        """Hash what lies before `end`, all of which has been written."""
        self._file.seek(self._hashed)
        while self._hashed < end:
            data = self._file.read(min(_PIECE, end - self._hashed))
            self._digest.update(data)
            self._hashed += len(data)

    def finish(self) -> FileEntry:
        """Put the file on the disk under its name, and say what it is."""
        self.settle(self.size)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self.path)
        sync_directory(self.path.parent)
        return FileEntry(size=self.size, sha256=self._digest.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def write_whole(path: Path, data: bytes) -> FileEntry:
    """Write a small file so that it is either whole or absent."""
    with WholeFile(path, len(data)) as file:
        file.write(0, np.frombuffer(data, np.uint8))
        return file.finish()


def sync_directory(directory: Path) -> None:
    """Put a directory's entries on the disk, where the system has a way to ask for it."""
    if os.name != "posix":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """The sha256 of a file, in hex.

    Args:
        path: the file.
        progress: told after each piece how many bytes have been read.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_PIECE):
            digest.update(data)
            if progress is not None:
                progress(file.tell())
    return digest.hexdigest()
