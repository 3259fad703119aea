"""`demo`: a whole ring on this machine, one prompt, and everything gone afterwards."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from cascadia_p2p.client import Client
from cascadia_p2p.errors import CascadiaError, UsageError
from cascadia_p2p.local import LocalRing, NodeEvent
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import find_recipe
from cascadia_p2p.shards.encodings import Encodings
from cascadia_p2p.shards.export import export
from cascadia_p2p.wire.client import GenerateReply

PRESET = "tiny66"
PROMPT = "Explain to a child why the sky is blue."
START_S = 180.0
TOLD = {
    "shard_loaded",
    "ring_forming",
    "ring_closed",
    "clients_served",
    "standby",
}
"""Events of the nodes that the demo passes on."""

HIDDEN = {"own_stall"}
"""A warning that only says how busy a machine is that runs all nodes at once."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    parser.add_argument("--nodes", type=int, default=11, metavar="N", help="nodes to start (default: 11)")
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help=f"what to ask (default: {PROMPT!r})")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="new tokens (default: 48)")
    parser.add_argument("--verbose", action="store_true", help="show every line that the nodes log")


def run(args: argparse.Namespace) -> int:
    """Make a model, start the nodes, ask, and end them."""
    layers = find_recipe(PRESET).layers
    if not 1 <= args.nodes <= layers:
        raise UsageError(f"--nodes {args.nodes}: the demo's model has {layers} layers, so give 1 to {layers}")
    if args.max_tokens < 1:
        raise UsageError(f"--max-tokens {args.max_tokens}: give 1 or more")
    console = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="cascadia-demo-") as scratch:
        model = _make_model(Path(scratch), args.nodes, console)
        with LocalRing(model, Path(scratch) / "state", flags=("--threads", "1")) as ring:
            endpoint = _start(ring, args.nodes, console, verbose=args.verbose)
            reply = _ask(endpoint, args.prompt, args.max_tokens, console)
            console.print("ending the nodes ...")
    print(reply.text)
    _summary(reply, args.nodes, console)
    return 0


def _make_model(scratch: Path, nodes: int, console: Console) -> Path:
    console.print(
        f"making a small Inkling model with random weights ({PRESET}); its answers are no language, "
        "but exactly those of the reference",
        soft_wrap=True,
    )
    checkpoint, model = scratch / "checkpoint", scratch / "model"
    make_checkpoint(checkpoint, find_recipe(PRESET))
    export(checkpoint, model, shards=nodes, encodings=Encodings())
    return model


def _start(ring: LocalRing, nodes: int, console: Console, *, verbose: bool) -> str:
    """Start the nodes and return the head's client address when the ring is open."""
    console.print(f"starting {nodes} nodes of fleet '{ring.fleet}' on 127.0.0.1 ...")
    started = time.monotonic()
    for _ in range(nodes):
        ring.start_node()
    endpoint: str | None = None
    opened: set[int] = set()
    met = [0] * nodes
    for event in ring.events(START_S):
        if event.event == "peer_joined":
            met[event.node] += 1
            if min(met) == nodes - 1 and sum(met) == nodes * (nodes - 1):
                console.print(
                    f"{time.monotonic() - started:6.1f} s  every node has met the {nodes - 1} others"
                )
        alarming = event.fields.get("level") in ("warning", "error") and event.event not in HIDDEN
        if verbose or alarming or event.event in TOLD:
            _show(event, time.monotonic() - started, console)
        if event.event == "clients_served":
            endpoint = str(event.fields["endpoint"])
        elif event.event == "ring_open":
            opened.add(event.node)
        elif event.event == "ring_closed":
            opened.clear()
        if endpoint is not None and len(opened) == nodes:
            return endpoint
    raise CascadiaError(f"the ring did not open within {START_S:.0f} s; the nodes said last:\n{ring.tail()}")


def _show(event: NodeEvent, seconds: float, console: Console) -> None:
    console.print(
        f"{seconds:6.1f} s  node {event.node:2d}  {event.message or event.event}",
        markup=False,
        soft_wrap=True,
    )


def _ask(endpoint: str, prompt: str, max_tokens: int, console: Console) -> GenerateReply:
    console.print(f"asking {endpoint}: {prompt}", markup=False)
    with Client(endpoint) as client:
        return client.generate(prompt, max_tokens=max_tokens, ignore_eos=True)


def _summary(reply: GenerateReply, nodes: int, console: Console) -> None:
    sys.stdout.flush()
    rate = reply.timings.decode_tok_s
    parts = [
        f"{reply.usage.prompt_tokens} prompt tokens, {reply.usage.completion_tokens} new ones",
        f"{nodes} nodes",
        f"first after {reply.timings.ttft_s * 1000:.0f} ms",
    ]
    if rate is not None:
        parts += [f"{rate:.1f} tokens/s", f"{1000 / rate / nodes:.2f} ms a stage and hop"]
    console.print("; ".join(parts), soft_wrap=True)
