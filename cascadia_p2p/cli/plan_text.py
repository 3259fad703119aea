"""A plan as people read it in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from cascadia_p2p.engine.memory import in_words
from cascadia_p2p.models.sizes import Part
from cascadia_p2p.planning.machine import GIB, GpuMemory, gb, gib, is_as_sold
from cascadia_p2p.planning.plan import Option, Plan, PlannedStage
from cascadia_p2p.shards.split import spell_split

_WIDTH = 180
"""Columns of a table, at most; one that is too wide for the terminal is still better whole."""


def show(plan: Plan, memory: str | None) -> None:
    """Print it on stdout.

    Args:
        plan: what was found.
        memory: of each PC, as the user spelled it.
    """
    console = Console(highlight=False, width=max(Console().width, _WIDTH))

    def say(sentences: Sequence[str]) -> None:
        for sentence in sentences:
            console.print(sentence, markup=False, soft_wrap=True)

    say(_headlines(plan, memory))
    console.print(_stages(plan))
    say(_findings(plan))
    if plan.options:
        console.print(_options(plan))
    if plan.predictions:
        console.print(_speeds(plan))
        say(_speed_notes(plan))


def enough(plan: Plan) -> list[str]:
    """How many PCs like these suffice."""
    planned = next((option for option in plan.options if option.planned), None)
    if planned is None:
        return []
    if planned.fewest is None:
        return ["no number of such PCs holds it: a single layer is too large for one"]
    return [f"the fewest such PCs that hold it are {planned.fewest}"]


def _headlines(plan: Plan, memory: str | None) -> list[str]:
    sizes, footprint, promise = plan.sizes, plan.demand.footprint, plan.demand.promise
    weights = sum(sum(stage.need.weights.values()) for stage in plan.stages)
    sparse = sum(layer.sparse for layer in sizes.layers)
    lines = [
        f"{sizes.family}: {len(sizes.layers)} layers of width {sizes.hidden}, "
        + (f"{sparse} of them with experts, " if sparse else "")
        + f"{_count(sizes.weights)} weights",
        f"experts {footprint.experts}, projections {footprint.projections}, head {footprint.head} on "
        f"{footprint.backend}: {gb(weights)} = {gib(weights)} of weights in memory",
        f"{promise.slots} slots of {promise.context} positions, keys and values in {footprint.cache}, "
        f"{promise.rows} rows a frame",
    ]
    if promise.kept:
        most = max(stage.need.prefix for stage in plan.stages)
        lines.append(
            f"{promise.kept} kept prefixes, each {in_words(most)} on the node that needs most for it, beside "
            "blocks that it shares with slots"
        )
    if len({stage.machine.shown for stage in plan.stages}) == 1:
        lines.append(_machine(plan.stages[0], memory))
    return lines


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"


def _machine(stage: PlannedStage, memory: str | None) -> str:
    machine = stage.machine
    sold = f"sold with {memory}, " if memory is not None and is_as_sold(memory) else ""
    gpu = "" if machine.gpu is None else f", and the GPU may take {gib(machine.gpu)} of it"
    return f"a PC: {sold}shows {gib(machine.shown)}, a node may use {gib(machine.usable)}{gpu}"


def _stages(plan: Plan) -> Table:
    parts = [part for part in Part if any(stage.need.weights.get(part) for stage in plan.stages)]
    on_gpu = plan.demand.footprint.backend.on_gpu
    timed = plan.stages[0].seconds is not None
    table = Table(box=None, pad_edge=False, title="GiB, by node", title_justify="left")
    titles = ["node", "layers", *map(_short, parts), "caches", "buffers", "reserve", "total", "of"]
    titles += (
        (["GPU", "of"] if on_gpu else [])
        + ["lacks", "GB a token"]
        + (["ms a frame", "t/s without"] if timed else [])
    )
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < 2 else "right", no_wrap=True)
    rows = [(stage, _row(stage, parts, on_gpu, timed)) for stage in plan.stages]
    for _, same in groupby(rows, key=lambda row: row[1]):
        together = [stage for stage, _ in same]
        first, last = together[0], together[-1]
        name = first.machine.name if first is last else f"{first.machine.name} ... {last.machine.name}"
        each = "" if first is last else " each"
        layers = f"{len(first.layers)}{each}: {first.layers.start}-{last.layers.stop - 1}"
        table.add_row(name, layers, *_row(first, parts, on_gpu, timed))
    return table


def _short(part: Part) -> str:
    return {Part.ROUTED: "routed", Part.SHARED: "shared", Part.DENSE: "dense", Part.SMALL: "small"}.get(
        part, str(part)
    )


def _row(stage: PlannedStage, parts: Sequence[Part], on_gpu: bool, timed: bool) -> list[str]:
    """The cells behind name and layers."""
    need, machine = stage.need, stage.machine
    counts = [need.weights.get(part, 0) for part in parts]
    counts += [need.caches, need.buffers, need.reserve, need.total, machine.usable]
    if on_gpu:
        counts += [need.gpu, machine.gpu or 0]
    cells = [_number(count) for count in (*counts, stage.lack)]
    cells.append(f"{stage.read / 1e9:.2f}")
    if timed:
        cells.append(f"{(stage.seconds or 0) * 1e3:.1f}")
        cells.append("-" if stage.without is None else f"{stage.without:.2f}")
    return cells


def _number(count: int) -> str:
    if not count:
        return ""
    return f"{count / GIB:.1f}" if count >= 10 * GIB else f"{count / GIB:.2f}"


def _findings(plan: Plan) -> list[str]:
    lines = [f"split: {spell_split(plan.split)}"]
    if mapped := plan.stages[0].need.mapped:
        lines.append(
            f"the embedding ({gib(mapped)}) stays a mapped file on the first node and is not counted"
        )
    parts = ", ".join(f"{part} {gb(count)}" for part, count in plan.read.items() if count >= 5e6)
    lines.append(f"one token of a lone stream reads {gb(sum(plan.read.values()))}: {parts}")
    lines += [f"{name} has nothing to do: it would wait as a standby" for name in plan.standby]
    lines += [f"better left out: {each.why}" for each in plan.left_out]
    if plan.needed:
        lines.append(plan.needed)
    return [*lines, *(["it fits", *_lifting(plan)] if plan.fits else [])]


def _lifting(plan: Plan) -> list[str]:
    """How to lift the GPU's limit, where the plan counts on it."""
    first = plan.stages[0].machine
    shipped = GpuMemory.SHIPPED.limit(first.shown)
    if first.gpu is None or max(stage.need.gpu for stage in plan.stages) <= shipped:
        return []
    pages = first.gpu // 4096
    return [
        f"the GPU's limit has to be lifted from {gib(shipped)} to {gib(first.gpu)} on every PC. Linux: "
        f"ttm.pages_limit={pages} ttm.page_pool_size={pages} on the kernel's command line, and "
        "vm.swappiness=1. Windows: 'Shared GPU Memory Override' in Intel Graphics Software, from Core Ultra "
        "series 2 on"
    ]


