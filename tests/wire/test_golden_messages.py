"""Holds the JSON of every message still. After a deliberate change: raise PROTOCOL, then run this file."""

from __future__ import annotations

from pathlib import Path

from test_messages import MESSAGES, REPLIES

from cascadia_p2p.wire import PROTOCOL
from cascadia_p2p.wire.messages import encode

GOLDEN = Path(__file__).with_name(f"golden_messages_{PROTOCOL}.jsonl")


def lines() -> list[bytes]:
    return [encode(message) for message in (*MESSAGES, *REPLIES)]


def test_rpc_05_golden_messages() -> None:
    """A field that is added, removed, renamed or reordered without a new protocol version fails here."""
    assert GOLDEN.exists(), "a new protocol version needs its golden file: run this test file as a script"
    for now, golden in zip(lines(), GOLDEN.read_bytes().splitlines(), strict=True):
        assert now == golden


if __name__ == "__main__":
    GOLDEN.write_bytes(b"\n".join(lines()) + b"\n")
