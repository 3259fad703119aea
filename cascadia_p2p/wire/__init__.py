"""The bytes that nodes and clients exchange: pure functions from values to bytes and back."""

from cascadia_p2p.wire.frames import PROTOCOL

__all__ = ["PROTOCOL"]
