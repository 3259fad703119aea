"""Reads tensors from safetensors files, a bounded piece at a time."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt
import orjson

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.layout import names_in_words

MOST_HEADER_BYTES = 100_000_000
"""The limit that the format's own library has."""

_MOST_AXES = 8
_SAMPLE_BYTES = 256
_WEIGHTS = ("F32", "BF16", "F16")
_READABLE = (*_WEIGHTS, "F8_E4M3", "U8")
_OF_SEVERAL = re.compile(r"-of-0*([2-9]|[1-9][0-9]+)\.safetensors$", re.ASCII)
# All 256 values: four bits of exponent, three of mantissa, no infinity.
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
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

    With an index all names are known, and a file is looked at only when one of its tensors is asked for:
    files that nobody needs may be absent, or still be on their way.

    Args:
        path: a directory with `config.json` and one safetensors file, or several with an index.

    Raises:
        CheckpointError: there are no such files, or it is not clear which tensors they hold.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(
                f"{path} {what}: expected the directory of a checkpoint, with its config.json"
            )
        self.path = path
        self._home: dict[str, str] = {}
        self._headers: dict[str, dict[str, StoredTensor]] = {}
        self._open: dict[str, BinaryIO] = {}
        indexes = sorted(path.glob("*.safetensors.index.json"))
        if len(indexes) > 1:
            raise CheckpointError(
                f"{path} has several indexes ({names_in_words([i.name for i in indexes])}): keep one"
            )
        self._index = indexes[0] if indexes else None
        if self._index is not None:
            self._read_index(self._index)
        else:
            self._read_all()

    def _read_index(self, index: Path) -> None:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map: expected the file of every tensor")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index} keeps {name} in {file!r}: expected a safetensors file beside it"
                )
            self._home[name] = file

    def _read_all(self) -> None:
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{self.path} holds no *.safetensors file: expected a checkpoint in that format"
            )
        if part := next(filter(None, (_OF_SEVERAL.search(file.name) for file in files)), None):
            raise CheckpointError(
                f"{self.path} holds {part.string}, one of {int(part[1])} files, but no "
                "*.safetensors.index.json: download that too, it says which file holds what"
            )
        for file in files:
            self._headers[file.name] = read_header(file)
            for name in self._headers[file.name]:
                if name in self._home:
                    raise CheckpointError(
                        f"{self.path} holds {name} in {self._home[name]} and in {file.name}: "
                        "without an index it is not clear which counts"
                    )
                self._home[name] = file.name

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's name, sorted."""
        return tuple(sorted(self._home))

    @property
    def files(self) -> tuple[str, ...]:
        """Every file's name, sorted; with an index some may be absent."""
        return tuple(sorted(set(self._home.values())))

    def require(self, names: Collection[str]) -> None:
        """See that the files of these tensors are here and whole, and hold them.

        Raises:
            CheckpointError: they are not.
        """
        files = sorted({self._home[name] for name in names})
        if missing := [file for file in files if not (self.path / file).is_file()]:
            raise CheckpointError(
                f"{self.path} lacks {len(missing)} of the {len(files)} files that are needed: "
                f"{names_in_words(missing)}; download them ('export ... --list-files' names all of them)"
            )
        for name in names:
            self.tensor(name)

    def tensor(self, name: str) -> StoredTensor:
        """Where a tensor is; KeyError when no file should hold it.

        Raises:
            CheckpointError: its file is absent or damaged, or does not hold it.
        """
        file = self._home[name]
        tensor = self._header(file).get(name)
        if tensor is None:
            index = "the index" if self._index is None else self._index.name
            raise CheckpointError(f"{index} says that {file} holds {name}, but it does not")
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's sizes; errors as `tensor`."""
        return self.tensor(name).shape

    def file_of(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._home[name]

    def files_of(self, names: Collection[str]) -> frozenset[str]:
        """The names of the files that hold these tensors."""
        return frozenset(self._home[name] for name in names)

    def identity(self) -> object:
        """What is known of the whole checkpoint wherever a part of it is: JSON, the same everywhere.

        With an index that is the index: the files may be spread over machines. Without one all files are
        here, and samples of them tell apart models of the same shape.

        Raises:
            CheckpointError: a file can not be read.
        """
        if self._index is not None:
            return {"index": read_json_object(self._index)}
        return {"files": {file: self.sample(file) for file in self.files}}

    def sample(self, file: str) -> str:
        """A digest, 16 hex digits, of a file's header and of three samples of every tensor in it.

        Raises:
            CheckpointError: the file can not be read.
        """
        digest = hashlib.sha256()
        for name, tensor in sorted(self._header(file).items()):
            place = [name, tensor.dtype, tensor.shape, tensor.start, tensor.nbytes]
            digest.update(orjson.dumps(place))
            for start in (0, tensor.nbytes // 2, max(0, tensor.nbytes - _SAMPLE_BYTES)):
                count = min(_SAMPLE_BYTES, tensor.nbytes - start)
                digest.update(self._read_at(file, tensor.start + start, count, name))
        return digest.hexdigest()[:16]

    def check_readable(self, name: str) -> None:
        """See that a tensor's numbers are weights as they stand.

        Raises:
            CheckpointError: they are of another type, or mean nothing without scales.
        """
        if (dtype := self.tensor(name).dtype) not in _WEIGHTS:
            raise CheckpointError(
                f"{self.file_of(name)} keeps {name} as {dtype}: expected one of {', '.join(_WEIGHTS)}"
            )

    def _header(self, file: str) -> dict[str, StoredTensor]:
        header = self._headers.get(file)
        if header is None:
            header = self._headers[file] = read_header(self.path / file)
        return header

    def read_bytes(self, name: str, start: int, count: int) -> bytes:
        """Raw bytes of a tensor from `start` on, at most `count`.

        Raises:
            CheckpointError: the file can not be read, or has become shorter.
        """
        tensor = self.tensor(name)
        count = max(0, min(count, tensor.nbytes - start))
        return self._read_at(self._home[name], tensor.start + start, count, name)

    def _read_at(self, file_name: str, start: int, count: int, name: str) -> bytes:
        try:
            file = self._open.get(file_name)
            if file is None:
                file = self._open[file_name] = (self.path / file_name).open("rb", buffering=0)
            file.seek(start)
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
        tensor = self.tensor(name)
        if tensor.dtype not in _READABLE:
            raise CheckpointError(
                f"{self.file_of(name)} keeps {name} as {tensor.dtype}: expected one of {', '.join(_READABLE)}"
            )
        item = _ITEM_BYTES[tensor.dtype]
        return decode(tensor.dtype, self.read_bytes(name, start * item, count * item))

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


def decode(dtype: str, data: bytes) -> npt.NDArray[np.float32]:
    """The numbers that these bytes are in a type that `Checkpoint.read` takes; exact."""
    if dtype == "F32":
        return np.frombuffer(data, "<f4")
    if dtype == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    if dtype == "F8_E4M3":
        return np.take(_E4M3, np.frombuffer(data, np.uint8))
    if dtype == "U8":
        return np.frombuffer(data, np.uint8).astype(np.float32)
    # bfloat16 is the upper half of a float32.
    return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


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
