"""What a fuzz target is, and the promises that every decoder is held to."""

from __future__ import annotations

import contextlib
import random
import time
import traceback
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cascadia_p2p.errors import CascadiaError

LONGEST: Final = 4096
"""Bytes of an input, at most."""

SLOWEST_S: Final = 1.0
"""CPU time of one input, at most."""

WEIGHED: Final = 64
"""Of so many inputs, the memory of one is measured."""

MEMORY_BASE: Final = 1 << 20
MEMORY_PER_BYTE: Final = 512
"""Python's objects for one byte of JSON may take hundreds; a number that is claimed may take nothing."""


class BrokenPromiseError(AssertionError):
    """A decoder took an input, and what it made of it is not right."""


@dataclass(frozen=True, slots=True)
class Target:
    """One decoder.

    Args:
        name: on the command line.
        run: gives it one input; may raise the declared errors, BrokenPromiseError for what is not right.
        seeds: inputs that a real encoder made.
        refusals: the errors that it declares.
        slowest_s: CPU seconds that one input may take.
        memory_base: bytes that any input may take, however short.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    refusals: tuple[type[Exception], ...] = (CascadiaError,)
    slowest_s: float = SLOWEST_S
    memory_base: int = MEMORY_BASE


def promise(holds: object, sentence: str) -> None:
    """See that something holds.

    Raises:
        BrokenPromiseError: it does not.
    """
    if not holds:
        raise BrokenPromiseError(sentence)


@dataclass(slots=True)
class Fault:
    """An input that a decoder did not take as it should, the first of its kind."""

    kind: str
    data: bytes
    trace: str


@dataclass(slots=True)
class Judge:
    """Gives inputs to a target, and keeps what goes wrong.

    Args:
        target: the decoder.
        inputs: given so far.
        refused: of them ended with a declared error.
        faults: by kind.
    """

    target: Target
    inputs: int = 0
    refused: int = 0
    faults: dict[str, Fault] = field(default_factory=dict)

    def give(self, data: bytes) -> bool:
        """One input; whether all went as declared."""
        self.inputs += 1
        weigh = self.inputs % WEIGHED == 0
        if weigh:
            tracemalloc.start()
        started = time.thread_time()
        try:
            self.target.run(data)
        except self.target.refusals:
            self.refused += 1
        except Exception as error:
            return self._fault(_place(error), data, traceback.format_exc())
        finally:
            spent = time.thread_time() - started
            peak = tracemalloc.get_traced_memory()[1] if weigh else 0
            if weigh:
                tracemalloc.stop()
        if not weigh and spent > self.target.slowest_s:
            # Twice: garbage that others left may have been collected in the first one's time.
            spent = min(spent, self._spent(data))
            if spent > self.target.slowest_s:
                return self._fault("slow", data, f"{spent:.2f} s of CPU time")
        if peak > self.target.memory_base + MEMORY_PER_BYTE * len(data):
            return self._fault("memory", data, f"{peak} bytes for an input of {len(data)}")
        return True

    def _spent(self, data: bytes) -> float:
        """CPU seconds of an input."""
        started = time.thread_time()
        with contextlib.suppress(Exception):
            self.target.run(data)
        return time.thread_time() - started

    def _fault(self, kind: str, data: bytes, trace: str) -> bool:
        if kind not in self.faults and len(self.faults) < 100:
            self.faults[kind] = Fault(kind, data, trace)
        return False


def _place(error: Exception) -> str:
    """The kind of an error and where it arose, so that each place is one fault."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {last.name} ({last.filename.rpartition('/')[2]}:{last.lineno})"


class Mutator:
    """Random changes of known inputs, where no coverage leads the way.

    Args:
        seeds: to begin with.
        seed: of the random numbers.
    """

    def __init__(self, seeds: Sequence[bytes], seed: int = 0) -> None:
        self._seeds = [bytes(each) for each in seeds] or [b""]
        self._draw = random.Random(seed)

    def next(self) -> bytes:
        """One input."""
        draw = self._draw
        data = bytearray(draw.choice(self._seeds))
        for _ in range(draw.choice((0, 1, 1, 2, 3, 8))):
            draw.choice(_CHANGES)(data, draw)
        if draw.random() < 0.1:
            other = draw.choice(self._seeds)
            data[draw.randint(0, len(data)) :] = other[draw.randint(0, len(other)) :]
        return bytes(data[:LONGEST])


def _flip(data: bytearray, draw: random.Random) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _set(data: bytearray, draw: random.Random) -> None:
    if data:
        data[draw.randrange(len(data))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))


def _number(data: bytearray, draw: random.Random) -> None:
    size = draw.choice((2, 4, 8))
    value = draw.choice((0, 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1, draw.getrandbits(8 * size)))
    at = draw.randint(0, max(0, len(data) - size))
    data[at : at + size] = value.to_bytes(size, "little")


def _cut(data: bytearray, draw: random.Random) -> None:
    at = draw.randint(0, len(data))
    del data[at : at + draw.choice((1, 1, 4, 16, len(data)))]


def _insert(data: bytearray, draw: random.Random) -> None:
    data[draw.randint(0, len(data)) : 0] = draw.choice(_WORDS) if draw.random() < 0.7 else draw.randbytes(8)


def _repeat(data: bytearray, draw: random.Random) -> None:
    at = draw.randint(0, len(data))
    part = data[at : at + draw.choice((1, 4, 32))]
    data[at:at] = part * draw.choice((1, 2, 50))


_CHANGES: Final[tuple[Callable[[bytearray, random.Random], Any], ...]] = (
    _flip,
    _set,
    _number,
    _cut,
    _insert,
    _repeat,
)
_WORDS: Final = (
    *(
        b"null",
        b"true",
        b"-1",
        b"0",
        b"1e999",
        b"NaN",
        b"[]",
        b"{}",
        b'""',
        b"[[[[[[[[",
        b"99999999999999999999",
    ),
    *(b'"\\ud800"', b"\x00", b"\xff\xff\xff\xff", b"\r\n\r\n", b"=", b'"""', b"{{ ", b" }}", b"{% ", b" %}"),
)
