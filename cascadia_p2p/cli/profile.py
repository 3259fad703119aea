"""`profile`: measure how fast this PC computes a shard, for `plan` and for the scheduler."""

from __future__ import annotations

import argparse
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson
import psutil
from rich.console import Console
from rich.table import Table

from cascadia_p2p.config import Config, add_flags, find_model, flags_of, load_config
from cascadia_p2p.errors import UsageError
from cascadia_p2p.identity import make_state_root
from cascadia_p2p.types import Promise

if TYPE_CHECKING:
    from cascadia_p2p.doctor.stage_profile import StageProfile, Wish
    from cascadia_p2p.engine.load import LoadProgress
    from cascadia_p2p.planning.measured import FrameTime, MeasuredNode
    from cascadia_p2p.shards.reader import ShardReader

_ROWS: Final = (1, 2, 4, 8, 16, 64)
_POSITIONS: Final = 128
_WINDOW: Final = 64
_BUS_S: Final = 0.3
_SLOW_BUS: Final = 0.8
"""Below this share of the fastest sample memory counts as slow at that time."""

_LINK_RATE: Final = 117e6
_LINK_LATENCY_S: Final = 0.45e-3
"""What a gigabit cable gives: the network is not measured here."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    parser.epilog = (
        "Slots and context default to what the measurement needs. The profile is kept in the state "
        "directory, where 'join' with the same model, device, precision, cache and threads finds it; --out "
        "writes it to a file as well, for 'plan --profile'."
    )
    parser.add_argument(
        "--rows",
        dest="counts",
        metavar="N,N,...",
        default=",".join(map(str, _ROWS)),
        help="streams that decode in a frame (default: %(default)s)",
    )
    parser.add_argument(
        "--positions", type=int, metavar="N", help=f"that each stream holds (default: {_POSITIONS})"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile there, too")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    add_flags(
        parser, "model", "shard", "device", "precision", "cache", "threads", "slots", "context", "state_dir"
    )


def run(args: argparse.Namespace) -> int:
    """Load the shard, measure, print, and keep what was measured.

    Raises:
        CascadiaError: a flag is wrong, the shard can not be loaded, or the profile can not be written.
    """
    config = load_config(flags_of(args), file=args.config)
    counts = _counts(args.counts)
    # The engine takes seconds to import: flags are judged before.
    from cascadia_p2p.node.profiles import profile_path, write_profile
    from cascadia_p2p.shards.reader import ShardReader

    reader = ShardReader(find_model(config), config.shard)
    wish, promise = _wished(config, counts, args.positions, reader.config.context)
    if args.out is not None and args.out.is_dir():
        raise UsageError(f"--out {args.out} is a directory: name a file")
    make_state_root(config.state_root)
    say = _Saying(quiet=args.json)
    node = _measured(config, reader, wish, promise, say)
    subject = node.subject
    assert subject is not None
    kept = profile_path(config.state_root, subject)
    for path in (kept, args.out):
        if path is not None:
            write_profile(path, node)
    if args.json:
        body = node.model_dump(mode="json")
        sys.stdout.buffer.write(orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        sys.stdout.flush()
    else:
        _show(node, reader)
        print(f"kept in {kept}{'' if args.out is None else f' and {args.out}'}")
    return 0


# --- what is asked ------------------------------------------------------------------------------------------


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        counts = ()
    if not counts or counts[0] < 1 or counts[-1] > 4096:
        raise UsageError(f"--rows '{text}' is not right: expected numbers from 1 to 4096 like 1,2,4,8")
    return counts


def _wished(
    config: Config, counts: tuple[int, ...], positions: int | None, longest: int
) -> tuple[Wish, Promise]:
    """What is measured, and what the stage has to have room for."""
    from cascadia_p2p.doctor.stage_profile import AHEAD, Wish

    slots = counts[-1] if config.source("slots") == "default" else config.slots
    most = longest if config.source("context") == "default" else min(config.context, longest)
    held = min(_POSITIONS, most - AHEAD) if positions is None else positions
    if held < 1 or held + AHEAD > most:
        raise UsageError(
            f"--positions {held}: expected 1 to {most - AHEAD}, because the context is {most} and {AHEAD} "
            "positions are decoded behind them"
        )
    taken = tuple(count for count in counts if count <= slots)
    if not taken:
        raise UsageError(f"--rows {counts[0]} is more than --slots {slots}: each row is of another stream")
    context = held + AHEAD if config.source("context") == "default" else most
    rows = max(_WINDOW, taken[-1])
    return Wish(taken, held, _WINDOW), Promise(slots, context, rows)


class _Saying:
    """Says on a terminal's standard error what is being done."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._shown = not quiet and self._console.is_terminal
        self._last = ""

    def __call__(self, what: str) -> None:
        if self._shown and what != self._last:
            self._last = what
            self._console.print(what, markup=False, end="\x1b[K\r", soft_wrap=True)

    def loading(self, progress: LoadProgress) -> None:
        """Of loading."""
        self(f"{progress.phase}: {progress.part}, {progress.done} of {progress.total}")


