"""One number for what an export is made of: equal for equal models, and for nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import orjson

from cascadia_p2p.models.family import SourceModel
from cascadia_p2p.shards.encodings import Encodings
from cascadia_p2p.shards.files import file_sha256
from cascadia_p2p.shards.manifest import FORMAT
from cascadia_p2p.shards.safetensors import Checkpoint

_SAMPLE_BYTES = 256


def fingerprint(
    source: Checkpoint,
    model: SourceModel,
    split: Sequence[int],
    encodings: Encodings,
    tokenizer: Sequence[str],
) -> str:
    """A sha256, in hex, over config, source index, samples of every tensor, split, encodings and tokenizer.

    The source is too large to be hashed for this; three samples of each tensor tell apart models of
    the same shape that were trained differently. What is already exported plays no part.

    Raises:
        CheckpointError: the source can not be read.
    """
    digest = hashlib.sha256()
    parts = {
        "format": FORMAT,
        "family": model.family,
        "config": model.config.to_json(),
        "split": list(split),
        "encodings": encodings.model_dump(mode="json"),
        "tokenizer": {name: file_sha256(source.path / name) for name in tokenizer},
        "files": {
            name: (source.path / name).stat().st_size
            for name in sorted({source.file_of(tensor) for tensor in source.names})
        },
    }
    digest.update(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS))
    for name in source.names:
        stored = source.tensor(name)
        digest.update(orjson.dumps([name, source.file_of(name), stored.dtype, list(stored.shape)]))
        for start in (0, stored.nbytes // 2, max(0, stored.nbytes - _SAMPLE_BYTES)):
            digest.update(source.read_bytes(name, start, _SAMPLE_BYTES))
    return digest.hexdigest()
