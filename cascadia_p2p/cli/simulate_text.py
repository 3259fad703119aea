"""A simulated curve as people read it in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.table import Table

from cascadia_p2p.simulate.published import CurvePoint
from cascadia_p2p.simulate.report import PlacedLevel, Report
from cascadia_p2p.simulate.study import LevelStudy, PolicyName

_WIDTH: Final = 150
_WORDS: Final = {
    PolicyName.OURS: "this program's scheduler",
    PolicyName.PUBLISHED: "the published policy: fixed groups of streams",
}


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Say on a terminal what is being simulated, and take it back at the end."""
    shown = sys.stderr.isatty()

    def tell(sentence: str) -> None:
        if shown:
            sys.stderr.write(f"\r\x1b[K{sentence}")
            sys.stderr.flush()

    try:
        yield tell
    finally:
        tell("")


def show(report: Report) -> None:
    """Print it on stdout."""
    console = Console(highlight=False, width=max(Console().width, _WIDTH))

    def say(sentence: str) -> None:
        console.print(sentence, markup=False, soft_wrap=True)

    fleet = report.fleet
    say(
        f"{fleet.name}: {len(fleet.stages)} stages, layers {','.join(map(str, fleet.split))}, "
        f"{fleet.promise.slots} slots, at most {fleet.promise.rows} rows a frame; "
        f"{report.protocol.tokens} tokens, prompts of {report.prompt}"
    )
    for policy in PolicyName:
        levels = [each for each in report.levels if each.policy is policy]
        if not levels:
            continue
        say(f"\n{_WORDS[policy]}")
        console.print(_levels(report, levels))
        say(_where(levels[-1]))
        console.print(_stages(levels[-1]))
    if report.placed:
        say(f"\nplacement, at {report.placed[0].level.result.streams} streams")
        console.print(_placed(report.placed))


def _levels(report: Report, levels: Sequence[LevelStudy]) -> Table:
    table = Table(box=None, pad_edge=False)
    titles = ["streams", "rows a frame", "decode tok/s", "phase tok/s", "first token s", "p95 s", "trip s"]
    titles += ["slowest stage", "works"]
    if report.published:
        titles += ["published: decode", "phase", "first token", "p95"]
    for title in titles:
        table.add_column(title, justify="left" if title == "slowest stage" else "right")
    for level in levels:
        table.add_row(*_cells(level), *_compared(level, report.point(level.result.streams)))
    return table


def _cells(level: LevelStudy) -> list[str]:
    result, slowest = level.result, level.stages[level.slowest]
    return [
        str(result.streams),
        f"{level.trip.rows:.2f}",
        "-" if result.decode_tok_s is None else f"{result.decode_tok_s:.2f}",
        f"{result.phase_tok_s:.2f}",
        f"{result.ttft_median_s:.2f}",
        f"{result.ttft_p95_s:.2f}",
        f"{level.trip.seconds:.3f}",
        slowest.name,
        f"{slowest.busy:.1%}",
    ]


def _compared(level: LevelStudy, point: CurvePoint | None) -> list[str]:
    if point is None:
        return []
    result = level.result
    pairs = (
        (result.decode_tok_s, point.decode_tok_s),
        (result.phase_tok_s, point.phase_tok_s),
        (result.ttft_median_s, point.ttft_median_s),
        (result.ttft_p95_s, point.ttft_p95_s),
    )
    return [f"{given:.2f}" + (f" {found / given - 1:+5.0%}" if found else "") for found, given in pairs]


def _where(level: LevelStudy) -> str:
    """What a frame's way goes to, and what the slowest stage would allow."""
    trip, slowest = level.trip, level.stages[level.slowest]
    parts = ", ".join(
        f"{name} {seconds / trip.seconds:.0%}"
        for name, seconds in (("in stages", trip.stages), ("hops", trip.hops), ("waiting", trip.queued))
    )
    return (
        f"at {level.result.streams} streams a frame is {trip.seconds:.3f} s on its way: {parts}; "
        f"{slowest.name} works {slowest.busy:.1%} of the time, without a pause "
        f"{level.bound_tok_s:.2f} tokens/s"
    )


def _stages(level: LevelStudy) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    for stage in level.stages:
        table.add_column(stage.name, justify="right")
    table.add_row("works", *(f"{stage.busy:.0%}" for stage in level.stages))
    table.add_row("ms a row", *(f"{stage.row_ms:.1f}" for stage in level.stages))
    return table


def _placed(placed: Sequence[PlacedLevel]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("placement", "machines in ring order", "layers", "policy", "decode tok/s", "slowest stage"):
        table.add_column(title, justify="right" if title == "decode tok/s" else "left")
    for each in placed:
        rate = each.level.result.decode_tok_s
        table.add_row(
            each.placement.label,
            ",".join(map(str, each.placement.order)),
            ",".join(map(str, each.placement.split)),
            each.level.policy.value,
            "-" if rate is None else f"{rate:.2f}",
            each.level.stages[each.level.slowest].name,
        )
    return table
