"""Opens one exported shard: checks that it is whole and ours, and gives its tensors without reading them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cascadia_p2p.errors import ShardError, UsageError
from cascadia_p2p.matrices.encoding import Encoding, StoredMatrix, stored_bytes, stored_view
from cascadia_p2p.models.family import ModelConfig
from cascadia_p2p.shards.files import file_sha256
from cascadia_p2p.shards.manifest import (
    MANIFEST,
    TABLE,
    Manifest,
    ShardTable,
    TensorEntry,
    differing_source,
    shard_directory,
)
from cascadia_p2p.shards.verified import VerifiedFiles, file_state

_AGAIN = "copy the shard's directory again, or run the same export again"


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """How far the check of contents is, in bytes; `file` is the name of the one being read."""

    done: int
    total: int
    file: str


def held_shards(model: Path) -> tuple[int, ...]:
    """The shards that a model directory holds: of an export those that are there, of a shard its own.

    Raises:
        ShardError: it has no manifest, or the manifest is damaged.
    """
    manifest = Manifest.load(model)
    if (model / TABLE).exists():
        return (ShardTable.load(model / TABLE).shard,)
    return tuple(
        shard for shard in range(manifest.shards) if (model / shard_directory(shard) / TABLE).exists()
    )


def held_sources(model: Path) -> tuple[str, ...]:
    """For every file of the checkpoint, by name, its sample, or "" where no shard held here was read from it.

    Raises:
        ShardError: there is no manifest, or one is damaged.
    """
    manifest = Manifest.load(model)
    sources = dict(manifest.sources)
    for shard in set(held_shards(model)) - set(manifest.listed):
        # Exported elsewhere and copied here: its own manifest knows.
        own = Manifest.load(model / shard_directory(shard)).sources
        sources |= {file: sample for file, sample in own.items() if file in sources and sample is not None}
    return tuple(sample or "" for _, sample in sorted(sources.items()))


class ShardReader:
    """One shard of an exported model. Sizes are checked at once, contents by `verify`.

    Args:
        model: an export's directory, or one shard's.
        index: which shard; None takes the only one that is there.

    Raises:
        ShardError: files are missing, of another size, or of another export.
        UsageError: the shard is not there, or it is not clear which is meant.
    """

    def __init__(self, model: Path, index: int | None = None) -> None:
        self.manifest = Manifest.load(model)
        self.index = _find_index(model, self.manifest, index)
        alone = (model / TABLE).exists()
        self.path = model if alone else model / shard_directory(self.index)
        if self.index not in self.manifest.listed:
            self.manifest = self._own_manifest()
        self._table = self._read_table()
        self._place = {name: file for file, tensors in self._table.files.items() for name in tensors}
        self._mapped: dict[str, npt.NDArray[np.uint8]] = {}
        for name in self.manifest.expected_files(self.index):
            self._check_size(name)
        for file, tensors in self._table.files.items():
            self._check_table(file, tensors)

    @property
    def layers(self) -> range:
        """The layers of this shard."""
        return self.manifest.layers_of(self.index)

    @property
    def is_first(self) -> bool:
        """Whether the embedding is here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the final norm and the vocabulary head are here."""
        return self.index == self.manifest.shards - 1

    @property
    def config(self) -> ModelConfig:
        """The config of the whole model."""
        return self.manifest.model_config_of()

    @property
    def tokenizer(self) -> Path | None:
        """The `tokenizer.json`, if the model has one."""
        return self.path / "tokenizer.json" if "tokenizer.json" in self.manifest.tokenizer else None

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical names of the tensors that are here."""
        return tuple(self._place)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors here, as stored."""
        return sum(entry.nbytes for tensors in self._table.files.values() for entry in tensors.values())

    def attenuation(self, layer: int) -> int:
        """The n of a layer whose up scales a backend that computes in FP16 multiplies by 2^-n; mostly 0."""
        return self.manifest.attenuation.get(str(layer), 0)

    def entry(self, name: str) -> TensorEntry:
        """Shape, encoding and place of a tensor.

        Raises:
            ShardError: this shard has no such tensor.
        """
        file = self._place.get(name)
        if file is None:
            raise ShardError(f"shard {self.index} in {self.path} has no tensor {name}")
        return self._table.files[file][name]

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32, mapped from its file: nothing is read before it is used.

        The array may be written to; the file does not change.

        Raises:
            ShardError: this shard has no such tensor, it is stored otherwise, or its file can not be mapped.
        """
        matrix = self.matrix(name)
        if matrix.encoding is not Encoding.F32:
            raise ShardError(f"tensor {name} in {self.path} is stored as {matrix.encoding}: expected f32")
        return matrix.codes

    def matrix(self, name: str) -> StoredMatrix:
        """A tensor as it is stored, mapped from its file: nothing is read before it is used.

        The arrays may be written to; the file does not change.

        Raises:
            ShardError: this shard has no such tensor, or its file can not be mapped.
        """
        entry = self.entry(name)
        raw = self._map(self._place[name])[entry.offset : entry.offset + entry.nbytes]
        return stored_view(entry.encoding, entry.shape, raw)

    def verify(
        self, state_dir: Path | None = None, progress: Callable[[VerifyProgress], None] | None = None
    ) -> None:
        """Compare every file with the manifest's sha256.

        Args:
            state_dir: where to remember which files were found good; they are read again only when their
                size or time of change differs. None remembers nothing.
            progress: told after every piece.

        Raises:
            ShardError: a file is not what the manifest says.
        """
        names = self.manifest.expected_files(self.index)
        verified = VerifiedFiles(state_dir)
        total = sum(self.manifest.entry(self.index, name).size for name in names)
        done = 0
        for name in names:
            tell = partial(_tell, progress, name, total, done)
            path, expected = self.path / name, self.manifest.entry(self.index, name)
            # The state before reading: a change while it is read must not be taken for checked.
            state = file_state(path)
            if not verified.known(path, state, expected.sha256):
                self._check_sha256(path, expected.sha256, tell)
                verified.add(path, state, expected.sha256)
            tell(expected.size)
            done += expected.size
        verified.save()

    def _own_manifest(self) -> Manifest:
        """That of the shard's directory: it was exported elsewhere, and its directory copied here."""
        own = Manifest.load(self.path)
        if own.fingerprint != self.manifest.fingerprint:
            raise ShardError(
                f"{self.path} belongs to another export ({own.fingerprint[:12]}) than {MANIFEST} beside it "
                f"({self.manifest.fingerprint[:12]}): {_AGAIN}"
            )
        if differing := differing_source(own.sources, self.manifest.sources):
            raise ShardError(
                f"{self.path} was exported from another {differing} than the shards beside it: the models "
                f"have one shape but other weights; {_AGAIN}"
            )
        if self.index not in own.listed:
            raise ShardError(f"{self.path / MANIFEST} does not list shard {self.index}: {_AGAIN}")
        return own

    def _read_table(self) -> ShardTable:
        table = ShardTable.load(self.path / TABLE)
        if table.fingerprint != self.manifest.fingerprint:
            raise ShardError(
                f"{self.path / TABLE} belongs to another export ({table.fingerprint[:12]}) than {MANIFEST} "
                f"({self.manifest.fingerprint[:12]}): {_AGAIN}"
            )
        if table.shard != self.index:
            raise ShardError(
                f"{self.path / TABLE} is of shard {table.shard}, expected shard {self.index}: {_AGAIN}"
            )
        expected = {name for name in self.manifest.expected_files(self.index) if name.endswith(".weights")}
        if set(table.files) != expected:
            odd = sorted(expected ^ set(table.files))[0]
            raise ShardError(f"{self.path / TABLE} and {MANIFEST} disagree about {odd}: {_AGAIN}")
        return table

    def _check_size(self, name: str) -> None:
        path, expected = self.path / name, self.manifest.entry(self.index, name)
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            raise ShardError(f"{path} is missing, expected {expected.size} bytes: {_AGAIN}") from None
        except OSError as error:
            raise ShardError(f"{path} can not be read: {error.strerror}") from error
        if found < expected.size:
            raise ShardError(f"{path} is cut short: {found} bytes, expected {expected.size}; {_AGAIN}")
        if found > expected.size:
            raise ShardError(f"{path} is too long: {found} bytes, expected {expected.size}; {_AGAIN}")

    def _check_sha256(self, path: Path, expected: str, tell: Callable[[int], None]) -> None:
        try:
            found = file_sha256(path, tell)
        except OSError as error:
            raise ShardError(f"{path} can not be read: {error.strerror}") from error
        if found != expected:
            raise ShardError(
                f"{path} is damaged or of another model: its sha256 is {found}, expected {expected}; {_AGAIN}"
            )

    def _check_table(self, file: str, tensors: dict[str, TensorEntry]) -> None:
        size = self.manifest.entry(self.index, file).size
        for name, entry in tensors.items():
            fits = entry.offset + entry.nbytes <= size
            if not fits or entry.nbytes != stored_bytes(entry.encoding, entry.shape):
                raise ShardError(f"{self.path / TABLE} places {name} outside of {file}: {_AGAIN}")

    def _map(self, file: str) -> npt.NDArray[np.uint8]:
        mapped = self._mapped.get(file)
        if mapped is None:
            path = self.path / file
            try:
                # Copy on write: graphs ask for writable memory, files stay as they are.
                mapped = np.memmap(path, np.uint8, "c")
            except (OSError, ValueError) as error:
                raise ShardError(f"{path} can not be mapped: {error}; {_AGAIN}") from error
            if len(mapped) != (size := self.manifest.entry(self.index, file).size):
                raise ShardError(f"{path} is {len(mapped)} bytes, expected {size}; {_AGAIN}")
            self._mapped[file] = mapped
        return mapped


