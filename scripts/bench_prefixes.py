"""What keeping and taking over prefixes costs a stage, and what its blocks cost a frame. No weights needed.

    python scripts/bench_prefixes.py [--out FILE]

Times of single operations, in microseconds: medians over many, each in a state where it fits. A frame's
admission is measured with pools of blocks and without any, turn by turn; their difference is what blocks add
to a frame. A table goes to stdout, JSON to FILE.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from cascadia_p2p.engine.footprint import EXACT
from cascadia_p2p.engine.kernels.convolution import new_history
from cascadia_p2p.engine.load import REWIND
from cascadia_p2p.engine.memory import prefix_bytes
from cascadia_p2p.engine.paging import Paging
from cascadia_p2p.engine.slots import Slots, Table
from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.inkling.memory import inkling_sizes
from cascadia_p2p.models.llama.config import LlamaConfig
from cascadia_p2p.models.llama.memory import llama_sizes
from cascadia_p2p.models.sizes import ModelSizes
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OPERATION, SEGMENT, OperationKind

PROMISE: Final = Promise(slots=16, context=2048, rows=64, kept=16)
PREFIX: Final = 1024
TIMES: Final = 300
SMOL: Final = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def stages() -> dict[str, tuple[ModelSizes, range]]:
    """Six layers of Inkling 975B, as on the fleet, and all of SmolLM2-135M."""
    inkling = InklingConfig.from_json({"model_type": "inkling_text", "unpadded_vocab_size": 200058})
    smol = llama_sizes(LlamaConfig.from_json(SMOL))
    return {
        "inkling 975B, 6 layers": (inkling_sizes(inkling), range(6, 12)),
        "smollm2-135m": (smol, range(len(smol.layers))),
    }


def new_paging(sizes: ModelSizes, layers: range) -> Paging:
    """Tables and histories of a stage's layers, without keys and values: those are never copied."""
    paging = Paging(PROMISE, REWIND)
    for layer in (sizes.layers[number] for number in layers):
        paging.pool(layer.cache.window)
        if layer.cache.taps:
            kv = (layer.cache.channels - 2 * sizes.hidden) // 2
            for width in (kv, kv, sizes.hidden, sizes.hidden):
                history = new_history(PROMISE.slots, layer.cache.taps - 1 + REWIND, width)
                paging.add_history(history, layer.cache.taps - 1)
    return paging


def operation(kind: OperationKind, position: int = 0, entry: int = 0, slot: int = 0) -> Table:
    """A table of one."""
    table = np.zeros(1, OPERATION)
    table["kind"], table["stream"], table["slot"] = kind, 1, slot
    table["position"], table["entry"] = position, entry
    return table


def window(start: int, rows: int, slots: int = 1) -> Table:
    """A window of each of the first slots."""
    table = np.zeros(slots, SEGMENT)
    table["stream"], table["slot"] = 1, np.arange(slots)
    table["start"], table["rows"] = start, rows
    return table


def timed(step: Callable[[], object]) -> float:
    """Microseconds of one call."""
    begin = time.perf_counter_ns()
    step()
    return (time.perf_counter_ns() - begin) / 1e3


def advance(slots: Slots, table: Table) -> None:
    """Admit and count windows as held, as a stage does around its layers."""
    assert slots.admit(table, 0).all(), "the windows have to fit"
    slots.begin(table)
    slots.commit(table)


def operations_us(paging: Paging) -> dict[str, float]:
    """Medians of single operations on a prefix of `PREFIX` positions."""
    slots = Slots(PROMISE, REWIND, paging)
    slots.operate(operation(OperationKind.START))
    for at in range(0, PREFIX, PROMISE.rows):
        advance(slots, window(at, PROMISE.rows))
    times: dict[str, list[float]] = {"keep": [], "start": [], "attach": [], "evict": [], "release": []}
    for number in range(TIMES):
        entry, slot = number % PROMISE.kept, 1 + number % (PROMISE.slots - 1)
        steps = {
            "keep": operation(OperationKind.KEEP, PREFIX, entry),
            "start": operation(OperationKind.START, slot=slot),
            "attach": operation(OperationKind.ATTACH, PREFIX, entry, slot),
            "evict": operation(OperationKind.EVICT, entry=entry),
            "release": operation(OperationKind.RELEASE, slot=slot),
        }
        for name, table in steps.items():
            times[name].append(timed(lambda table=table: slots.operate(table)))
    assert slots.misfits == 0, "every operation has to fit"
    return {name: round(statistics.median(each), 1) for name, each in times.items()}


def admission_us(paging: Paging, rows: int, streams: int) -> dict[str, float]:
    """Medians for a frame of windows, with these blocks and with none; and where all of them take a block."""
    paged, plain = Slots(PROMISE, REWIND, paging), Slots(PROMISE, REWIND)
    times: dict[str, list[float]] = {"without": [], "with": [], "with, taking": []}
    for _ in range(8):
        for slots in (paged, plain):
            for slot in range(streams):
                slots.operate(operation(OperationKind.START, slot=slot))
        for at in range(0, PROMISE.context, rows):
            table = window(at, rows, streams)
            taking = at % 64 == 0
            spent = timed(lambda table=table: paged.admit(table, 0))
            times["with, taking" if taking else "with"].append(spent)
            spent = timed(lambda table=table: plain.admit(table, 0))
            if not taking or rows % 64 == 0:
                times["without"].append(spent)
            for slots in (paged, plain):
                slots.begin(table)
                slots.commit(table)
    return {name: round(statistics.median(each), 1) for name, each in times.items() if each}


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, object] = {}
    for name, (sizes, layers) in stages().items():
        size = sum(prefix_bytes(sizes.layers[n].cache, PROMISE, REWIND, EXACT) for n in layers)
        measured = {
            "prefix_bytes_f32": size,
            "operations_us": operations_us(new_paging(sizes, layers)),
            "decode_16_us": admission_us(new_paging(sizes, layers), 1, 16),
            "window_64_us": admission_us(new_paging(sizes, layers), 64, 1),
        }
        found[name] = measured
        print(name)
        for part, values in measured.items():
            print(f"  {part}: {values}")
    if args.out is not None:
        promise = {name: getattr(PROMISE, name) for name in ("slots", "context", "rows", "kept")}
        facts = {"machine": platform.processor() or platform.machine(), "promise": promise, "prefix": PREFIX}
        args.out.write_text(json.dumps(facts | {"stages": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
