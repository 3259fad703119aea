"""A ring of real node processes on this machine whose stages wait as long as those of a fleet compute."""

from __future__ import annotations

import hashlib
from pathlib import Path

import orjson

from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.models.emulated.config import FAMILY, EmulatedConfig
from cascadia_p2p.shards.encodings import Encodings
from cascadia_p2p.shards.manifest import (
    EMBED,
    FORMAT,
    HEAD,
    MANIFEST,
    TABLE,
    FileEntry,
    Manifest,
    ShardTable,
    layer_file,
    shard_directory,
)

_NOTHING = hashlib.sha256(b"").hexdigest()


def write_emulated(directory: Path, config: EmulatedConfig) -> Manifest:
    """Write an exported model whose weights are empty files: one shard a stage, loaded like any other."""
    encodings = Encodings(
        experts=Encoding.F32, projections=Encoding.F32, head=Encoding.F32, embedding=Encoding.F32
    )
    shards = config.layers
    fingerprint = hashlib.sha256(orjson.dumps([FAMILY, config.to_json()])).hexdigest()
    files: dict[str, FileEntry] = {}
    for shard in range(shards):
        folder = directory / shard_directory(shard)
        folder.mkdir(parents=True)
        names = [
            *([EMBED] if shard == 0 else []),
            layer_file(shard),
            *([HEAD] if shard == shards - 1 else []),
        ]
        table = ShardTable(
            format=FORMAT, fingerprint=fingerprint, shard=shard, files={name: {} for name in names}
        )
        for name in names:
            (folder / name).touch()
            files[f"{folder.name}/{name}"] = FileEntry(size=0, sha256=_NOTHING)
        raw = table.to_bytes()
        (folder / TABLE).write_bytes(raw)
        files[f"{folder.name}/{TABLE}"] = FileEntry(size=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    manifest = Manifest(
        format=FORMAT,
        family=FAMILY,
        config=config.to_json(),
        split=[1] * shards,
        encodings=encodings,
        stored=encodings,
        tokenizer=[],
        files=files,
        fingerprint=fingerprint,
    )
    (directory / MANIFEST).write_bytes(manifest.to_bytes())
    return manifest
