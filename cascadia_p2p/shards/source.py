"""A checkpoint as export reads it: plain numbers under the publisher's names, in whatever form they lie."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import CheckpointError
from cascadia_p2p.models.family import SourceModel, read_source
from cascadia_p2p.shards import nvfp4
from cascadia_p2p.shards.encodings import DEFAULT, Encodings
from cascadia_p2p.shards.gguf_blocks import Groups
from cascadia_p2p.shards.manifest import TOKENIZER_FILES, TokenizerFile
from cascadia_p2p.shards.safetensors import Checkpoint, read_json_object

QUANTISATION = "hf_quant_config.json"

# In a weight of this name rows of gate and up take turns.
_PAIRED = re.compile(r"(?:^|[._])w13_weight$")


@dataclass(frozen=True, slots=True)
class SourceForm:
    """How a checkpoint keeps a tensor.

    Args:
        kind: by the file format's name, as BF16, NVFP4, Q4_0.
        bits: that a number takes.
    """

    kind: str
    bits: float


class Source(Protocol):
    """What export needs of a checkpoint."""

    @property
    def path(self) -> Path:
        """Where it lies, for messages."""

    def __enter__(self) -> Self:
        """Used as a context manager, it closes its files."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def model(self) -> SourceModel:
        """What it holds; raises CheckpointError when that is no model of ours."""

    def tokenizer(self) -> dict[TokenizerFile, bytes]:
        """The content of its tokenizer's files, by name."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's name, sorted, also where its file is not here."""

    @property
    def files(self) -> tuple[str, ...]:
        """Every file's name, sorted, also of those that are not here."""

    def require(self, names: Collection[str]) -> None:
        """See that these tensors can be read here; raises CheckpointError when not."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's sizes; only of tensors that can be read here."""

    @property
    def encodings(self) -> Encodings:
        """How its tensors are stored unless something else is asked for."""

    def form(self, name: str) -> SourceForm:
        """How a tensor is kept; only of tensors that can be read here."""

    def file_of(self, name: str) -> str:
        """The file to name when something is wrong with a tensor."""

    def files_of(self, names: Collection[str]) -> frozenset[str]:
        """The files that hold these tensors."""

    def read(self, name: str, start: int, count: int) -> npt.NDArray[np.float32]:
        """Numbers `start` to `start + count` of a tensor in row-major order, as float32 [count]."""

    def read_groups(self, name: str, start: int, count: int) -> Groups:
        """The same of a tensor in one of the `LOSSLESS` forms, as codes and scales of whole groups."""

    def identity(self) -> object:
        """JSON that is the same wherever a part of this checkpoint is, and of no other if that can be."""

    def sample(self, file: str) -> str:
        """16 hex digits that differ when a file's contents most likely do."""


@dataclass(frozen=True, slots=True)
class _Weight:
    """A quantised weight whose parts have been found to fit."""

    parts: nvfp4.Parts
    shape: tuple[int, ...]
    layout: nvfp4.Layout
    factors: npt.NDArray[np.float32]