def _options(plan: Plan) -> Table:
    """What so many PCs hold, whoever multiplies."""
    table = Table(box=None, pad_edge=False)
    slots, nodes = plan.demand.promise.slots, len(plan.stages) + len(plan.standby)
    titles = ("multiplied by", "GPU's limit", f"slots that {nodes} such PCs hold", f"PCs for {slots} slots")
    for title in titles:
        table.add_column(title, justify="left" if title in titles[:2] else "right")
    for option in plan.options:
        kind = ", at its least" if option.lean else ""
        table.add_row(
            f"{option.backend}{kind}{' (this plan)' if option.planned else ''}",
            option.gpu or "",
            _slots(option, slots),
            "no number" if option.fewest is None else str(option.fewest),
        )
    return table


def _slots(option: Option, wanted: int) -> str:
    if not option.slots:
        return "none: the weights are too large"
    return f"all {wanted}" if option.slots == wanted else str(option.slots)


def _speeds(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("streams", "rows a frame", "frames", "tokens/s", "each", "limited by"):
        table.add_column(title, justify="left" if title == "limited by" else "right")
    for each in plan.predictions:
        table.add_row(
            str(each.streams),
            str(each.rows),
            str(each.frames),
            f"{each.tokens_s:.2f}",
            f"{each.tokens_s / each.streams:.2f}",
            each.limit,
        )
    return table


def _speed_notes(plan: Plan) -> list[str]:
    chosen = next(each for each in plan.predictions if each.streams == plan.streams)
    node, seconds = plan.stages[chosen.slowest].machine.name, chosen.stages[chosen.slowest]
    lines = [f"at {chosen.streams} streams the slowest node is {node}, {seconds * 1e3:.1f} ms a frame"]
    if chosen.slowest_hop is not None:
        hop = chosen.hops[chosen.slowest_hop]
        lines.append(f"the slowest hop is {hop.sender} to {hop.receiver}, {hop.seconds * 1e3:.2f} ms a frame")
    return lines
