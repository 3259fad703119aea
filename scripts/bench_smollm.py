"""Times SmolLM2 on one node beside llama.cpp, both with the same GGUF file, in the same run.

python scripts/bench_smollm.py --json docs/measurements/bench_smollm.json

Needs the `llamacpp` extra, here or in the interpreter of `--reference-python`. Weights are kept as in the
file (Q4_1, the head Q8_0), in `fast` and `fine`, beside llama.cpp on the CPU, which always rounds activations
to 8 bits: `fast` is what compares. Each engine has a process of its own; they alternate, take the same ids
and choose the highest logit of every step. Decoding starts at 64 positions; a prompt has 512 ids. "outside
the stage" is Python between calls. llama.cpp's arranging of weights for the processor is off unless
`--extra-buffers` is given: where it picks AMX, some builds end in a segmentation fault.
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

from cascadia_p2p.catalog import KNOWN, pull
from cascadia_p2p.compiled import compiling
from cascadia_p2p.shards.export import export

PROMPT = 512


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--reference-python", default=sys.executable, metavar="PATH", help="default: this interpreter"
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="default: that of 'pull smollm2-135m'")
    parser.add_argument("--threads", default="1,2", help="one run each (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=60, help="a group of decoding (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="through all groups (default: %(default)s)")
    parser.add_argument("--extra-buffers", action="store_true", help="let llama.cpp arrange weights anew")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    gguf = args.gguf or pull(KNOWN["smollm2-135m"])
    cores = compiling.set_threads(os.cpu_count() or 1)
    compiling.warm_up()
    if not args.extra_buffers:
        print("llama.cpp: use_extra_bufts=False, so without AMX and without weights arranged anew")
    runs = []
    with tempfile.TemporaryDirectory() as work:
        export(gguf, Path(work), shards=1)
        for threads in args.threads.split(","):
            runs.append(run(args, gguf, Path(work), threads))
    if args.json is not None:
        report = {
            "processor": platform.processor() or platform.machine(),
            "cores": cores,
            "file": gguf.name,
            "runs": runs,
        }
        args.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return 0


def run(args: argparse.Namespace, gguf: Path, model: Path, threads: str) -> dict[str, object]:
    """All engines with so many threads."""
    orders = [Order("decode", 1, HELD, args.calls), Order("prefill", 1, PROMPT, 2)]
    extra = ["--extra-buffers"] if args.extra_buffers else []
    with contextlib.ExitStack() as stack:
        llama = Child(
            "llama.cpp", args.reference_python, "llama_model", [str(gguf), "--threads", threads, *extra]
        )
        children = [stack.enter_context(llama)]
        for each in ("fast", "fine"):
            flags = [str(model), "--precision", each, "--threads", threads]
            children.append(stack.enter_context(Child(f"ours {each}", sys.executable, "stage", flags)))
        found = run_rounds(children, orders, args.rounds)
        engines = {child.name: child.about for child in children}
    print(f"{threads} threads")
    return {"threads": int(threads), "engines": engines, "groups": show(found, ["llama.cpp"])}


if __name__ == "__main__":
    sys.exit(main())
