"""Checks the model directory: that every file is there and whole, and that its shards fit this PC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from cascadia_p2p.config import Config, find_model
from cascadia_p2p.doctor.finding import Finding, Level
from cascadia_p2p.doctor.memory import check_need
from cascadia_p2p.engine.memory import available_memory
from cascadia_p2p.errors import CascadiaError, UsageError
from cascadia_p2p.planning.machine import gb
from cascadia_p2p.shards.manifest import Manifest
from cascadia_p2p.shards.reader import ShardReader, VerifyProgress, held_shards
from cascadia_p2p.types import Promise


def check_model(
    config: Config, *, contents: bool, progress: Callable[[VerifyProgress], None] | None = None
) -> Iterator[Finding]:
    """The model's shards here, one after another.

    Args:
        config: names the model, perhaps the shard, and what would be promised. A model that it does not name
            is looked for where `join` would, and then only its files' sizes are compared.
        contents: read every file and compare it with its checksum, unless that was done before.
        progress: told while files are read.
    """
    try:
        directory = find_model(config)
    except UsageError as error:
        if config.model is None:
            yield Finding(
                "model", Level.OK, "no model is named (--model DIR) or found here: none was examined"
            )
        else:
            yield _failed("model", error)
        return
    contents = contents and config.model is not None
    try:
        manifest = Manifest.load(directory)
        held = held_shards(directory)
    except CascadiaError as error:
        yield _failed("model", error)
        return
    wanted = held if config.shard is None else (config.shard,)
    if not wanted:
        yield Finding(
            "model",
            Level.FAIL,
            f"{directory} holds none of its {manifest.shards} shards",
            "copy one of them here",
        )
    available = available_memory()
    for shard in wanted:
        yield from _check_shard(config, directory, shard, contents, progress, available)


def _check_shard(
    config: Config,
    directory: Path,
    shard: int,
    contents: bool,
    progress: Callable[[VerifyProgress], None] | None,
    available: int,
) -> Iterator[Finding]:
    # The engine takes seconds to import.
    from cascadia_p2p.engine.load import shard_footprint, stage_need

    try:
        reader = ShardReader(directory, shard)
        if contents:
            reader.verify(config.state_root, progress)
    except CascadiaError as error:
        yield _failed("model", error)
        return
    how = "every file is as exported" if contents else "every file has its size (contents not read)"
    layers = f"layers {reader.layers.start} to {reader.layers.stop - 1}"
    yield Finding(
        "model",
        Level.OK,
        f"shard {shard} of {reader.manifest.shards} in {directory}: {layers}, {gb(reader.nbytes)}, {how}",
        facts={"shard": shard, "bytes": reader.nbytes, "fingerprint": reader.manifest.fingerprint},
    )
    promise = Promise(config.slots, min(config.context, reader.config.context), config.rows, config.prefixes)
    footprint = shard_footprint(reader, config.device, config.cache)
    yield from check_need(shard, partial(stage_need, reader, footprint=footprint), promise, available)


def _failed(check: str, error: CascadiaError) -> Finding:
    message, _, advice = str(error).partition("; ")
    return Finding(check, Level.FAIL, message, advice)
