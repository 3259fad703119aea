"""Times transformers and our engine on one random Inkling of 1.3 GB in BF16, in the same run.

python scripts/bench_reference.py --json docs/measurements/bench_reference.json

Needs the `reference` extra, here or in the interpreter of `--reference-python`. The model has 12 layers of
width 1024 with 32 routed and 2 shared experts, top 6. transformers runs it with torch on the CPU in BF16 and
FP32, with the attention and the way through experts that it chooses by itself (named in the JSON; another by
`--experts`); ours is the usual export, 4-bit experts and 8-bit projections and head, in `fine` and `fast`, on
one node. Each engine has a process of its own, and all of them take the same ids, so that rows choose the
same experts. Decoding starts at 64 positions; a call is a step of all streams, with the choice of their
tokens.

Engines alternate; the bus is read before and after each group of calls by all threads. It takes about three
minutes, and 6 GB of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import tempfile
from pathlib import Path

import orjson
from timed.children import Child, run_rounds, show
from timed.serving import HELD, Order

from cascadia_p2p.compiled import compiling
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.shards.export import export

RECIPE = Recipe(
    "middle",
    layers=12,
    hidden=1024,
    heads=16,
    kv_heads=4,
    head_dim=64,
    sliding_heads=16,
    sliding_kv_heads=8,
    sliding_head_dim=64,
    window=256,
    extent=512,
    d_rel=16,
    dense_layers=1,
    dense_width=4096,
    experts=32,
    chosen=6,
    shared=2,
    expert_width=512,
    vocab=16384,
    vocab_valid=16384,
    eos=(),
)
PROMPT = 512


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--reference-python", default=sys.executable, metavar="PATH", help="default: this interpreter"
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep checkpoint and export here")
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=16, help="a group of decoding (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="through all groups (default: %(default)s)")
    parser.add_argument("--experts", metavar="NAME", help="transformers' experts_implementation")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    threads = compiling.set_threads(args.threads)
    compiling.warm_up()
    with contextlib.ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint, model = make(work)
        children = [stack.enter_context(child) for child in start(args, checkpoint, model)]
        orders = [
            Order("decode", 1, HELD, args.calls),
            Order("decode", 8, HELD, args.calls),
            Order("prefill", 1, PROMPT, 1),
        ]
        found = run_rounds(children, orders, args.rounds)
        engines = {child.name: child.about for child in children}
    reports = show(found, [child.name for child in children if child.name.startswith("transformers")])
    if args.json is not None:
        report = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": threads,
            "engines": engines,
            "groups": reports,
        }
        args.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return 0


def make(work: Path) -> tuple[Path, Path]:
    """The checkpoint in BF16 and its export, unless they are there."""
    checkpoint, model = work / "checkpoint", work / "model"
    if not (checkpoint / "model.safetensors").exists():
        print("making the checkpoint", file=sys.stderr)
        make_checkpoint(checkpoint, RECIPE, encoding="BF16", tokenizer=False)
    export(checkpoint, model, shards=1)
    return checkpoint, model


def start(args: argparse.Namespace, checkpoint: Path, model: Path) -> list[Child]:
    """Two children with transformers, two with ours."""
    threads = ["--threads", str(args.threads)]
    experts = ["--experts", args.experts] if args.experts else []
    theirs = [
        Child(
            f"transformers {dtype}",
            args.reference_python,
            "torch_model",
            [str(checkpoint), "--dtype", dtype, *threads, *experts],
        )
        for dtype in ("bf16", "f32")
    ]
    ours = [
        Child(f"ours {each}", sys.executable, "stage", [str(model), "--precision", each, *threads])
        for each in ("fine", "fast")
    ]
    return theirs + ours


if __name__ == "__main__":
    sys.exit(main())
