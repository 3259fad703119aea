"""Loads stages of two sample sizes and compares the memory that they take with what was predicted.

python scripts/memory_check.py --json check.json

Each stage is loaded in a process of its own, which fills all promised slots, looks at every page of mapped
weights (as a node has that served long enough to use every expert), and then reads its memory map:
anonymous pages, pages of the mapped weight files, pages of everything else. Files that a backend packed a
copy of are not counted: the system can drop their pages. The check fails when a stage takes 15 % more or less
than predicted, or when weights that should only be mapped have a second copy.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import orjson

from cascadia_p2p.engine.load import REWIND, LoadProgress, load_stage, shard_footprint, stage_need
from cascadia_p2p.engine.stage import Stage
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.shards.export import export
from cascadia_p2p.shards.manifest import EMBED
from cascadia_p2p.shards.reader import ShardReader
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OperationKind, SegmentError, operation_table, segment_table

TOLERANCE = 0.15
PROMISE = Promise(slots=4, context=1024, rows=64)

SMALL = Recipe(
    "small",
    layers=6,
    hidden=1024,
    heads=8,
    head_dim=128,
    sliding_heads=8,
    sliding_head_dim=128,
    window=512,
    extent=512,
    d_rel=16,
    dense_width=4096,
    experts=32,
    expert_width=1024,
    vocab=4096,
    vocab_valid=4000,
)
SIZES = (SMALL, replace(SMALL, name="large", experts=96))


@dataclass(frozen=True)
class MemoryMap:
    """Resident bytes of a process, by kind.

    Args:
        anonymous: of its own: heaps, arrays, what was written to of private mappings.
        weights: pages of files with weights, as they are in the file.
        weights_copied: pages of such mappings that are copies, because they were written to.
        other_files: pages of programs and libraries.
    """

    anonymous: int
    weights: int
    weights_copied: int
    other_files: int

    @classmethod
    def here(cls) -> MemoryMap:
        """Of this process."""
        anonymous = weights = copied = others = 0
        path = ""
        for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
            first, *rest = line.split()
            if not first.endswith(":"):
                path = rest[4] if len(rest) > 4 else ""
            elif first == "Rss:":
                count = 1024 * int(rest[0])
                weights += count if path.endswith(".weights") else 0
                others += count if path.startswith("/") and not path.endswith(".weights") else 0
                anonymous += 0 if path.startswith("/") else count
            elif first == "Anonymous:" and path.startswith("/"):
                count = 1024 * int(rest[0])
                anonymous += count
                if path.endswith(".weights"):
                    weights, copied = weights - count, copied + count
                else:
                    others -= count
        return cls(anonymous, weights, copied, others)


def main() -> int:
    """Run the check; 0 when all stages take what was predicted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--model", type=Path, nargs="*", help="exported shards to load instead of samples")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--precision", default="fine")
    parser.add_argument("--cache", default="f32")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if sys.platform != "linux":
        print("memory_check: reads /proc/self/smaps, which only Linux has", file=sys.stderr)
        return 2
    try:
        if args.child is not None:
            json.dump(measure(args.child, args.device, args.precision, args.cache), sys.stdout)
            return 0
        return check(args)
    except (CascadiaError, OSError) as error:
        print(f"memory_check: {error}", file=sys.stderr)
        return 1


def check(args: argparse.Namespace) -> int:
    """Load each model in a child of its own, print a line for each, and say whether all is well."""
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="memory-check-") as scratch:
        models = args.model or sample_models(Path(scratch))
        flags = ("--device", args.device, "--precision", args.precision, "--cache", args.cache)
        # The first of all compiles kernels, and keeps what the compiler took: it is not compared.
        for number, model in enumerate([models[0], *models]):
            done = subprocess.run(
                [sys.executable, __file__, "--child", str(model), *flags], stdout=subprocess.PIPE, check=False
            )
            if done.returncode:
                return 1
            if not number:
                continue
            results.append({"model": model.parent.name or str(model), **json.loads(done.stdout)})
            print(describe(results[-1]))
    if args.json is not None:
        args.json.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return 0 if all(each["within"] and not each["second_copy"] for each in results) else 1


def sample_models(scratch: Path) -> list[Path]:
    """Both sample sizes, exported as one shard each."""
    models: list[Path] = []
    for recipe in SIZES:
        model = scratch / recipe.name / "model"
        export(
            make_checkpoint(scratch / recipe.name / "checkpoint", recipe, encoding="BF16"), model, shards=1
        )
        models.append(model)
    return models


