"""The manifest of an exported model: what the model is, and every file of every shard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self, get_args

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from cascadia_p2p.errors import CheckpointError, ShardError
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.models.family import ModelConfig, read_exported
from cascadia_p2p.shards.encodings import Encodings

FORMAT: Final = 2
MOST_SOURCES = 4096
MANIFEST = "manifest.json"
TABLE = "shard.json"
EMBED = "embed.weights"
HEAD = "head.weights"
TokenizerFile = Literal[
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
]
TOKENIZER_FILES: tuple[TokenizerFile, ...] = get_args(TokenizerFile)

_MOST_JSON_BYTES = 64 * 2**20

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
SourceFile = Annotated[str, StringConstraints(min_length=1, max_length=255)]
Sample = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Size = Annotated[int, Field(ge=0, lt=2**63)]


def shard_directory(shard: int) -> str:
    """The name of a shard's directory."""
    return f"shard-{shard:02d}"


def layer_file(layer: int) -> str:
    """The name of the file that holds a layer."""
    return f"layer-{layer:03d}.weights"


class FileEntry(BaseModel):
    """What a file must be."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    size: Size
    sha256: Sha256


class Manifest(BaseModel):
    """An exported model, or as many shards of one as were exported on one machine.

    Every shard is listed in full or not at all. The manifest in a shard's own directory lists that shard,
    so that the directory is the same to the byte however many others were exported with it.

    Args:
        format: version of the layout on disk.
        family: model family.
        config: the model's config, every value explicit.
        split: layers of each shard.
        encodings: stored forms as they were asked for.
        stored: what most of each part is stored as; each tensor's own form is in its shard's table.
        tokenizer: files of the tokenizer, present in every shard's directory.
        files: by `shard-NN/NAME`.
        fingerprint: the same for all exports of one model with one split and the same encodings and
            tokenizer, wherever which shards of it were exported; nodes of one ring must agree on it.
        sources: every file of the checkpoint, with a sample of those that the listed shards were read
            from. Shards of one model agree on every file that both were read from.
        attenuation: for layers that may pass FP16's range, by number: a backend that computes in FP16
            multiplies the up scales by 2^-n and the result by 2^n. Exact, so nodes need not agree on it and
            the fingerprint does not cover it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[2]
    family: Annotated[str, StringConstraints(max_length=64)]
    config: dict[str, object]
    split: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1, max_length=4096)]
    encodings: Encodings
    stored: Encodings
    tokenizer: Annotated[list[TokenizerFile], Field(max_length=4)]
    files: dict[str, FileEntry]
    fingerprint: Sha256
    sources: Annotated[dict[SourceFile, Sample | None], Field(max_length=MOST_SOURCES)] = {}
    attenuation: dict[
        Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}$")], Annotated[int, Field(ge=1, le=24)]
    ] = {}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.stored.settled:
            raise ValueError("it does not say what is stored")
        layers = self.model_config_of().layers
        if sum(self.split) != layers:
            raise ValueError(f"the split adds up to {sum(self.split)} layers, the config has {layers}")
        expected = {
            f"{shard_directory(shard)}/{name}" for shard in self.listed for name in self.expected_files(shard)
        }
        if not self.files:
            raise ValueError("it lists no shard")
        if expected != set(self.files):
            odd = sorted(expected ^ set(self.files))[0]
            what = "does not list" if odd in expected else "lists the surplus file"
            raise ValueError(f"it {what} {odd}")
        return self

    @property
    def shards(self) -> int:
        """How many shards the model is split into."""
        return len(self.split)

    @property
    def layers(self) -> int:
        """Decoder layers of the whole model."""
        return sum(self.split)

    @property
    def listed(self) -> tuple[int, ...]:
        """The shards whose files this manifest knows."""
        found = {place.partition("/")[0] for place in self.files}
        return tuple(shard for shard in range(self.shards) if shard_directory(shard) in found)

    def attenuation_of(self, place: str) -> int:
        """The exponent of the layer in a file, as `shard-NN/NAME`; 0 for all other files."""
        layers = {layer_file(int(layer)): n for layer, n in self.attenuation.items()}
        return layers.get(place.rpartition("/")[2], 0)

    def layers_of(self, shard: int) -> range:
        """The layers of one shard."""
        start = sum(self.split[:shard])
        return range(start, start + self.split[shard])

    def expected_files(self, shard: int) -> tuple[str, ...]:
        """The names of the files in a shard's directory, except the manifest itself."""
        weights = [layer_file(layer) for layer in self.layers_of(shard)]
        if shard == 0:
            weights.insert(0, EMBED)
        if shard == self.shards - 1:
            weights.append(HEAD)
        return (*weights, TABLE, *self.tokenizer)

    def entry(self, shard: int, name: str) -> FileEntry:
        """What a file of a shard must be."""
        return self.files[f"{shard_directory(shard)}/{name}"]

    def model_config_of(self) -> ModelConfig:
        """The config as the family's own type."""
        return read_exported(self.family, self.config)

    def to_bytes(self) -> bytes:
        """The file's content; equal manifests give equal bytes."""
        options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
        return orjson.dumps(self.model_dump(mode="json"), option=options)

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read `manifest.json` of an export, or of one of its shards.

        Raises:
            ShardError: there is none, or it does not hold together.
        """
        path = directory / MANIFEST
        raw = read_bounded(path, f"{directory} has no {MANIFEST}: expected a directory that 'export' wrote")
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ShardError(f"{path} is no JSON ({error}): copy it again, or export again") from None
        found = value.get("format") if isinstance(value, dict) else None
        if found != FORMAT:
            raise ShardError(
                f"{path} has format {found!r}, this version reads {FORMAT}: "
                "export again, into another directory, or use the version that wrote it"
            )
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            raise ShardError(
                f"{path} is damaged: {first_fault(error)}; copy it again, or export again"
            ) from None
        except CheckpointError as error:
            raise ShardError(f"{path} is damaged: {error}; copy it again, or export again") from None


class TensorEntry(BaseModel):
    """Where a tensor lies in its file: little endian, 64-byte aligned."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    shape: Annotated[list[Annotated[int, Field(ge=0, lt=2**40)]], Field(max_length=8)]
    encoding: Encoding
    offset: Annotated[int, Field(ge=0, lt=2**63, multiple_of=64)]
    nbytes: Size


