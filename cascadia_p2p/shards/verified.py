"""Remembers which files were read in full and found good, so that a start need not read them again."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from cascadia_p2p.errors import ShardError
from cascadia_p2p.shards.files import write_whole

_NAME = "verified.json"


class FileState(BaseModel):
    """What changes when a file does."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    size: int
    mtime_ns: int


class _Known(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    state: FileState
    sha256: str


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    files: dict[str, _Known] = {}


class VerifiedFiles:
    """Files by path, size and time of change, with the sha256 that they had.

    Args:
        state_dir: keeps the memory in a file there; None keeps nothing. A memory that can not be read
            is an empty one.
    """

    def __init__(self, state_dir: Path | None) -> None:
        self._path = None if state_dir is None else state_dir / _NAME
        self._table = _Table()
        if self._path is not None:
            try:
                self._table = _Table.model_validate_json(self._path.read_bytes())
            except (OSError, ValidationError):
                self._table = _Table()

    def known(self, path: Path, state: FileState, sha256: str) -> bool:
        """Whether the file was found to have this sha256 when it was in this state."""
        return self._table.files.get(_key(path)) == _Known(state=state, sha256=sha256)

    def add(self, path: Path, state: FileState, sha256: str) -> None:
        """Remember what a file had when it was in this state."""
        self._table.files[_key(path)] = _Known(state=state, sha256=sha256)

    def save(self) -> None:
        """Write the memory, without the files that are no longer there; what is not kept is read again."""
        if self._path is None:
            return
        self._table.files = {key: known for key, known in self._table.files.items() if Path(key).exists()}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, self._table.model_dump_json().encode())


def file_state(path: Path) -> FileState:
    """The file's state now.

    Raises:
        ShardError: it can not be looked at.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise ShardError(f"{path} can not be read: {error.strerror}") from error
    return FileState(size=found.st_size, mtime_ns=found.st_mtime_ns)


def _key(path: Path) -> str:
    return str(path.resolve())