def _tell(
    progress: Callable[[VerifyProgress], None] | None, name: str, total: int, before: int, within: int
) -> None:
    if progress is not None:
        progress(VerifyProgress(before + within, total, name))


def _find_index(model: Path, manifest: Manifest, index: int | None) -> int:
    if index is not None and not 0 <= index < manifest.shards:
        raise UsageError(
            f"there is no shard {index}: {model} is split into {manifest.shards}, 0 to {manifest.shards - 1}"
        )
    held = held_shards(model)
    if index is None:
        if len(held) == 1:
            return held[0]
        if not held:
            raise ShardError(f"{model} holds none of its {manifest.shards} shards: {_AGAIN}")
        raise UsageError(f"{model} holds shards {', '.join(map(str, held))}: say which one by --shard")
    if index in held:
        return index
    if (model / TABLE).exists():
        raise UsageError(
            f"{model} is the directory of shard {held[0]}, not of shard {index}: drop --shard or change it"
        )
    if (model / shard_directory(index)).is_dir():
        raise ShardError(f"{model / shard_directory(index) / TABLE} is missing: {_AGAIN}")
    has = f"it holds {', '.join(map(str, held))}" if held else "it holds none"
    raise ShardError(f"{model} has no directory {shard_directory(index)} ({has}): copy that directory there")
