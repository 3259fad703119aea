"""Draws curves of throughput and of times to the first token into one picture; needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from cascadia_p2p.errors import CascadiaError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INSTALL: Final = "a plot needs matplotlib, which is not installed: pip install 'cascadia-p2p[plot]'"
_COLOURS: Final = ("#0b6e99", "#c4511c", "#3d7a3d", "#7a4f9a", "#8a8a00", "#444444")
_DOTS_PER_INCH: Final = 110


class Point(Protocol):
    """A level: `workload.LevelResult`, or one of a published curve."""

    @property
    def streams(self) -> int:
        """At once."""

    @property
    def decode_tok_s(self) -> float | None:
        """While all decode; None where they never did."""

    @property
    def ttft_median_s(self) -> float:
        """Seconds."""

    @property
    def ttft_p95_s(self) -> float:
        """Seconds."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve of the picture.

    Args:
        label: what it is of.
        points: its levels.
        dashed: it is there to compare with.
    """

    label: str
    points: Sequence[Point]
    dashed: bool = False


def check_plot(path: Path) -> None:
    """Refuse early what `draw` would refuse after all the work.

    Raises:
        UsageError: the name does not end in .png, or its directory is not there.
        CascadiaError: matplotlib is not installed.
    """
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot {path}: the picture is a PNG, so the name has to end in .png")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no directory {path.parent}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise CascadiaError(_INSTALL) from None


def draw(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Write the picture: decode rates over streams on the left, times to the first token on the right.

    Args:
        path: of the PNG.
        title: above both.
        curves: with one level or more.

    Raises:
        UsageError: see `check_plot`.
        CascadiaError: matplotlib is not installed, or the file can not be written.
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    # No pyplot: it keeps figures of the whole process and looks for a display.
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    rates, waits = figure.subplots(1, 2)
    for number, curve in enumerate(curves):
        points = sorted(curve.points, key=lambda point: point.streams)
        _draw_rate(rates, curve, points, _COLOURS[number % len(_COLOURS)])
        _draw_waits(waits, curve, points, _COLOURS[number % len(_COLOURS)])
    ticks = sorted({point.streams for curve in curves for point in curve.points})
    for axes, label in ((rates, "decode, tokens/s"), (waits, "first token, s: median, and to p95")):
        _finish(axes, label, ticks)
    rates.set_ylim(bottom=0)
    waits.set_yscale("log")
    waits.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH, format="png")
    except OSError as error:
        raise CascadiaError(f"the picture can not be written to {path}: {error.strerror}") from error


def _draw_rate(axes: Axes, curve: Curve, points: Sequence[Point], colour: str) -> None:
    drawn = [(point.streams, point.decode_tok_s) for point in points if point.decode_tok_s is not None]
    axes.plot(
        [streams for streams, _ in drawn],
        [rate for _, rate in drawn],
        color=colour,
        linestyle="--" if curve.dashed else "-",
        marker="o",
        markersize=3.5,
        label=curve.label,
    )


def _draw_waits(axes: Axes, curve: Curve, points: Sequence[Point], colour: str) -> None:
    streams = [point.streams for point in points]
    medians = [point.ttft_median_s for point in points]
    axes.plot(
        streams,
        medians,
        color=colour,
        linestyle="--" if curve.dashed else "-",
        marker="o",
        markersize=3.5,
        label=curve.label,
    )
    axes.fill_between(streams, medians, [point.ttft_p95_s for point in points], color=colour, alpha=0.12)


def _finish(axes: Axes, label: str, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=60, fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("streams")
    axes.set_ylabel(label)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