def measure(model: Path, device: str, precision: str, cache: str) -> dict[str, object]:
    """Load a shard, fill its slots, and compare."""
    reader = ShardReader(model)
    need = stage_need(reader, PROMISE, REWIND, shard_footprint(reader, device, cache))
    before = MemoryMap.here()
    compiled = time.perf_counter()

    def tell(progress: LoadProgress) -> None:
        nonlocal compiled
        if progress.phase == "kernels":
            compiled = time.perf_counter()

    stage = load_stage(model, None, PROMISE, device, precision, os.cpu_count(), tell, cache=cache)
    load_s = time.perf_counter() - compiled
    fill(stage)
    served = MemoryMap.here()
    touch_weights()
    after = MemoryMap.here()
    taken = after.anonymous + (after.weights if need.mapped else 0)
    grown = after.anonymous - before.anonymous
    # What is in memory of the process's own, besides what was there before loading.
    own = need.total - need.reserve - need.mapped
    return {
        "backend": shard_footprint(reader, device, cache).backend.value,
        "stored": reader.nbytes,
        "predicted": {
            "total": need.total,
            "weights": need.weights,
            "mapped": need.mapped,
            "caches": need.caches,
            "buffers": need.buffers,
            "reserve": need.reserve,
        },
        "before": vars(before),
        "served": vars(served),
        "after": vars(after),
        "taken": taken,
        "ratio": taken / need.total,
        "within": abs(taken / need.total - 1) <= TOLERANCE,
        "anonymous_grown": grown,
        "anonymous_predicted": own,
        "second_copy": bool(need.mapped) and grown > own + need.reserve / 2 + 0.25 * need.mapped,
        "load_s": load_s,
        "load_s_a_gb": load_s / (reader.nbytes / 1e9),
    }


def fill(stage: Stage) -> None:
    """Compute rows of every slot up to its last position, so that everything promised is in use."""
    random, model = np.random.default_rng(0), stage.model
    for slot in range(PROMISE.slots):
        operations = operation_table(1)
        operations["kind"], operations["slot"], operations["stream"] = OperationKind.START, slot, slot + 1
        for start in range(0, PROMISE.context, PROMISE.rows):
            segments = segment_table(1)
            segments["stream"], segments["slot"] = slot + 1, slot
            segments["start"], segments["rows"] = start, PROMISE.rows
            segments["flags"] = 1
            inputs = (
                random.integers(0, model.vocab, PROMISE.rows, np.int32)
                if model.first
                else random.standard_normal((PROMISE.rows, model.hidden), np.float32)
            )
            rows = stage.apply(
                segments, operations if start == 0 else operation_table(), inputs, lambda: None
            )
            if model.last:
                stage.tokens(segments, rows)
            if segments["error"][0] != SegmentError.NONE:
                raise CascadiaError(f"a frame failed: {SegmentError(int(segments['error'][0])).name.lower()}")


def touch_weights() -> None:
    """Read a byte of every page of mapped weights but the embedding's, of which tokens read single rows."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        place, *_, path = line.split()
        if path.endswith(".weights") and not path.endswith(f"/{EMBED}"):
            start, _, end = place.partition("-")
            for address in range(int(start, 16), int(end, 16), mmap.PAGESIZE):
                ctypes.c_ubyte.from_address(address).value  # noqa: B018 - reading it is what counts


def describe(result: dict[str, object]) -> str:
    """One stage in a paragraph."""
    predicted, after = result["predicted"], result["after"]
    assert isinstance(predicted, dict)
    assert isinstance(after, dict)

    def mib(count: object) -> str:
        return f"{count / 2**20:.0f} MiB" if isinstance(count, int | float) else str(count)

    off = "" if result["within"] else ", TOO FAR OFF"
    return (
        f"{result['model']} on {result['backend']}: takes {mib(result['taken'])}, predicted "
        f"{mib(predicted['total'])} (ratio {result['ratio']:.2f}{off})\n"
        f"  anonymous {mib(after['anonymous'])} (grew by {mib(result['anonymous_grown'])}, predicted "
        f"{mib(result['anonymous_predicted'])}), weights mapped {mib(after['weights'])} of "
        f"{mib(result['stored'])} stored, copies of mapped pages {mib(after['weights_copied'])}, programs "
        f"{mib(after['other_files'])}\n"
        f"  {'weights have a SECOND COPY' if result['second_copy'] else 'no second copy of mapped weights'}; "
        f"loaded in {result['load_s']:.1f} s, {result['load_s_a_gb']:.1f} s a GB"
    )


if __name__ == "__main__":
    sys.exit(main())