class SafetensorsSource:
    """A directory of safetensors files, NVFP4 weights among them decoded; use it as a context manager.

    A quantised weight stands under the name that it would have without quantisation.

    Raises:
        CheckpointError: there is no such checkpoint, or its quantisation is of another kind.
    """

    def __init__(self, path: Path) -> None:
        self._checkpoint = Checkpoint(path)
        self._parts = nvfp4.find_parts(self._checkpoint.names)
        self._weights: dict[str, _Weight] = {}
        hidden = {name for parts in self._parts.values() for name in parts.names}
        self._names = tuple(sorted((set(self._checkpoint.names) - hidden) | self._parts.keys()))
        if self._parts:
            _check_quantisation(path, self._parts)

    @property
    def path(self) -> Path:
        """See `Source`."""
        return self._checkpoint.path

    @property
    def names(self) -> tuple[str, ...]:
        """See `Source`."""
        return self._names

    @property
    def files(self) -> tuple[str, ...]:
        """See `Source`."""
        return self._checkpoint.files

    def model(self) -> SourceModel:
        """See `Source`."""
        config = read_json_object(self.path / "config.json")
        generation = self.path / "generation_config.json"
        return read_source(config, read_json_object(generation) if generation.exists() else None, self.names)

    def tokenizer(self) -> dict[TokenizerFile, bytes]:
        """See `Source`."""
        found = [name for name in TOKENIZER_FILES if (self.path / name).is_file()]
        return {name: (self.path / name).read_bytes() for name in found}

    def require(self, names: Collection[str]) -> None:
        """See that the files of these tensors are here and whole, and hold weights.

        Raises:
            CheckpointError: they are not, or do not.
        """
        self._checkpoint.require(self._stored(names))
        for name in names:
            if name in self._parts:
                self._weight(name)
            else:
                self._checkpoint.check_readable(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Source`."""
        return self._weight(name).shape if name in self._parts else self._checkpoint.shape(name)

    @property
    def encodings(self) -> Encodings:
        """See `Source`."""
        return DEFAULT

    def form(self, name: str) -> SourceForm:
        """See `Source`."""
        if name in self._parts:
            return SourceForm("NVFP4", 4.0 + 8.0 / nvfp4.GROUP)
        stored = self._checkpoint.tensor(name)
        return SourceForm(stored.dtype, 8.0 * stored.nbytes / max(1, stored.count))

    def read_groups(self, name: str, start: int, count: int) -> Groups:
        """None of the forms of safetensors files is `LOSSLESS`."""
        raise NotImplementedError(name)

    def file_of(self, name: str) -> str:
        """See `Source`."""
        return self._checkpoint.file_of(self._parts[name].packed if name in self._parts else name)

    def files_of(self, names: Collection[str]) -> frozenset[str]:
        """See `Source`."""
        return self._checkpoint.files_of(self._stored(names))

    def identity(self) -> object:
        """See `Source`."""
        return self._checkpoint.identity()

    def sample(self, file: str) -> str:
        """See `Source`."""
        return self._checkpoint.sample(file)

    def read(self, name: str, start: int, count: int) -> npt.NDArray[np.float32]:
        """Numbers `start` to `start + count` of a tensor in row-major order, as float32 [count].

        Raises:
            CheckpointError: a file can not be read, or holds what is no number.
        """
        if name not in self._parts:
            return self._checkpoint.read(name, start, count)
        weight = self._weight(name)
        first = start // nvfp4.GROUP
        groups = -(-(start + count) // nvfp4.GROUP) - first
        half = nvfp4.GROUP // 2
        packed = self._checkpoint.read_bytes(weight.parts.packed, first * half, groups * half)
        scale = self._checkpoint.read(weight.parts.scale, first, groups)
        if not np.isfinite(scale).all():
            raise CheckpointError(
                f"{self._checkpoint.file_of(weight.parts.scale)} holds what is no number in "
                f"{weight.parts.scale}: download it again"
            )
        values = nvfp4.decode(
            np.frombuffer(packed, np.uint8),
            scale,
            weight.factors[weight.layout.factor_of(first, groups)],
            reciprocal=weight.parts.reciprocal,
        )
        before = start - first * nvfp4.GROUP
        return values[before : before + count]

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stored(self, names: Collection[str]) -> list[str]:
        """The tensors as files hold them."""
        return [
            stored
            for name in names
            for stored in (self._parts[name].names if name in self._parts else (name,))
        ]

    def _weight(self, name: str) -> _Weight:
        known = self._weights.get(name)
        if known is not None:
            return known
        parts, files = self._parts[name], self._checkpoint
        for stored, dtypes in zip(parts.names, (("U8",), ("F8_E4M3",), ("F32", "BF16", "F16")), strict=True):
            if (dtype := files.tensor(stored).dtype) not in dtypes:
                raise CheckpointError(
                    f"{files.file_of(stored)} keeps {stored} as {dtype}: expected {' or '.join(dtypes)}"
                )
        shapes = {stored: files.shape(stored) for stored in parts.names}
        shape, layout = nvfp4.fit(name, parts, shapes, paired=_PAIRED.search(name) is not None)
        factors = files.read(parts.factor, 0, layout.experts * layout.factors)
        nvfp4.check_factors(parts.factor, factors, reciprocal=parts.reciprocal)
        found = self._weights[name] = _Weight(parts, shape, layout, factors)
        return found


def _check_quantisation(path: Path, weights: Mapping[str, nvfp4.Parts]) -> None:
    """See that what the checkpoint says of its quantisation agrees with the tensors that it has."""
    if not (path / QUANTISATION).exists():
        return
    said = read_json_object(path / QUANTISATION).get("quantization")
    if not isinstance(said, dict):
        raise CheckpointError(f"{path / QUANTISATION} has no 'quantization' object: download it again")
    for key, expected in (("quant_algo", "NVFP4"), ("group_size", nvfp4.GROUP)):
        if (value := said.get(key, expected)) != expected:
            raise CheckpointError(
                f"{path / QUANTISATION} has {key} = {value!r}: only {expected!r} can be read"
            )
    excluded = said.get("exclude_modules") or []
    if not isinstance(excluded, list) or not all(isinstance(module, str) for module in excluded):
        raise CheckpointError(f"{path / QUANTISATION} has exclude_modules that are no list of names")
    for name, parts in weights.items():
        if module := next((module for module in excluded if _covers(module, name)), None):
            raise CheckpointError(
                f"{path / QUANTISATION} excludes {module} from quantisation, but the checkpoint holds "
                f"{parts.scale}: these files are not of one checkpoint, download them again"
            )


def _covers(module: str, name: str) -> bool:
    """Whether a weight lies in a module, or in one that a pattern with `*` means."""
    return name == module or name.startswith(f"{module}.") or ("*" in module and fnmatchcase(name, module))
