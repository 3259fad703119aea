"""Measure one hop and one turn of the ring on loopback, beside bare ZeroMQ sockets that do the same.

    python scripts/bench_ring.py [--turns N] [--rounds N] [--nodes N] [--out FILE] [--check]

Hop: one row of 24,576 bytes between two processes, from the moment when a stage has returned it to the moment
when the next stage is called with it; through our codec, data threads and sockets. Turn: one token of one
stream round a ring of processes whose stages do nothing, the head's scheduler and the hand-over of the token
to the head's event loop included. Bare: the same bytes on the same way by blocking send and receive and no
more. Both run in turns in the same processes. JSON goes to stdout or FILE, a table to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing as mp
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import zmq

from cascadia_p2p.node.conductor import HeadConductor
from cascadia_p2p.node.data_thread import DataThread
from cascadia_p2p.node.seat import Seat, empty_rows
from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.scheduler import Scheduler, StreamRequest, Update
from cascadia_p2p.transport.data import DataReceiver, DataSender, DataTransport
from cascadia_p2p.transport.network import Network
from cascadia_p2p.types import Endpoint, Epoch, Instance, Promise, StreamId
from cascadia_p2p.wire.frames import (
    Frame,
    FrameKind,
    FrameLimits,
    Table,
    alternative_table,
    decode_header,
    encode_header,
    record_table,
    segment_table,
)

HIDDEN = 6144
LIMITS = FrameLimits(hidden=HIDDEN, rows=64, segments=64, operations=64, records=64)
HEAD = Instance("00000000000000aa")
SWITCH_INTERVAL_S = 0.0003
WAIT_S = 60.0
BARS_MS = {"hop_p50": 0.15, "hop_p99": 0.5, "turn_p50": 2.5}


class Nothing:
    """A stage that does nothing, and notes when it was called and when it returned."""

    def __init__(self) -> None:
        self.number = 0
        self.called: list[int] = []
        self.returned: list[int] = []

    def apply(
        self, segments: Table, operations: Table, inputs: np.ndarray, on_layer: Callable[[], None]
    ) -> np.ndarray:
        """Rows of no value."""
        self.called.append(time.perf_counter_ns())
        rows = np.empty((len(inputs), HIDDEN), np.float32)
        on_layer()
        self.returned.append(time.perf_counter_ns())
        return rows

    def tokens(self, segments: Table, hidden: np.ndarray) -> tuple[Table, Table]:
        """Token 1 for each segment."""
        records = record_table(len(segments))
        records["stream"] = segments["stream"]
        records["position"] = segments["start"] + segments["rows"]
        records["token"] = 1
        return records, alternative_table()

    def reset(self) -> None:
        """Nothing is held."""


@dataclass
class Notes:
    """Events that a data thread reports."""

    switched_to: threading.Event = field(default_factory=threading.Event)
    probed: threading.Event = field(default_factory=threading.Event)

    def switched(self, epoch: Epoch) -> None:
        """Formed."""
        self.switched_to.set()

    def switch_failed(self, epoch: Epoch, sentence: str) -> None:
        """Not formed."""
        raise SystemExit(sentence)

    def probe_returned(self, epoch: Epoch, number: int) -> None:
        """Round."""
        self.probed.set()

    def hop_broken(self, epoch: Epoch, sentence: str) -> None:
        """Lost a frame."""
        raise SystemExit(sentence)

    def died(self, sentence: str) -> None:
        """Ended."""
        print(sentence, file=sys.stderr)


# --- the processes behind the head -----------------------------------------------------------------------


def node(pipe: Connection, index: int) -> None:
    """Take part in bare and in real rings of any size, one after the other, as the pipe says."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    while (task := pipe.recv()) is not None:
        with Network() as network:
            if task == "bare":
                bare_node(pipe, network)
            else:
                real_node(pipe, network, index)


