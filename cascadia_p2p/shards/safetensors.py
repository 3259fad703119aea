"""Reads tensors from safetensors files, a bounded piece at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt
import orjson

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.layout import names_in_words

MOST_HEADER_BYTES = 100_000_000
"""The limit that the format's own library has."""

_MOST_AXES = 8
_READABLE = ("F32", "BF16", "F16")
_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes are.

    Args:
        dtype: the format's word for the type, as F32, BF16, F16.
        shape: row-major, little endian.
        start: first byte, counted from the start of the file.
        nbytes: how many follow.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file.

    Raises:
        CheckpointError: the file can not be read, is cut short, or is not in the format.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = header_length(file.read(8), size, path.name)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} can not be read: {error.strerror}") from error
    return parse_header(text, size - 8 - length, path.name)


def header_length(prefix: bytes, file_size: int, file: str) -> int:
    """Bytes of JSON that follow the first eight.

    Raises:
        CheckpointError: there are not that many.
    """
    if len(prefix) < 8:
        raise CheckpointError(
            f"{file} is {file_size} bytes: too short for a safetensors file, download it again"
        )
    length = int.from_bytes(prefix, "little")
    if length > MOST_HEADER_BYTES:
        raise CheckpointError(
            f"{file} starts with a header of {length} bytes: safetensors allows {MOST_HEADER_BYTES}, "
            "so it is no such file"
        )
    if length > file_size - 8:
        raise CheckpointError(
            f"{file} is {file_size} bytes, its header alone needs {length + 8}: it is cut short, "
            "download it again"
        )
    return length