class ShardTable(BaseModel):
    """The tensors of one shard, by file and canonical name."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[2]
    fingerprint: Sha256
    shard: Annotated[int, Field(ge=0, le=4096)]
    files: dict[str, dict[str, TensorEntry]]

    def to_bytes(self) -> bytes:
        """The file's content; equal tables give equal bytes."""
        options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
        return orjson.dumps(self.model_dump(mode="json"), option=options)

    @classmethod
    def load(cls, path: Path) -> ShardTable:
        """Read `shard.json`.

        Raises:
            ShardError: there is none, or it is damaged.
        """
        raw = read_bounded(path, f"{path} is missing: copy the whole directory of the shard, or export again")
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            raise ShardError(
                f"{path} is damaged: {first_fault(error)}; copy it again, or export again"
            ) from None


def differing_source(ours: Mapping[str, str | None], theirs: Mapping[str, str | None]) -> str | None:
    """The name of a source file of which both have a sample, but not the same; None when there is none."""
    return next(
        (
            file
            for file, sample in sorted(ours.items())
            if sample is not None and theirs.get(file) not in (None, sample)
        ),
        None,
    )


def read_bounded(path: Path, missing: str) -> bytes:
    """A small file's content.

    Raises:
        ShardError: it is missing (then with the given sentence), too large, or can not be read.
    """
    try:
        if not path.is_file():
            raise ShardError(missing)
        if (size := path.stat().st_size) > _MOST_JSON_BYTES:
            raise ShardError(
                f"{path} is {size} bytes: expected at most {_MOST_JSON_BYTES}, so it is not ours"
            )
        return path.read_bytes()
    except OSError as error:
        raise ShardError(f"{path} can not be read: {error.strerror}") from error


def first_fault(error: ValidationError) -> str:
    """The first finding in words."""
    found = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in found["loc"])
    text = found["msg"].removeprefix("Value error, ")
    return f"{where}: {text}" if where else text
