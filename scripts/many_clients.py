"""A thousand REQ clients at once, with a client that sends garbage, one that vanishes and a node that stalls.

    python scripts/many_clients.py --json docs/measurements/many_clients.json

Every client must get exactly one reply, and it must be right. Memory and descriptors of the head are watched.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any, Final

import orjson
import zmq
import zmq.asyncio
from crowds.crowd import ask_at_once, learn, prompts
from crowds.nodes import Nodes, small_ring

from cascadia_p2p.logs import configure_logs
from cascadia_p2p.transport.network import allow_many_descriptors

PATIENCE_S: Final = 600.0

CLIENT_KB: Final = 96
"""Memory of the head a client: 28 KB were measured for an idle connection; the rest is its request."""

VANISHES: Final = """
import sys, zmq
s = zmq.Context().socket(zmq.REQ)
s.connect(sys.argv[1])
s.send(b'{"token_ids": [5], "max_tokens": 200, "ignore_eos": true}')
print("asked", flush=True)
s.recv()
"""


async def garbage(endpoint: str, stop: asyncio.Event) -> int:
    """A client that sends what is no request, and reads nothing; how much it could send."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    sent = 0
    while not stop.is_set():
        parts = ([b""], [b"", b"{"], [b"x" * 600, b"", b"{}"], [b"", os.urandom(2000)])[sent % 4]
        if await socket.poll(50, zmq.POLLOUT):
            await socket.send_multipart(parts)
            sent += 1
        await asyncio.sleep(0.002)
    context.destroy(linger=0)
    return sent


async def vanish(endpoint: str) -> None:
    """A client process that is killed while its request runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", VANISHES, endpoint, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    await asyncio.sleep(0.2)
    process.kill()
    await process.wait()


async def stall(nodes: Nodes) -> None:
    """A node in the middle that is stopped for less than makes it suspect of being gone."""
    await asyncio.sleep(1.0)
    process = nodes.ring.nodes[len(nodes.ring.nodes) // 2].process
    process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(1.0)
    finally:
        process.send_signal(signal.SIGCONT)


async def visit(nodes: Nodes, args: argparse.Namespace) -> dict[str, Any]:
    """All at once."""
    known = await learn(nodes.endpoint, prompts(8, 12, 250, 3), args.tokens)
    before, highest = nodes.resident_mb()[0], 0.0
    descriptors, stop = 0, asyncio.Event()

    async def watch() -> None:
        nonlocal highest, descriptors
        while not stop.is_set():
            highest = max(highest, nodes.resident_mb()[0])
            descriptors = max(descriptors, nodes.descriptors()[0])
            await asyncio.sleep(0.2)

    beside = [asyncio.create_task(each) for each in (watch(), vanish(nodes.endpoint), stall(nodes))]
    noise = asyncio.create_task(garbage(nodes.endpoint, stop))
    answers, times = await ask_at_once(nodes.endpoint, known, args.clients, args.tokens, PATIENCE_S)
    stop.set()
    await asyncio.gather(*beside)
    sent = await noise
    await asyncio.sleep(1.0)
    status = await nodes.status()
    allowed = 16.0 + args.clients * CLIENT_KB / 1024
    faults = []
    if answers != {"right": args.clients}:
        faults.append(f"answers: {dict(answers)}")
    if highest - before > allowed:
        faults.append(f"the head grew by {highest - before:.1f} MB; {allowed:.1f} MB are allowed")
    taken = [body["data_thread"]["slots_taken"] for body in status]
    if any(taken) or status[0]["requests"]["pending"]:
        faults.append(f"something is left: slots {taken}, {status[0]['requests']}")
    return {
        "nodes": len(nodes.ring.nodes),
        "clients": args.clients,
        "answers": dict(answers),
        "answered_s": {
            "median": round(statistics.median(times), 2),
            "last": round(max(times), 2),
        },
        "garbage_messages": sent,
        "head_mb": {"before": round(before, 1), "highest": round(highest, 1), "allowed": round(allowed, 1)},
        "head_descriptors": {"most": descriptors, "after": nodes.descriptors()[0]},
        "requests": status[0]["requests"],
        "faults": faults,
    }


def main() -> int:
    """Run it; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    configure_logs("console", "error")
    allow_many_descriptors()
    flags = ("--slots", str(args.slots), "--context", "256", "--queue", str(args.clients + 16))
    with small_ring(args.nodes, flags) as nodes:
        report = asyncio.run(visit(nodes, args))
    out = orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    print(json.dumps(report, indent=2))
    if args.json is not None:
        args.json.write_bytes(out)
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
