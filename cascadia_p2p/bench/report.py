"""A run as JSON and as a table."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue, TypeAdapter
from rich.table import Table

from cascadia_p2p import __version__
from cascadia_p2p.bench.running import LevelReport, NodeLoad
from cascadia_p2p.workload import Protocol

FORMAT: Final = 1

_LEVELS: TypeAdapter[list[LevelReport]] = TypeAdapter(list[LevelReport])


@dataclass(frozen=True, slots=True)
class Setting:
    """What was measured, and how.

    Args:
        started: when, as in ISO 8601.
        note: the user's own words.
        prompts: what was asked.
        seed: of prompts of token ids.
        protocol: of the curve.
        ring: what the head said of the ring before the first level.
        emulated: the fleet's name and by how much its times were divided; None for a ring that computes.
    """

    started: str
    note: str
    prompts: str
    seed: int
    protocol: Protocol
    ring: Mapping[str, JsonValue]
    emulated: Mapping[str, JsonValue] | None


def ring_facts(status: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """What a report keeps of the head's status."""
    stages = status.get("stages")
    kept = {name: status.get(name) for name in ("fleet", "model", "state", "promise", "engine")}
    return kept | {"stages": len(stages) if isinstance(stages, list) else 0}


def as_json(setting: Setting, levels: Sequence[LevelReport], *, complete: bool) -> dict[str, JsonValue]:
    """The whole run.

    Args:
        setting: of the run.
        levels: that were measured.
        complete: whether these are all that were asked for.
    """
    return {
        "format": FORMAT,
        "kind": "bench",
        "software": __version__,
        "machine": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        },
        **TypeAdapter(Setting).dump_python(setting, mode="json"),
        "complete": complete,
        "levels": [
            {**level, "bench_share": report.bench_share, "overhead": report.overhead}
            for level, report in zip(_LEVELS.dump_python(list(levels), mode="json"), levels, strict=True)
        ],
    }


def as_table(levels: Sequence[LevelReport], published: Mapping[int, float]) -> Table:
    """A line a level.

    Args:
        levels: that were measured.
        published: decode rates by streams, to stand beside; may be empty.
    """
    table = Table(box=None, pad_edge=False)
    titles = ["streams", "decode tok/s", "phase tok/s", "TTFT median s", "p95 s", "requests"]
    if published:
        titles.insert(2, "published")
    if any(level.simulated for level in levels):
        titles += ["simulated", "overhead"]
    titles += ["head CPU ms/tok (extra)", "middle", "tail", "bench CPU"]
    for title in titles:
        table.add_column(title, justify="right", overflow="fold")
    for level in levels:
        table.add_row(*_row(level, published, simulated="overhead" in titles))
    return table


def _row(level: LevelReport, published: Mapping[int, float], *, simulated: bool) -> list[str]:
    result = level.result
    if result is None:
        cells = ["no answer", *[""] * (5 if published else 4)]
    else:
        cells = ["-" if result.decode_tok_s is None else f"{result.decode_tok_s:.2f}"]
        if published:
            found = published.get(level.streams)
            cells.append("" if found is None else f"{found:.2f}")
        cells += [f"{result.phase_tok_s:.2f}", f"{result.ttft_median_s:.2f}", f"{result.ttft_p95_s:.2f}"]
        cells.append(str(result.requests))
    if simulated:
        best = None if level.simulated is None else level.simulated.decode_tok_s
        cells.append("" if best is None else f"{best:.2f}")
        cells.append("" if level.overhead is None else f"{level.overhead:.1%}")
    mark = " !" if level.faults else ""
    return [f"{level.streams}{mark}", *cells, *_cpu(level.nodes), f"{level.bench_share:.1%}"]


def _cpu(nodes: Sequence[NodeLoad]) -> list[str]:
    """Milliseconds a token of the first node, of those between as a mean, and of the last."""
    ends = [nodes[:1], nodes[1:-1], nodes[-1:] if len(nodes) > 1 else ()]
    return [_mean_cpu(each) for each in ends]


def _mean_cpu(nodes: Sequence[NodeLoad]) -> str:
    whole = [each.cpu_ms_token for each in nodes if each.cpu_ms_token is not None]
    extra = [each.extra_cpu_ms_token for each in nodes if each.extra_cpu_ms_token is not None]
    if not whole or len(whole) < len(nodes):
        return ""
    beyond = f" ({sum(extra) / len(extra):.2f})" if len(extra) == len(whole) else ""
    return f"{sum(whole) / len(whole):.2f}{beyond}"
