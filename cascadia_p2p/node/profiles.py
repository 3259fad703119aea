"""Where a machine keeps what `profile` measured, so that `join` finds it again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import structlog

from cascadia_p2p.config import Config
from cascadia_p2p.errors import CascadiaError, UsageError
from cascadia_p2p.planning.measured import MeasuredNode, Subject, read_measured
from cascadia_p2p.ring.stagetime import Pace, StageTime
from cascadia_p2p.shards.files import write_whole
from cascadia_p2p.shards.reader import ShardReader

_MOST_BYTES: Final = 1 << 20
_LONGEST_LAYER_S: Final = 60.0
"""A layer that takes longer is not believed: the time after which a node counts as stuck grows with it."""

_log = structlog.get_logger()


def subject_of(config: Config, reader: ShardReader) -> Subject:
    """What this shard is when it is loaded by this configuration."""
    return Subject(
        fingerprint=reader.manifest.fingerprint,
        shard=reader.index,
        device=config.device,
        precision=config.precision,
        cache=config.cache,
        threads=config.threads,
    )


def profile_path(state_root: Path, subject: Subject) -> Path:
    """The file of one subject's profile; all nodes of one user on a machine share these."""
    key = hashlib.sha256(subject.model_dump_json().encode()).hexdigest()[:16]
    return state_root / "profiles" / f"{key}.json"


def write_profile(path: Path, measured: MeasuredNode) -> None:
    """Write a profile in the form that `plan` reads.

    Raises:
        CascadiaError: the file can not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (measured.model_dump_json(indent=2, exclude_none=True) + "\n").encode())
    except OSError as error:
        raise CascadiaError(f"the profile can not be written to {path}: {error.strerror}") from error


def find_profile(state_root: Path, subject: Subject) -> MeasuredNode | None:
    """What was measured of this subject here; None when nothing was, or its file is of no use."""
    path = profile_path(state_root, subject)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is no profile of a node: it is too long")
        (found,) = read_measured(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except (OSError, UsageError, ValueError) as error:
        _log.warning("profile_ignored", message=f"an earlier profile is not used: {error}")
        return None
    return found if found.subject == subject else None


def pace(measured: MeasuredNode) -> Pace:
    """How the stage's time grows with rows, for the scheduler; empty when too little was measured.

    Decoding frames as far as they were timed, behind them prompt windows.
    """
    decoding = measured.decoding()
    most = max((rows for rows, _ in decoding), default=0)
    windows = [(each.rows, each.seconds) for each in measured.frames if each.kind == "prefill"]
    time = StageTime.measured([*decoding, *(each for each in windows if each[0] > most)])
    return () if time is None else time.points


def layer_seconds(measured: MeasuredNode, steps: int) -> float:
    """Seconds that a step of the stage takes for the longest frame that was timed; 0 when none was.

    Args:
        measured: what was.
        steps: between which the stage tells that it goes on: layers, or groups of small ones.
    """
    longest = max((each.seconds for each in measured.frames), default=0.0)
    return min(longest / max(steps, 1), _LONGEST_LAYER_S)
