"""Streams of random lengths that come, are cancelled and vanish at random, on a ring of processes, checked.

    python scripts/soak_streams.py --json docs/measurements/soak_streams.json

Every token is compared with the same prompt's answer alone; every request must end in exactly one last
message; afterwards no node may hold a slot, and no process may have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import orjson
from crowds.crowd import Crowd, learn, prompts
from crowds.nodes import Nodes, small_ring

from cascadia_p2p.logs import configure_logs

LEAK_KB: Final = 16
"""Growth a request that counts as a leak: a stream's record alone is a few kilobytes on the head, and blocks
of keys and values are larger than this."""

NOISE_MB: Final = 8.0
"""What the allocators of a process may still take up after the warm-up."""


async def soak(nodes: Nodes, args: argparse.Namespace) -> dict[str, Any]:
    """Warm up, then let the crowd in."""
    known = await learn(nodes.endpoint, prompts(args.prompts, 24, 250, args.seed), args.tokens)
    warm = Crowd(nodes.endpoint, known, args.seed + 1)
    await warm.visit(args.requests // 4, args.at_once)
    before, started = nodes.resident_mb(), time.monotonic()
    crowd = Crowd(nodes.endpoint, known, args.seed + 2)
    await crowd.visit(args.requests, args.at_once)
    seconds = time.monotonic() - started
    taken = [1]
    for _ in range(50):
        # Slots are let go of by the next frame that passes.
        taken = await nodes.slots_taken()
        if not any(taken):
            break
        await asyncio.sleep(0.1)
    after = nodes.resident_mb()
    bound = NOISE_MB + args.requests * LEAK_KB / 1024
    head = (await nodes.status())[0]["requests"]
    faults = warm.outcome.faults + crowd.outcome.faults
    if any(taken):
        faults.append(f"slots are still taken: {taken}")
    if head["pending"] or head["running"] or head["queued"]:
        faults.append(f"the head still has requests: {head}")
    grown = [round(now - then, 2) for now, then in zip(after, before, strict=True)]
    if max(grown) > bound:
        faults.append(f"a process has grown by {max(grown)} MB; {bound:.1f} MB are allowed")
    return {
        "nodes": len(nodes.ring.nodes),
        "requests": crowd.outcome.requests,
        "at_once": crowd.most,
        "ended": dict(crowd.outcome.ended),
        "tokens": crowd.outcome.tokens,
        "seconds": round(seconds, 1),
        "slots_taken_after": taken,
        "resident_mb": [round(each, 1) for each in after],
        "grown_mb": grown,
        "grown_allowed_mb": round(bound, 1),
        "head": head,
        "faults": faults[:20],
    }


def main() -> int:
    """Run it; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=11)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=200)
    parser.add_argument("--slots", type=int, default=64, help="the others wait in the queue")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    configure_logs("console", "error")
    flags = ("--slots", str(args.slots), "--context", "256", "--queue", "1000")
    with small_ring(args.nodes, flags) as nodes:
        report = asyncio.run(soak(nodes, args)) | {"cpus": os.cpu_count(), "seed": args.seed}
    out = orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    sys.stdout.buffer.write(out)
    if args.json is not None:
        args.json.write_bytes(out)
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