def bare_node(pipe: Connection, network: Network) -> None:
    """Pass messages on until an empty one comes; the last node answers with the header alone."""
    pull, port = bare_pull(network)
    pipe.send(port)
    endpoint, last = pipe.recv()
    push = bare_push(network, endpoint)
    pipe.send("ready")
    rows, called = empty_rows(LIMITS)[:1], []
    while header := pull.recv():
        pull.recv_into(rows.data)
        called.append(time.perf_counter_ns())
        if last:
            push.send(header)
        else:
            push.send(header, zmq.SNDMORE)
            push.send(rows)
    push.send(b"")
    pipe.send(called)
    time.sleep(0.1)


def real_node(pipe: Connection, network: Network, index: int) -> None:
    """Run a data thread with a stage that does nothing."""
    transport, notes, stage = DataTransport(network), Notes(), Nothing()
    receiver = transport.bind("127.0.0.1", 0, max_part=LIMITS.payload_bytes)
    thread = DataThread(receiver, transport, notes)
    pipe.send(receiver.endpoint.port)
    endpoint, stages = pipe.recv()
    thread.start()
    thread.form(Seat(Epoch(1, HEAD), index, stages, stage, LIMITS, endpoint))
    notes.switched_to.wait(WAIT_S)
    pipe.send("ready")
    pipe.recv()
    thread.stop()
    thread.join(WAIT_S)
    pipe.send(stage.called)


# --- the head -------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Times of one run, in nanoseconds."""

    turns: list[int]
    hops: list[int]


class Fleet:
    """The processes behind the head."""

    def __init__(self, nodes: int) -> None:
        spawn = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for index in range(1, nodes):
            here, there = spawn.Pipe()
            process = spawn.Process(target=node, args=(there, index), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def begin(self, task: str, nodes: int) -> list[int]:
        """Start a task on the first nodes; their ports."""
        used = self.pipes[: nodes - 1]
        for pipe in used:
            pipe.send(task)
        return [pipe.recv() for pipe in used]

    def connect(self, ports: Sequence[int], own: int, facts: Callable[[int], object]) -> Endpoint:
        """Tell each node its successor, the last one the head; the first node's address."""
        ring = [*ports, own]
        for index, pipe in enumerate(self.pipes[: len(ports)]):
            pipe.send((Endpoint("127.0.0.1", ring[index + 1]), facts(index)))
        for pipe in self.pipes[: len(ports)]:
            pipe.recv()
        return Endpoint("127.0.0.1", ring[0])

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)


def bare_pull(network: Network) -> tuple[zmq.Socket[bytes], int]:
    """A bound PULL without anything around it."""
    pull = network.socket(zmq.PULL, linger_ms=0, max_part=1 << 22)
    return pull, pull.bind_to_random_port("tcp://127.0.0.1")


def bare_push(network: Network, endpoint: Endpoint) -> zmq.Socket[bytes]:
    """A connected PUSH without anything around it."""
    push = network.socket(zmq.PUSH, linger_ms=1000, max_part=1 << 16)
    push.connect(endpoint.tcp)
    return push


def run_bare(fleet: Fleet, nodes: int, turns: int) -> Run:
    """Send a row round and wait for the last node's answer, again and again."""
    ports = fleet.begin("bare", nodes)
    with Network() as network:
        pull, own = bare_pull(network)
        push = bare_push(network, fleet.connect(ports, own, lambda index: index == len(ports) - 1))
        segments = segment_table(1)
        segments["rows"] = 1
        header = encode_header(Frame(FrameKind.ACTIVATIONS, Epoch(1, HEAD), 1, HIDDEN, segments))
        rows, turned, sent = empty_rows(LIMITS)[:1], [], []
        for _ in range(turns):
            sent.append(time.perf_counter_ns())
            push.send(header, zmq.SNDMORE)
            push.send(rows)
            pull.recv()
            turned.append(time.perf_counter_ns() - sent[-1])
        push.send(b"")
        pull.recv()
        called = fleet.pipes[0].recv()
        for pipe in fleet.pipes[1 : nodes - 1]:
            pipe.recv()
    return Run(turned, [there - here for here, there in zip(sent, called, strict=True)])


