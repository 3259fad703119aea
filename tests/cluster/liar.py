"""A program like `cascadia-p2p` whose node lies about what it sends for as long as a file says how.

    python liar.py FILE join ...

The file holds the name of a lie, or "NAME once"; without it the node is as honest as any other.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cascadia_p2p.cli import main
from cascadia_p2p.transport.data import DataSender
from cascadia_p2p.wire.frames import HEADER, FrameKind

Message = tuple[bytes | bytearray, Any]
NUMBER_AT, COUNTS_AT = 24, 40
SEGMENT_START, SEGMENT_SLOT = HEADER.size + 12, HEADER.size + 8
RECORD_POSITION, RECORD_TOKEN = HEADER.size + 12, HEADER.size + 16


def _changed(at: int, form: str, change: Callable[[int], int]) -> Callable[[bytearray, Any], Message]:
    def lie(header: bytearray, payload: Any) -> Message:
        struct.pack_into(form, header, at, change(struct.unpack_from(form, header, at)[0]))
        return header, payload

    return lie


def _quiet(header: bytearray, payload: Any) -> Message:
    struct.pack_into("<III", header, COUNTS_AT, 0, 0, 0)
    return header[: HEADER.size], payload


ACTIVATIONS: dict[str, Callable[[bytearray, Any], Message]] = {
    "position": _changed(SEGMENT_START, "<I", lambda start: start + 1),
    "slot": _changed(SEGMENT_SLOT, "<I", lambda slot: slot + 1),
    "nan": lambda header, payload: (header, np.full_like(payload, np.nan)),
    "rows": lambda header, payload: (header, np.concatenate([payload, payload])),
    "future": _changed(NUMBER_AT, "<Q", lambda number: number + 5),
}
TOKENS: dict[str, Callable[[bytearray, Any], Message]] = {
    "quiet": _quiet,
    "negative": _changed(RECORD_TOKEN, "<i", lambda _: -5),
    "beyond": _changed(RECORD_TOKEN, "<i", lambda _: 10**6),
    "ahead": _changed(RECORD_POSITION, "<I", lambda position: position + 1),
}


def _told(file: Path) -> list[str]:
    """What the file says now; nothing, where its writer has just taken it away."""
    try:
        return file.read_text().split()
    except FileNotFoundError:
        return []


def install(file: Path) -> None:
    """Let every message go past the file."""
    honest = DataSender.send

    def send(self: DataSender, header: bytes | bytearray, payload: Any) -> bool:
        words = _told(file)
        lies = TOKENS if header[6] == FrameKind.TOKENS else ACTIVATIONS
        segments, _, records = struct.unpack_from("<III", header, COUNTS_AT)
        if not words or words[0] not in lies or not (segments or records):
            return honest(self, header, payload)
        told, lied = lies[words[0]](bytearray(header), payload)
        if not honest(self, told, lied):
            return False
        if "once" in words:
            file.unlink(missing_ok=True)
        return True

    DataSender.send = send  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
