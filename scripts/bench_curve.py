"""Measure what CurveZMQ costs a hop on loopback: our data sockets with and without a key, in turns.

    python scripts/bench_curve.py [--frames N] [--rounds N] [--out FILE]

A hop is half of a frame's way to another process and back, from before it is given to the socket until its
last byte is in an array there. Sizes: one row of the published model (24,576 bytes), 8 rows, 64 rows.
Both kinds run in turns in the same two processes, so their ratio holds where absolute times do not. p10 is
the least disturbed by what else the machine does; CPU is what both processes take for a hop together.
JSON goes to stdout or FILE, a table to stderr.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import zmq

from cascadia_p2p.transport.curve import KeyPair, Keys
from cascadia_p2p.transport.data import DataReceiver, DataSender
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint

HIDDEN = 6144
ROWS = (1, 8, 64)
HOST = "127.0.0.1"
WAIT_S = 30.0


class End:
    """One process's sockets of one kind."""

    def __init__(self, pair: KeyPair | None) -> None:
        keys = None if pair is None else Keys(pair, pair.public, lambda _domain, key: key == pair.public)
        self.network = Network(keys)
        self.receiver = DataReceiver(self.network, HOST, 0, max_part=max(ROWS) * HIDDEN * 4)
        self.sender: DataSender | None = None

    def connect(self, port: int) -> None:
        """Dial the other process."""
        self.sender = DataSender(self.network, Endpoint(HOST, port))

    def send(self, rows: np.ndarray) -> None:
        """Hand a frame over, waiting for the connection at first."""
        deadline = time.monotonic() + WAIT_S
        while self.sender is None or not self.sender.send(b"header", rows):
            if self.sender is None or time.monotonic() > deadline:
                raise SystemExit("the other process does not take frames")
            self.sender.wait(100)

    def receive(self, out: np.ndarray) -> None:
        """Take the next frame into an array."""
        deadline = time.monotonic() + WAIT_S
        while self.receiver.recv_header(True) is None:
            if time.monotonic() > deadline:
                raise SystemExit("no frame came")
        if not self.receiver.recv_payload(out):
            raise SystemExit("a frame of another size came")

    def close(self) -> None:
        """Close all."""
        if self.sender is not None:
            self.sender.close()
        self.receiver.close()
        self.network.close()


def echo(pipe: Connection, pair: KeyPair) -> None:
    """Send every frame back, of the kind and as often as the pipe says; answer with the CPU time of it."""
    ends = {"plain": End(None), "curve": End(pair)}
    pipe.send({kind: end.receiver.endpoint.port for kind, end in ends.items()})
    for kind, port in pipe.recv().items():
        ends[kind].connect(port)
    while (task := pipe.recv()) is not None:
        kind, rows, frames = task
        frame = np.empty((rows, HIDDEN), np.float32)
        started = time.process_time()
        for _ in range(frames):
            ends[kind].receive(frame)
            ends[kind].send(frame)
        pipe.send(time.process_time() - started)
    for end in ends.values():
        end.close()


def run(end: End, pipe: Connection, kind: str, rows: int, frames: int) -> tuple[list[float], float]:
    """Milliseconds of each hop, and milliseconds of CPU that both processes took for one."""
    pipe.send((kind, rows, frames))
    out, back = np.ones((rows, HIDDEN), np.float32), np.empty((rows, HIDDEN), np.float32)
    hops = []
    begun = time.process_time()
    for _ in range(frames):
        started = time.perf_counter_ns()
        end.send(out)
        end.receive(back)
        hops.append((time.perf_counter_ns() - started) / 2e6)
    cpu = time.process_time() - begun + pipe.recv()
    return hops[frames // 10 :], cpu / frames / 2 * 1e3


def compare(ends: dict[str, End], pipe: Connection, rows: int, frames: int, rounds: int) -> dict[str, object]:
    """Both kinds in turns at one size."""
    hops: dict[str, list[float]] = {kind: [] for kind in ends}
    cpu: dict[str, list[float]] = {kind: [] for kind in ends}
    for _ in range(rounds):
        for kind, end in ends.items():
            times, spent = run(end, pipe, kind, rows, frames)
            hops[kind] += times
            cpu[kind].append(spent)
    found: dict[str, object] = {"bytes": rows * HIDDEN * 4, "frames": frames * rounds}
    for name, value in (
        ("p10_ms", {kind: percentile(times, 0.1) for kind, times in hops.items()}),
        ("p50_ms", {kind: percentile(times, 0.5) for kind, times in hops.items()}),
        ("cpu_ms", {kind: statistics.median(times) for kind, times in cpu.items()}),
    ):
        ratio = round(value["curve"] / value["plain"], 2)
        found[name] = {kind: round(each, 4) for kind, each in value.items()} | {"ratio": ratio}
    return found


def percentile(times: list[float], share: float) -> float:
    """The time that this share of all is below."""
    return sorted(times)[int(len(times) * share)]


def measure(frames: int, rounds: int) -> dict[str, object]:
    """All sizes, both kinds in turns."""
    pair = KeyPair.new()
    spawn = mp.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=echo, args=(there, pair), daemon=True)
    process.start()
    ends = {"plain": End(None), "curve": End(pair)}
    ports = here.recv()
    here.send({kind: end.receiver.endpoint.port for kind, end in ends.items()})
    for kind, end in ends.items():
        end.connect(ports[kind])
        run(end, here, kind, 1, 20)
    sizes = [compare(ends, here, rows, max(20, frames // rows), rounds) for rows in ROWS]
    here.send(None)
    process.join(10)
    for end in ends.values():
        end.close()
    machine = {"system": platform.system(), "python": platform.python_version(), "cores": mp.cpu_count()}
    return {
        "rounds": rounds,
        "sizes": sizes,
        "machine": machine | {"pyzmq": zmq.__version__, "libzmq": zmq.zmq_version()},
        "load": [round(each, 1) for each in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def table(result: dict) -> str:
    """The result for people."""
    lines = [f"{'bytes':>10}{'':>5}{'plain ms':>12}{'CURVE ms':>12}{'longer':>10}{'ratio':>8}"]
    for size in result["sizes"]:
        for name, title in (("p10_ms", "p10"), ("p50_ms", "p50"), ("cpu_ms", "CPU")):
            times = size[name]
            lines.append(
                f"{size['bytes']:>10,}{title:>5}{times['plain']:>12.3f}{times['curve']:>12.3f}"
                f"{times['curve'] - times['plain']:>10.3f}{times['ratio']:>8.2f}"
            )
    return "\n".join(lines)


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=1000, help="frames a run of small ones (default 1000)")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each kind, in turns (default 15)")
    parser.add_argument("--out", type=Path, help="write the JSON there instead of to stdout")
    arguments = parser.parse_args()
    if arguments.frames < 20 or arguments.rounds < 1:
        parser.error("at least 20 frames and 1 round")
    result = measure(arguments.frames, arguments.rounds)
    print(table(result), file=sys.stderr)
    text = json.dumps(result, indent=2)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
