"""How many consecutive layers each shard takes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cascadia_p2p.errors import UsageError

_WHOLE = re.compile(r"[0-9]{1,9}", re.ASCII)


def even_split(shards: int, layers: int) -> tuple[int, ...]:
    """Sizes that differ by at most one layer, the larger ones first.

    Raises:
        UsageError: fewer shards than one, or more than layers.
    """
    if shards < 1:
        raise UsageError(f"--shards is {shards}: expected 1 or more")
    if shards > layers:
        raise UsageError(
            f"--shards is {shards}, but the model has {layers} layers: a shard needs at least one layer, "
            f"so at most {layers} shards are possible"
        )
    size, larger = divmod(layers, shards)
    return tuple(size + 1 if shard < larger else size for shard in range(shards))


def parse_split(text: str) -> tuple[int, ...]:
    """Read `6,6,4`: positive whole numbers; whether they add up is known once the model is.

    Raises:
        UsageError: anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    for place, part in enumerate(parts):
        if not _WHOLE.fullmatch(part) or int(part) == 0:
            raise UsageError(
                f"--split has '{part}' at place {place + 1}: expected the number of layers of each shard, "
                "1 or more, as in 6,6,4"
            )
    return tuple(int(part) for part in parts)


def parse_shards(text: str) -> tuple[int, ...]:
    """Read `3,4`: indexes of shards, counted from 0; whether there are so many is known once the model is.

    Raises:
        UsageError: anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not _WHOLE.fullmatch(part):
            raise UsageError(
                f"--only-shards has '{part}': expected indexes of shards, counted from 0, as in 3,4"
            )
    return tuple(int(part) for part in parts)


def choose_shards(only: Sequence[int] | None, shards: int) -> tuple[int, ...]:
    """The shards to export, in order: those asked for, or all.

    Raises:
        UsageError: one that there is not, or none.
    """
    if only is None:
        return tuple(range(shards))
    if strange := [shard for shard in only if not 0 <= shard < shards]:
        raise UsageError(
            f"--only-shards names shard {strange[0]}: the model is split into {shards}, 0 to {shards - 1}"
        )
    if not only:
        raise UsageError("--only-shards names no shard")
    return tuple(sorted(set(only)))


def check_split(split: tuple[int, ...], layers: int) -> None:
    """See that the sizes are positive and add up.

    Raises:
        UsageError: they are not, or do not.
    """
    if not split or min(split) < 1:
        raise UsageError(
            f"the split {spell_split(split)} has a shard without layers: each needs at least one"
        )
    if sum(split) != layers:
        raise UsageError(
            f"--split {spell_split(split)} adds up to {sum(split)} layers, but the model has {layers}: "
            "every layer must be in exactly one shard"
        )


def spell_split(split: tuple[int, ...]) -> str:
    """The split as the command line writes it."""
    return ",".join(str(size) for size in split)