def parse_header(text: bytes, data_bytes: int, file: str) -> dict[str, StoredTensor]:
    """The tensors that a header names.

    Args:
        text: the JSON.
        data_bytes: bytes of the file after it.
        file: for messages.

    Raises:
        CheckpointError: no valid header, or one that asks for more bytes than there are.
    """
    try:
        header = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"{file} has a header that is no JSON ({error}): download it again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a header that is no JSON object: it is no safetensors file")
    data_start = 8 + len(text)
    tensors = {
        name: _parse_entry(name, entry, data_start, file)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    end = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start < end:
            raise CheckpointError(f"{file} keeps {name} in bytes of another tensor: its header is damaged")
        end = tensor.start + tensor.nbytes
    if end - data_start > data_bytes:
        raise CheckpointError(
            f"{file} is {data_start + data_bytes} bytes, its tensors need {end}: it is cut short, "
            "download it again"
        )
    return tensors


def _parse_entry(name: str, entry: object, data_start: int, file: str) -> StoredTensor:
    fault = f"{file} describes {name[:200]} by a header entry that is not valid"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{fault}: expected dtype, shape and data_offsets")
    dtype = entry.get("dtype")
    shape = _sizes(entry.get("shape"))
    offsets = _sizes(entry.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(shape) > _MOST_AXES:
        raise CheckpointError(f"{fault}: expected dtype, shape and data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{fault}: data_offsets is {list(offsets)[:4]}, expected a start and an end")
    nbytes = offsets[1] - offsets[0]
    item = _ITEM_BYTES.get(dtype)
    if item is not None and nbytes != (needed := item * math.prod(shape)):
        raise CheckpointError(f"{fault}: {dtype} of shape {list(shape)} needs {needed} bytes, not {nbytes}")
    return StoredTensor(dtype, shape, data_start + offsets[0], nbytes)


def _sizes(value: object) -> tuple[int, ...] | None:
    """A list of whole numbers from 0 on; anything else gives None."""
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        return None
    return tuple(value)


class Checkpoint:
    """The safetensors files of a checkpoint directory; use it as a context manager.

    Args:
        path: a directory with `config.json` and one safetensors file, or several with an index.

    Raises:
        CheckpointError: files are missing, cut short or damaged.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(
                f"{path} {what}: expected the directory of a checkpoint, with its config.json"
            )
        self.path = path
        self._tensors: dict[str, tuple[str, StoredTensor]] = {}
        self._open: dict[str, BinaryIO] = {}
        index = sorted(path.glob("*.safetensors.index.json"))
        if len(index) > 1:
            raise CheckpointError(
                f"{path} has several indexes ({names_in_words([i.name for i in index])}): keep one"
            )
        if index:
            self._read_indexed(index[0])
        else:
            self._read_all()

    def _read_indexed(self, index: Path) -> None:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map: expected the file of every tensor")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index} keeps {name} in {file!r}: expected a safetensors file beside it"
                )
        files = sorted(set(weight_map.values()))
        if missing := [file for file in files if not (self.path / file).is_file()]:
            raise CheckpointError(
                f"{self.path} lacks {len(missing)} of the {len(files)} files that its index names: "
                f"{names_in_words(missing)}; download them"
            )
        headers = {file: read_header(self.path / file) for file in files}
        for name, file in weight_map.items():
            if name not in headers[file]:
                raise CheckpointError(f"{index.name} says that {file} holds {name}, but it does not")
            self._tensors[name] = (file, headers[file][name])

    def _read_all(self) -> None:
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{self.path} holds no *.safetensors file: expected a checkpoint in that format"
            )
        for file in files:
            for name, tensor in read_header(file).items():
                if name in self._tensors:
                    raise CheckpointError(
                        f"{self.path} holds {name} in {self._tensors[name][0]} and in {file.name}: "
                        "without an index it is not clear which counts"
                    )
                self._tensors[name] = (file.name, tensor)

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's name, sorted."""
        return tuple(sorted(self._tensors))

    def tensor(self, name: str) -> StoredTensor:
        """Where a tensor is; KeyError when it is not there."""
        return self._tensors[name][1]

    def file_of(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._tensors[name][0]

    def check_readable(self, name: str) -> None:
        """See that a tensor's numbers are of a type that can be read.

        Raises:
            CheckpointError: they are not.
        """
        if (dtype := self.tensor(name).dtype) not in _READABLE:
            raise CheckpointError(
                f"{self.file_of(name)} keeps {name} as {dtype}: expected one of {', '.join(_READABLE)}"
            )

    def read_bytes(self, name: str, start: int, count: int) -> bytes:
        """Raw bytes of a tensor from `start` on, at most `count`.

        Raises:
            CheckpointError: the file can not be read, or has become shorter.
        """
        file_name, tensor = self._tensors[name]
        count = max(0, min(count, tensor.nbytes - start))
        try:
            file = self._open.get(file_name)
            if file is None:
                file = self._open[file_name] = (self.path / file_name).open("rb", buffering=0)
            file.seek(tensor.start + start)
            data = file.read(count)
            # One read of a large piece may come back short.
            while len(data) < count and (more := file.read(count - len(data))):
                data += more
        except OSError as error:
            raise CheckpointError(f"{self.path / file_name} can not be read: {error.strerror}") from error
        if len(data) < count:
            raise CheckpointError(
                f"{self.path / file_name} ends within {name}: it was changed while being read"
            )
        return data

    def read(self, name: str, start: int, count: int) -> npt.NDArray[np.float32]:
        """Numbers `start` to `start + count` of a tensor in row-major order, as float32 [count].

        Raises:
            CheckpointError: the file can not be read, or its numbers are of another type.
        """
        self.check_readable(name)
        tensor = self.tensor(name)
        item = _ITEM_BYTES[tensor.dtype]
        data = self.read_bytes(name, start * item, count * item)
        if tensor.dtype == "F32":
            return np.frombuffer(data, "<f4")
        if tensor.dtype == "F16":
            return np.frombuffer(data, "<f2").astype(np.float32)
        # bfloat16 is the upper half of a float32.
        return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_json_object(path: Path) -> Mapping[str, object]:
    """The object in a JSON file of a checkpoint.

    Raises:
        CheckpointError: no such file, or no JSON object in it.
    """
    try:
        value = orjson.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} can not be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value
