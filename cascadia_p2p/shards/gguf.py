"""A GGUF file as export reads it: its tensors as plain numbers, its config and its tokenizer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import numpy as np
import numpy.typing as npt
import orjson
from gguf import quants
from gguf.constants import GGMLQuantizationType

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.family import SourceModel
from cascadia_p2p.models.layout import names_in_words
from cascadia_p2p.models.llama import metadata as llama_metadata
from cascadia_p2p.models.llama import names as llama_names
from cascadia_p2p.shards.encodings import AS_IN_FILE, Encodings
from cascadia_p2p.shards.gguf_blocks import Groups, take_apart
from cascadia_p2p.shards.gguf_header import block_sizes, read_gguf_header
from cascadia_p2p.shards.gguf_tokenizer import end_ids, tokenizer_files
from cascadia_p2p.shards.manifest import TokenizerFile
from cascadia_p2p.shards.safetensors import StoredTensor
from cascadia_p2p.shards.source import SourceForm

SUFFIX: Final = ".gguf"

_OF_SEVERAL: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_SAMPLE_BYTES: Final = 256


class GgufSource:
    """One GGUF file, or several that make one model; use it as a context manager.

    Values are those that the `gguf` package's decoding gives.

    Args:
        path: the file; of several, the first.

    Raises:
        CheckpointError: files are missing, cut short or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = {file.name: read_gguf_header(file) for file in _parts(path)}
        self._metadata: Mapping[str, object] = self._files[min(self._files)].metadata
        self._home: dict[str, str] = {}
        self._open: dict[str, BinaryIO] = {}
        for file, header in self._files.items():
            for name in header.tensors:
                if name in self._home:
                    raise CheckpointError(
                        f"{path.parent} holds {name} in {self._home[name]} and in {file}: "
                        "these files are not parts of one model"
                    )
                self._home[name] = file

    @property
    def names(self) -> tuple[str, ...]:
        """See `Source`."""
        return tuple(sorted(self._home))

    @property
    def files(self) -> tuple[str, ...]:
        """See `Source`."""
        return tuple(sorted(self._files))

    def model(self) -> SourceModel:
        """See `Source`."""
        embed = llama_names.GGUF.embed
        if llama_metadata.ARCHITECTURE not in self._metadata or embed not in self._home:
            raise CheckpointError(f"{self.path} is no language model: it has no {embed}")
        divisors = None
        if llama_metadata.ROTARY_DIVISORS in self._home:
            stored = self._tensor(llama_metadata.ROTARY_DIVISORS)
            divisors = tuple(self.read(llama_metadata.ROTARY_DIVISORS, 0, stored.count).tolist())
        config = llama_metadata.read_metadata(
            self._metadata, self._home, self.shape(embed)[0], end_ids(self._metadata), divisors
        )
        paired = llama_metadata.PAIRED[str(self._metadata[llama_metadata.ARCHITECTURE])]
        layout = llama_names.layout(config, self._home, llama_names.GGUF, paired=paired)
        return SourceModel("llama", config, layout)

    def tokenizer(self) -> dict[TokenizerFile, bytes]:
        """See `Source`."""
        return tokenizer_files(self._metadata)

    def require(self, names: Collection[str]) -> None:
        """See that these tensors are in forms that can be decoded.

        Raises:
            CheckpointError: one is not.
        """
        for name in names:
            kind = self._tensor(name).dtype
            try:
                decode(kind, bytes(block_sizes(kind)[1]))
            except NotImplementedError:
                raise CheckpointError(
                    f"{self._home[name]} keeps {name} as {kind}, which the gguf package can not decode: "
                    "use a file in another quantisation"
                ) from None

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Source`."""
        return self._tensor(name).shape

    @property
    def encodings(self) -> Encodings:
        """See `Source`."""
        return AS_IN_FILE

    def form(self, name: str) -> SourceForm:
        """See `Source`."""
        kind = self._tensor(name).dtype
        numbers, size = block_sizes(kind)
        return SourceForm(kind, 8.0 * size / numbers)

    def read_groups(self, name: str, start: int, count: int) -> Groups:
        """See `Source`; errors as `read`."""
        kind, data, _ = self._read_blocks(name, start, count)
        return take_apart(kind, data)

    def file_of(self, name: str) -> str:
        """See `Source`."""
        return self._home[name]

    def files_of(self, names: Collection[str]) -> frozenset[str]:
        """See `Source`."""
        return frozenset(self._home[name] for name in names)

    def read(self, name: str, start: int, count: int) -> npt.NDArray[np.float32]:
        """See `Source`.

        Raises:
            CheckpointError: the file can not be read, or has become shorter.
        """
        kind, data, before = self._read_blocks(name, start, count)
        return decode(kind, data)[before : before + count]

    def _read_blocks(self, name: str, start: int, count: int) -> tuple[str, bytes, int]:
        """The type, the blocks that hold these numbers, and how many others stand before them there."""
        tensor = self._tensor(name)
        numbers, size = block_sizes(tensor.dtype)
        first = start // numbers
        blocks = -(-(start + count) // numbers) - first
        data = self._read_at(self._home[name], tensor.start + first * size, blocks * size, name)
        return tensor.dtype, data, start - first * numbers

    def identity(self) -> object:
        """See `Source`: all files are always here."""
        return {"files": {file: self.sample(file) for file in self.files}}

    def sample(self, file: str) -> str:
        """See `Source`: the places of all tensors, and three samples of each.

        Raises:
            CheckpointError: the file can not be read.
        """
        digest = hashlib.sha256()
        for name, tensor in sorted(self._files[file].tensors.items()):
            place = [name, tensor.dtype, tensor.shape, tensor.start, tensor.nbytes]
            digest.update(orjson.dumps(place))
            for start in (0, tensor.nbytes // 2, max(0, tensor.nbytes - _SAMPLE_BYTES)):
                count = min(_SAMPLE_BYTES, tensor.nbytes - start)
                digest.update(self._read_at(file, tensor.start + start, count, name))
        return digest.hexdigest()[:16]

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

    def _tensor(self, name: str) -> StoredTensor:
        return self._files[self._home[name]].tensors[name]

    def _read_at(self, file_name: str, start: int, count: int, name: str) -> bytes:
        path = self.path.with_name(file_name)
        try:
            file = self._open.get(file_name)
            if file is None:
                file = self._open[file_name] = path.open("rb", buffering=0)
            file.seek(start)
            data = file.read(count)
            # One read of a large piece may come back short.
            while len(data) < count and (more := file.read(count - len(data))):
                data += more
        except OSError as error:
            raise CheckpointError(f"{path} can not be read: {error.strerror}") from error
        if len(data) < count:
            raise CheckpointError(f"{path} ends within {name}: it was changed while being read")
        return data


def decode(kind: str, data: bytes) -> npt.NDArray[np.float32]:
    """The numbers in whole blocks of a ggml type.

    Raises:
        NotImplementedError: the `gguf` package can not decode the type.
    """
    if not data:
        return np.empty(0, np.float32)
    # One row however many blocks: the package works through rows in small groups.
    blocks = np.frombuffer(data, np.uint8).reshape(1, -1)
    values: npt.NDArray[np.float32] = quants.dequantize(blocks, GGMLQuantizationType[kind]).reshape(-1)
    return values


def _parts(path: Path) -> list[Path]:
    """All files of the model that this one belongs to."""
    part = _OF_SEVERAL.search(path.name)
    if part is None:
        return [path]
    count, stem = int(part[2]), path.name[: part.start()]
    files = [path.with_name(f"{stem}-{number:05d}-of-{part[2]}{SUFFIX}") for number in range(1, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of the {count} files of this model: "
            f"{names_in_words(missing)}; download them"
        )
    return files
