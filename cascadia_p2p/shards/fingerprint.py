"""One number for what an export is made of: the same on every machine that exports a part of it.

The machines of a ring may each export only their own shards, from only the files that hold them. So the
number covers what all of them have: config, split, encodings, tokenizer, and the checkpoint's index, which
names every tensor and its file. A checkpoint without an index is always whole; of that it covers samples of
every tensor.

What the number can not see, two models of one shape whose indexes are equal, is seen by samples of the files
that were read (`Source.sample`): each manifest holds those of its own shards, and shards whose manifests
disagree about a file are not of one model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import orjson

from cascadia_p2p.models.family import SourceModel
from cascadia_p2p.shards.encodings import Encodings
from cascadia_p2p.shards.manifest import FORMAT, TokenizerFile
from cascadia_p2p.shards.source import Source


def fingerprint(
    source: Source,
    model: SourceModel,
    split: Sequence[int],
    encodings: Encodings,
    tokenizer: Mapping[TokenizerFile, bytes],
) -> str:
    """A sha256, in hex, over config, the source's identity, split, encodings and tokenizer.

    What is already exported plays no part.

    Raises:
        CheckpointError: the source can not be read.
    """
    parts = {
        "format": FORMAT,
        "family": model.family,
        "config": model.config.to_json(),
        "split": list(split),
        "encodings": encodings.model_dump(mode="json"),
        "tokenizer": {name: hashlib.sha256(data).hexdigest() for name, data in tokenizer.items()},
        "source": source.identity(),
    }
    return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()
