"""Reads what stands in front of the tensors of a GGUF file: metadata, and where every tensor lies.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.shards.safetensors import StoredTensor

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MOST_AXES: Final = 4
_MOST_TENSORS: Final = 10**6
_MOST_PAIRS: Final = 10**5
_LONGEST_NAME: Final = 2**16
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says of itself.

    Args:
        metadata: numbers, booleans, strings, and lists of these.
        tensors: where each tensor lies; shapes row-major, types by ggml's names.
    """

    metadata: dict[str, object]
    tensors: dict[str, StoredTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of one file; nothing beyond the file's size is ever allocated.

    Raises:
        CheckpointError: the file can not be read, is cut short, or is not in the format.
    """
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise CheckpointError(f"{path.name} is empty: download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(data, path.name).header()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can not be read: {error}") from error


def block_sizes(kind: str) -> tuple[int, int]:
    """Numbers in a block of a ggml type, and the bytes that it takes."""
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(numbers), int(size)


class _Parser:
    """A position in the bytes of a file, which only moves forward and never past the end."""

    def __init__(self, data: mmap.mmap, file: str) -> None:
        self._data = data
        self._size = len(data)
        self._file = file
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4) != _MAGIC:
            raise CheckpointError(f"{self._file} does not start as a GGUF file: download it again")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._file} is of GGUF version {version}: versions {_VERSIONS[0]} and {_VERSIONS[1]}, "
                "little endian, can be read"
            )
        tensors, pairs = self._count(_MOST_TENSORS, "tensors"), self._count(_MOST_PAIRS, "metadata entries")
        metadata: dict[str, object] = {}
        for _ in range(pairs):
            name = self._name()
            if name in metadata:
                self._damaged(f"it has {name} twice")
            metadata[name] = self._value(self._number("<I"))
        places = [self._tensor() for _ in range(tensors)]
        return GgufHeader(metadata, self._placed(places, metadata))

    def _placed(
        self, places: list[tuple[str, StoredTensor]], metadata: dict[str, object]
    ) -> dict[str, StoredTensor]:
        """The tensors with their starts counted from the start of the file, in bounds and apart."""
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
            self._damaged(f"its alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        found: dict[str, StoredTensor] = {}
        end = begin
        for name, tensor in sorted(places, key=lambda place: (place[1].start, place[1].nbytes)):
            if name in found:
                self._damaged(f"it has {name} twice")
            start = begin + tensor.start
            if start < end:
                self._damaged(f"it keeps {name} in bytes of another tensor")
            end = start + tensor.nbytes
            if end > self._size:
                raise CheckpointError(
                    f"{self._file} is {self._size} bytes, its tensors need {end} or more: it is cut short, "
                    "download it again"
                )
            found[name] = StoredTensor(tensor.dtype, tensor.shape, start, tensor.nbytes)
        return found

    def _tensor(self) -> tuple[str, StoredTensor]:
        name = self._name()
        axes = self._number("<I")
        if axes > _MOST_AXES:
            self._damaged(f"{name} has {axes} axes")
        # GGUF writes the fastest axis first.
        shape = tuple(self._number("<Q") for _ in range(axes))[::-1]
        number, start = self._number("<I"), self._number("<Q")
        try:
            kind = GGMLQuantizationType(number).name
        except ValueError:
            raise CheckpointError(
                f"{self._file} keeps {name} in a form of number {number}, which the gguf package does not "
                "know: use a file in another quantisation"
            ) from None
        block, size = block_sizes(kind)
        if shape and shape[-1] % block:
            self._damaged(f"{name} is {kind} with rows of {shape[-1]} numbers, no multiple of {block}")
        return name, StoredTensor(kind, shape, start, math.prod(shape) // block * size)

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        return self._numbers(kind, 1)[0]

    def _array(self) -> list[object]:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _ARRAY:
            self._damaged("it holds lists within lists")
        if kind != _STRING:
            return self._numbers(kind, count)
        # A string takes eight bytes or more: what the file can not hold is refused before it is begun.
        if count > (self._size - self._at) // 8:
            self._cut_short()
        return [self._text() for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> list[object]:
        if kind not in _SCALARS:
            self._damaged(f"it holds a value of unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        values: list[object] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return values

    def _name(self) -> str:
        text = self._text()
        if not text or len(text) > _LONGEST_NAME:
            self._damaged(f"a name in it has {len(text)} characters")
        return text

    def _text(self) -> str:
        data = self._take(self._number("<Q"))
        try:
            return data.decode()
        except UnicodeDecodeError:
            self._damaged("a text in it is no UTF-8")

    def _count(self, most: int, what: str) -> int:
        count = self._number("<Q")
        if count > most:
            self._damaged(f"it claims {count} {what}")
        return count

    def _number(self, form: str) -> int:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(value)

    def _take(self, count: int) -> bytes:
        if count > self._size - self._at:
            self._cut_short()
        data = self._data[self._at : self._at + count]
        self._at += count
        return data

    def _cut_short(self) -> NoReturn:
        raise CheckpointError(
            f"{self._file} ends within its header at {self._size} bytes: it is cut short, download it again"
        )

    def _damaged(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._file} is damaged ({what}): download it again")