def run_real(fleet: Fleet, nodes: int, turns: int) -> Run:
    """Let one stream decode `turns` tokens."""
    ports = fleet.begin("real", nodes)
    with Network() as network:
        transport, notes, stage = DataTransport(network), Notes(), Nothing()
        receiver = transport.bind("127.0.0.1", 0, max_part=LIMITS.payload_bytes)
        thread = DataThread(receiver, transport, notes)
        first = fleet.connect(ports, receiver.endpoint.port, lambda index: nodes)
        times = asyncio.run(real_head(thread, stage, notes, first, nodes, turns))
        thread.stop()
        thread.join(WAIT_S)
        for pipe in fleet.pipes[: nodes - 1]:
            pipe.send("stop")
        called, *_ = [pipe.recv() for pipe in fleet.pipes[: nodes - 1]]
    # The frame that releases the slot may still be on its way.
    hops = [there - here for here, there in zip(stage.returned, called, strict=False)]
    return Run([after - before for before, after in itertools.pairwise(times)], hops)


async def real_head(
    thread: DataThread, stage: Nothing, notes: Notes, first: Endpoint, nodes: int, turns: int
) -> list[int]:
    """Form, probe, open, and note when each token is handed to the event loop."""
    loop, done, times = asyncio.get_running_loop(), asyncio.Event(), []
    received = []

    def take(updates: Sequence[Update]) -> None:
        received.extend(updates)
        if updates[-1].terminal:
            done.set()

    def deliver(updates: Sequence[Update]) -> None:
        times.append(time.perf_counter_ns())
        thread.after(lambda: loop.call_soon_threadsafe(take, updates))

    conductor = HeadConductor(Scheduler(Policy()), deliver)
    epoch, promise = Epoch(1, HEAD), Promise(slots=4, context=turns + 8, rows=64)
    thread.start()
    thread.form(Seat(epoch, 0, nodes, stage, LIMITS, first, conductor))
    while not notes.probed.is_set():
        thread.probe(epoch, 1)
        await asyncio.to_thread(notes.probed.wait, 0.1)
    thread.call(lambda: conductor.open(nodes, promise))
    thread.open(epoch)
    request = StreamRequest(StreamId(1), (1,), turns + 1)
    thread.call(lambda: conductor.submit(request, lambda _stream, error: sys.exit(str(error))))
    await asyncio.wait_for(done.wait(), WAIT_S + turns * 0.05)
    return times


# --- what it is made of ------------------------------------------------------------------------------------


def pieces(repeats: int = 3000) -> dict[str, float]:
    """Microseconds of CPU that our own code takes for each step of one row, without any wait."""
    segments = segment_table(1)
    segments["rows"] = segments["flags"] = 1
    epoch = Epoch(1, HEAD)
    frame = Frame(FrameKind.ACTIVATIONS, epoch, 1, HIDDEN, segments)
    header = encode_header(frame)
    stage, rows = Nothing(), empty_rows(LIMITS)[:1]
    found = {
        "encode": each(lambda: encode_header(frame), repeats),
        "decode": each(lambda: decode_header(bytearray(header), LIMITS), repeats),
        "stage_call": each(lambda: stage.apply(segments, segments[:0], rows, lambda: None), repeats),
        "tail_tokens": each(lambda: stage.tokens(segments, rows), repeats),
    }
    found |= scheduler_pieces(stage, repeats) | socket_pieces(header, rows, repeats)
    return {name: round(value, 2) for name, value in found.items()}