@dataclass(slots=True)
class _Bus:
    """Samples of how fast memory is."""

    threads: int
    samples: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        from cascadia_p2p.doctor.bandwidth import measure_bandwidth

        self.samples.append(measure_bandwidth(self.threads, _BUS_S).rate)
        return self.samples[-1]


def _measured(
    config: Config, reader: ShardReader, wish: Wish, promise: Promise, say: _Saying
) -> MeasuredNode:
    from cascadia_p2p.doctor.stage_profile import StageProfiler
    from cascadia_p2p.engine.load import load_stage, shard_footprint, stage_need
    from cascadia_p2p.models.sizing import model_sizes

    say("checking files")
    reader.verify(config.state_root)
    free = int(psutil.virtual_memory().available)
    stage = load_stage(
        reader.path,
        reader.index,
        promise,
        config.device,
        config.precision,
        config.threads,
        say.loading,
        cache=config.cache,
    )
    footprint = shard_footprint(reader, config.device, config.cache)
    sizes, bus = model_sizes(reader.config), _Bus(config.threads)
    profile = StageProfiler(stage, reader.layers, sizes, footprint, wish, bus, say).run()
    say("")
    need = stage_need(reader, promise, footprint=footprint)
    return _node(config, reader, profile, bus.samples, free, need.total - need.reserve - need.mapped)


def _node(
    config: Config,
    reader: ShardReader,
    profile: StageProfile,
    bus: list[float],
    free: int,
    counted: int,
) -> MeasuredNode:
    """The profile of this node.

    Args:
        config: as the stage was loaded.
        reader: of its shard.
        profile: what was measured.
        bus: samples of memory's speed.
        free: bytes of memory that were free before loading.
        counted: bytes in memory of the process's own that the prediction accounts for.
    """
    from statistics import median

    from cascadia_p2p.node.profiles import subject_of
    from cascadia_p2p.planning.measured import Link, MeasuredNode

    own = psutil.Process().memory_info()
    shared = int(getattr(own, "shared", 0))
    return MeasuredNode(
        name=(platform.node() or "this machine")[:64],
        memory_shown=int(psutil.virtual_memory().total),
        memory_usable=free,
        bandwidth=median(bus),
        overhead_bytes=max(int(own.rss) - shared - counted, 0),
        times=profile.times,
        link=Link(rate=_LINK_RATE, latency_s=_LINK_LATENCY_S),
        subject=subject_of(config, reader),
        frames=profile.frames,
    )


# --- what is shown ------------------------------------------------------------------------------------------


def _show(node: MeasuredNode, reader: ShardReader) -> None:
    console = Console(highlight=False, width=max(Console().width, 140))
    subject = node.subject
    assert subject is not None
    layers = reader.layers
    console.print(
        f"shard {subject.shard}, layers {layers.start} to {layers.stop - 1}, on {subject.device}, precision "
        f"{subject.precision}, cache {subject.cache}, {subject.threads} threads",
        markup=False,
    )
    samples = [rate for each in node.frames for rate in (each.bus_before, each.bus_after)]
    console.print(
        f"memory gave {min(samples) / 1e9:.1f} to {max(samples) / 1e9:.1f} GB/s, median "
        f"{node.bandwidth / 1e9:.1f}",
        markup=False,
    )
    console.print(_table(node, max(samples)))
    if any(not each.steady for each in node.frames):
        console.print(
            "memory's speed changed during the frames that are marked with *: their ratio says little",
            markup=False,
        )


def _table(node: MeasuredNode, fastest: float) -> Table:
    parts = [part for part in node.frames[0].parts if any(each.parts.get(part, 0.0) for each in node.frames)]
    table = Table(box=None, pad_edge=False)
    behind = ("MB read", "GB/s", "bus before", "after", "state", "x bus")
    for title in ("frames", "ms", "ms a row", *parts, *behind):
        table.add_column(title, justify="left" if title == "frames" else "right", no_wrap=True)
    for each in node.frames:
        table.add_row(
            f"{each.kind}, {each.rows} rows",
            f"{each.seconds * 1e3:.2f}",
            f"{each.seconds * 1e3 / each.rows:.2f}",
            *(f"{each.parts.get(part, 0.0) * 1e3:.2f}" for part in parts),
            f"{each.read_bytes / 1e6:.1f}",
            f"{each.read_bytes / max(each.seconds, 1e-9) / 1e9:.1f}",
            f"{each.bus_before / 1e9:.1f}",
            f"{each.bus_after / 1e9:.1f}",
            _state(each, fastest),
            f"{each.ratio:.2f}{'' if each.steady else '*'}",
        )
    return table


def _state(frame: FrameTime, fastest: float) -> str:
    """Whether memory was at its fast or its slow speed around these frames."""
    if not frame.steady:
        return "changed"
    return "slow" if frame.bus < _SLOW_BUS * fastest else "fast"
