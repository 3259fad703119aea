"""Models, PCs and measurements for the planner's tests."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cascadia_p2p.engine.footprint import Backend, Footprint
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.models.family import read_config
from cascadia_p2p.models.sizes import CacheSizes, LayerSizes, Matrices, ModelSizes, Part
from cascadia_p2p.models.sizing import model_sizes
from cascadia_p2p.planning.machine import (
    LEFT_TO_SYSTEM,
    GpuMemory,
    Machine,
    make_machine,
    parse_memory,
)
from cascadia_p2p.planning.measured import Link, MeasuredNode, PartTime, Timed
from cascadia_p2p.planning.needs import Demand
from cascadia_p2p.types import Promise

CONFIGS = Path(__file__).parents[2] / "configs"
GIGABIT = Link(rate=117e6, latency_s=0.45e-3)
INT4 = {
    backend: Footprint(backend, Encoding.INT4, Encoding.INT8, Encoding.INT8, Encoding.BF16)
    for backend in Backend
}


@cache
def published(name: str) -> ModelSizes:
    """One of the two published models: `975b` or `small-276b`."""
    config = json.loads((CONFIGS / f"inkling-{name}" / "config.json").read_text())
    return model_sizes(read_config(config, None)[1])


def tiny_model(layers: int, *, experts: int = 8, window: int | None = None) -> ModelSizes:
    """A model whose first layer is dense and whose others have experts; a few hundred kilobytes a layer."""
    projections = (Matrices(Part.PROJECTIONS, 96, 64), Matrices(Part.PROJECTIONS, 64, 32))
    routed = tuple(Matrices(Part.ROUTED, *shape, experts, 2) for shape in ((48, 64), (48, 64), (64, 48)))
    dense = tuple(Matrices(Part.DENSE, *shape) for shape in ((128, 64), (128, 64), (64, 128)))
    sparse = LayerSizes((*projections, *routed), CacheSizes(512, window, 4, 192), 640, 700, 3)
    first = LayerSizes((*projections, *dense), CacheSizes(256, None, 4, 160), 0, 600, 3)
    return ModelSizes(
        "inkling",
        64,
        4096,
        (first, *[sparse] * (layers - 1)),
        Matrices(Part.EMBEDDING, 1000, 64),
        Matrices(Part.HEAD, 990, 64),
    )


def pcs(count: int, memory: str, backend: Backend, gpu: GpuMemory = GpuMemory.LIFTED) -> tuple[Machine, ...]:
    """Equal PCs, spelled as on the command line."""
    shown = parse_memory("--memory", memory)
    return tuple(make_machine(f"node {n}", shown, LEFT_TO_SYSTEM, backend, gpu) for n in range(count))


def demand(backend: Backend, slots: int = 176, context: int = 1024, rows: int = 64) -> Demand:
    """INT4 experts, INT8 elsewhere."""
    return Demand(Promise(slots, context, rows), INT4[backend])


def node(name: str, bandwidth: float, link: Link = GIGABIT, **values: object) -> MeasuredNode:
    """A node of which only bandwidth and link are known, beside what is given."""
    return MeasuredNode.model_validate({"name": name, "bandwidth": bandwidth, "link": link, **values})


def timed(rows_and_ms: Sequence[tuple[int, float]], part: Timed = Timed.SPARSE) -> list[PartTime]:
    """Times of one part in milliseconds."""
    return [PartTime(part=part, rows=rows, seconds=ms / 1e3) for rows, ms in rows_and_ms]


def fleet_table(name: str) -> list[dict[str, float]]:
    """A table of the published fleet, from the tests' data."""
    with (Path(__file__).parent / "fleet" / name).open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