def scheduler_pieces(stage: Nothing, repeats: int) -> dict[str, float]:
    """The scheduler's two calls for one decoding stream."""
    conductor = HeadConductor(Scheduler(Policy()), lambda _updates: None)
    conductor.open(11, Promise(slots=4, context=repeats + 8, rows=64))
    conductor.submit(StreamRequest(StreamId(1), (1,), repeats + 1), lambda *_: None)
    spent: dict[str, list[int]] = {"schedule": [], "on_tokens": []}
    for _ in range(repeats):
        started = time.perf_counter_ns()
        plan = conductor.schedule()
        spent["schedule"].append(time.perf_counter_ns() - started)
        if plan is None:
            raise SystemExit("the scheduler made no frame")
        answer = stage.tokens(plan.segments, plan.tokens)
        spent["on_tokens"].append(clocked(lambda: conductor.on_tokens(plan.number, *answer)))  # noqa: B023
    return medians(spent)


def socket_pieces(header: bytes, rows: np.ndarray, repeats: int) -> dict[str, float]:
    """Our socket classes and bare sockets: handing a message over, taking one that has arrived."""
    with Network() as network:
        receiver = DataReceiver(network, "127.0.0.1", 0, max_part=LIMITS.payload_bytes)
        sender = DataSender(network, receiver.endpoint)
        pull, port = bare_pull(network)
        push = bare_push(network, Endpoint("127.0.0.1", port))
        while not sender.send(header, rows):
            sender.wait(100)
        receiver.recv_header(True)
        spent: dict[str, list[int]] = {"send": [], "receive": [], "bare_send": [], "bare_receive": []}
        out = empty_rows(LIMITS)[:1]
        for _ in range(repeats):
            spent["send"].append(clocked(lambda: sender.send(header, rows)))
            receiver._pull.poll(1000)
            spent["receive"].append(clocked(lambda: (receiver.recv_header(True), receiver.recv_payload(out))))
            spent["bare_send"].append(clocked(lambda: (push.send(header, zmq.SNDMORE), push.send(rows))))
            pull.poll(1000)
            spent["bare_receive"].append(clocked(lambda: (pull.recv(), pull.recv_into(out.data))))
    return medians(spent)


def medians(spent: dict[str, list[int]]) -> dict[str, float]:
    """Microseconds of the median."""
    return {name: statistics.median(times) / 1000 for name, times in spent.items()}


def clocked(function: Callable[[], object]) -> int:
    """Nanoseconds of one call."""
    started = time.perf_counter_ns()
    function()
    return time.perf_counter_ns() - started


def each(function: Callable[[], object], repeats: int) -> float:
    """Microseconds a call, the least of three rounds."""
    best = min(clocked(lambda: [function() for _ in range(repeats)]) for _ in range(3))
    return best / repeats / 1000


# --- the report ---------------------------------------------------------------------------------------------


