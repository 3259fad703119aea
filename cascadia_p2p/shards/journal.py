"""Remembers which files of an unfinished export are done, so that it can go on after an interruption."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from cascadia_p2p.errors import UsageError
from cascadia_p2p.shards.manifest import FileEntry, Sha256, Size


class _Start(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    fingerprint: Sha256


class _Done(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    place: str
    size: Size
    sha256: Sha256
    mtime_ns: int


class Journal:
    """One line for every finished file, in a file beside the shards.

    A line is trusted only while the file still has the size and the time of change that it names.

    Args:
        path: of the journal.
        out: the directory that the places are relative to.
        fingerprint: of the export that is under way.

    Raises:
        UsageError: the journal is of another export.
    """

    def __init__(self, path: Path, out: Path, fingerprint: str) -> None:
        self._path = path
        self._out = out
        self._done: dict[str, FileEntry] = {}
        lines = path.read_bytes().splitlines() if path.exists() else []
        started = _fingerprint(lines[0]) if lines else None
        if started is None:
            path.write_bytes(orjson.dumps({"fingerprint": fingerprint}) + b"\n")
            return
        if started != fingerprint:
            raise UsageError(
                f"{out} holds an unfinished export of something else (another checkpoint, split or "
                "encoding): choose another directory, or remove this one first"
            )
        for line in lines[1:]:
            try:
                done = _Done.model_validate_json(line)
            except ValidationError:
                # The last line of an export that was killed while writing it.
                continue
            if self._unchanged(done):
                self._done[done.place] = FileEntry(size=done.size, sha256=done.sha256)

    def finished(self, place: str) -> FileEntry | None:
        """What was written at a place; None when it has to be written."""
        return self._done.get(place)

    def trust(self, place: str, entry: FileEntry) -> None:
        """Take a file for done that an earlier manifest lists."""
        self._done.setdefault(place, entry)

    def note(self, place: str, entry: FileEntry) -> None:
        """Remember a file that has just been written."""
        done = _Done(
            place=place,
            size=entry.size,
            sha256=entry.sha256,
            mtime_ns=(self._out / place).stat().st_mtime_ns,
        )
        with self._path.open("ab") as file:
            # The newline in front closes a line that an interruption may have cut.
            file.write(b"\n" + done.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._done[place] = entry

    def _unchanged(self, done: _Done) -> bool:
        try:
            found = (self._out / done.place).stat()
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (done.size, done.mtime_ns)


def _fingerprint(line: bytes) -> str | None:
    try:
        return _Start.model_validate_json(line).fingerprint
    except ValidationError:
        return None
