"""Remembers which files of an unfinished export are done, so that it can go on after an interruption."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from cascadia_p2p.errors import UsageError
from cascadia_p2p.shards.manifest import FileEntry, Sample, Sha256, Size, SourceFile

_Line = TypeVar("_Line", bound=BaseModel)


class _Start(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    fingerprint: Sha256


class _Read(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    source: SourceFile
    sample: Sample


class _Done(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    place: str
    size: Size
    sha256: Sha256
    mtime_ns: int
    attenuation: int = 0


class Journal:
    """One line for every file that is read or finished, in a file beside the shards.

    A line on a finished file is trusted only while the file still has the size and the time of change that
    it names. A line that was cut counts for nothing.

    Args:
        path: of the journal.
        out: the directory that the places are relative to.
        fingerprint: of the export that is under way.
        sources: samples of the files that it reads.

    Raises:
        UsageError: the journal is of another export.
    """

    def __init__(self, path: Path, out: Path, fingerprint: str, sources: Mapping[str, str]) -> None:
        self._path = path
        self._out = out
        self._done: dict[str, FileEntry] = {}
        self._attenuation: dict[str, int] = {}
        lines = path.read_bytes().splitlines() if path.exists() else []
        started = _parsed(_Start, lines[0]) if lines else None
        if started is None:
            path.write_bytes(orjson.dumps({"fingerprint": fingerprint}) + b"\n")
            lines = []
        elif started.fingerprint != fingerprint:
            raise UsageError(_of_another(out))
        for line in lines[1:]:
            if (done := _parsed(_Done, line)) is not None and self._unchanged(done):
                self._done[done.place] = FileEntry(size=done.size, sha256=done.sha256)
                self._attenuation[done.place] = done.attenuation
        read = {line.source: line.sample for line in (_parsed(_Read, line) for line in lines) if line}
        if any(read.get(source, sample) != sample for source, sample in sources.items()):
            raise UsageError(_of_another(out))
        for source in sorted(sources.keys() - read.keys()):
            self._append(_Read(source=source, sample=sources[source]))

    @property
    def places(self) -> frozenset[str]:
        """Where finished files are."""
        return frozenset(self._done)

    def finished(self, place: str) -> FileEntry | None:
        """What was written at a place; None when it has to be written."""
        return self._done.get(place)

    def attenuation(self, place: str) -> int:
        """The exponent that was found for the layer in a finished file."""
        return self._attenuation.get(place, 0)

    def trust(self, place: str, entry: FileEntry, attenuation: int) -> None:
        """Take a file for done that an earlier manifest lists."""
        self._done.setdefault(place, entry)
        self._attenuation.setdefault(place, attenuation)

    def note(self, place: str, entry: FileEntry, attenuation: int) -> None:
        """Remember a file that has just been written."""
        done = _Done(
            place=place,
            size=entry.size,
            sha256=entry.sha256,
            mtime_ns=(self._out / place).stat().st_mtime_ns,
            attenuation=attenuation,
        )
        self._append(done)
        self._done[place] = entry
        self._attenuation[place] = attenuation

    def _append(self, line: BaseModel) -> None:
        with self._path.open("ab") as file:
            # The newline in front closes a line that an interruption may have cut.
            file.write(b"\n" + line.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _unchanged(self, done: _Done) -> bool:
        try:
            found = (self._out / done.place).stat()
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (done.size, done.mtime_ns)


def _parsed(kind: type[_Line], line: bytes) -> _Line | None:
    try:
        return kind.model_validate_json(line)
    except ValidationError:
        return None


def _of_another(out: Path) -> str:
    return (
        f"{out} holds an unfinished export of something else (another checkpoint, split or encoding): "
        "choose another directory, or remove this one first"
    )