def summary(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Percentiles in milliseconds, without the first tenth."""
    times = sorted(nanoseconds[len(nanoseconds) // 10 :])
    points = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {
        name: times[min(len(times) - 1, int(len(times) * share))] / 1e6 for name, share in points.items()
    }
    return {name: round(value, 4) for name, value in found.items()} | {"count": len(times)}


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """All runs and what follows from them."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    fleet = Fleet(arguments.nodes)
    hops: dict[str, list[int]] = {"bare": [], "real": []}
    turns: dict[str, list[int]] = {"bare": [], "real": []}
    ratios: dict[str, list[float]] = {"hop": [], "turn": []}
    try:
        for _ in range(arguments.rounds):
            pair = [run(fleet, 2, arguments.turns) for run in (run_bare, run_real)]
            ring = [run(fleet, arguments.nodes, arguments.turns) for run in (run_bare, run_real)]
            for name, two, many in zip(("bare", "real"), pair, ring, strict=True):
                hops[name] += two.hops
                turns[name] += many.turns
            ratios["hop"].append(summary(pair[1].hops)["p50"] / summary(pair[0].hops)["p50"])
            ratios["turn"].append(summary(ring[1].turns)["p50"] / summary(ring[0].turns)["p50"])
    finally:
        fleet.close()
    result = {
        "hop_ms": {name: summary(times) for name, times in hops.items()},
        "turn_ms": {name: summary(times) for name, times in turns.items()},
        "ratio": {name: round(statistics.median(values), 2) for name, values in ratios.items()},
        "pieces_us": pieces(),
    }
    result["turn_of_pieces_ms"] = round(made_of(result["pieces_us"], arguments.nodes), 3)
    reached = {
        "hop_p50": result["hop_ms"]["real"]["p50"],
        "hop_p99": result["hop_ms"]["real"]["p99"],
        "turn_p50": result["turn_ms"]["real"]["p50"],
    }
    bars = {
        name: {"bar": bar, "is": reached[name], "ok": reached[name] <= bar} for name, bar in BARS_MS.items()
    }
    machine = {"system": platform.system(), "python": platform.python_version(), "cores": mp.cpu_count()}
    versions = {"pyzmq": zmq.__version__, "libzmq": zmq.zmq_version()}
    return {"nodes": arguments.nodes, "bars_ms": bars, **result, "machine": machine | versions}


def made_of(us: dict[str, float], nodes: int) -> float:
    """What the pieces say a turn takes longer than a bare one, in milliseconds."""
    hop = us["receive"] - us["bare_receive"] + us["decode"] + us["stage_call"] + us["send"] - us["bare_send"]
    head = us["schedule"] + us["encode"] + us["on_tokens"] + us["decode"]
    return ((nodes - 1) * hop + head + us["tail_tokens"] + us["encode"]) / 1000


def table(result: dict) -> str:
    """The result for people."""
    lines = [f"{'milliseconds':<28}{'p50':>9}{'p90':>9}{'p99':>9}"]
    for what, title in (("hop_ms", "hop of 24,576 bytes"), ("turn_ms", f"turn of {result['nodes']} nodes")):
        for kind in ("bare", "real"):
            points = result[what][kind]
            label = f"{title}, {'bare' if kind == 'bare' else 'ours'}"
            lines.append(f"{label:<28}{points['p50']:>9.3f}{points['p90']:>9.3f}{points['p99']:>9.3f}")
    lines.append(f"ours / bare, median of p50: hop {result['ratio']['hop']}, turn {result['ratio']['turn']}")
    spent = ", ".join(f"{name} {value:g}" for name, value in result["pieces_us"].items())
    lines.append(f"microseconds a row, caches warm: {spent}")
    longer = result["turn_ms"]["real"]["p50"] - result["turn_ms"]["bare"]["p50"]
    pieces_ms = result["turn_of_pieces_ms"]
    lines.append(
        f"a turn takes {longer:.2f} ms longer than bare; these pieces, warm, {pieces_ms:.2f}; the rest is "
        "caches gone cold between two frames, and waking other threads"
    )
    for name, bar in result["bars_ms"].items():
        lines.append(f"{'ok  ' if bar['ok'] else 'MISS'} {name} {bar['is']:.3f} ms (bar {bar['bar']} ms)")
    return "\n".join(lines)


def main() -> int:
    """Run, print, and with `--check` fail when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=1000, help="tokens a run (default 1000)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind, in turns (default 2)")
    parser.add_argument("--nodes", type=int, default=11, help="processes in the ring (default 11)")
    parser.add_argument("--out", type=Path, help="write the JSON there instead of to stdout")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    arguments = parser.parse_args()
    if arguments.nodes < 2 or arguments.turns < 20 or arguments.rounds < 1:
        parser.error("at least 2 nodes, 20 turns and 1 round")
    result = measure(arguments)
    print(table(result), file=sys.stderr)
    text = json.dumps(result, indent=2)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    return int(arguments.check and not all(bar["ok"] for bar in result["bars_ms"].values()))


if __name__ == "__main__":
    sys.exit(main())
