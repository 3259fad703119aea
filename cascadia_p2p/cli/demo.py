"""`demo`: a whole ring on this machine, one question or a chat, and everything gone afterwards."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from cascadia_p2p.catalog import find_known, pull
from cascadia_p2p.cli.chat import History, Talk, converse
from cascadia_p2p.cli.terminal import forgive_encodings
from cascadia_p2p.client import ChatOptions, Client
from cascadia_p2p.errors import CascadiaError, UnreachableError, UsageError
from cascadia_p2p.local import LocalRing, NodeEvent
from cascadia_p2p.logs import configure_logs
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.sample.recipe import find_recipe
from cascadia_p2p.shards.encodings import EXACT
from cascadia_p2p.shards.export import export
from cascadia_p2p.wire.client import GenerateReply

MODEL = "smollm2-135m"
MODEL_LAYERS = 30
SAMPLE = "tiny66"
PROMPT = "Explain to a child why the sky is blue."
MAX_TOKENS = 160
SAMPLE_TOKENS = 48
START_S = 300.0
TOLD = {"load_progress", "shard_loaded", "ring_forming", "ring_closed", "clients_served"}
"""Events of the nodes that the demo passes on."""

HIDDEN = {"own_stall"}
"""A warning that only says how busy a machine is that runs all nodes at once."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    parser.add_argument("--nodes", type=int, default=11, metavar="N", help="nodes to start (default: 11)")
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help=f"what to ask (default: {PROMPT!r})")
    parser.add_argument("--chat", action="store_true", help="talk with the model instead of asking once")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"new tokens of an answer (default: {MAX_TOKENS})"
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help="a small Inkling model of random numbers, which speaks no language, in place of "
        f"{MODEL}, which is downloaded once (100 MB)",
    )
    parser.add_argument("--verbose", action="store_true", help="show every line that the nodes log")


def run(args: argparse.Namespace) -> int:
    """Get a model, start the nodes, ask, and end them."""
    configure_logs("console", "info")
    layers = find_recipe(SAMPLE).layers if args.sample else MODEL_LAYERS
    if not 1 <= args.nodes <= layers:
        raise UsageError(f"--nodes {args.nodes}: the demo's model has {layers} layers, so give 1 to {layers}")
    tokens = args.max_tokens
    if tokens is None:
        tokens = SAMPLE_TOKENS if args.sample else MAX_TOKENS
    if not args.prompt.strip():
        raise UsageError("--prompt is empty: give it some text")
    if tokens < 1:
        raise UsageError(f"--max-tokens {tokens}: give 1 or more")
    forgive_encodings()
    # A polite kill must clean up too: what the model takes is half a gigabyte.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        _show_ring(args, tokens)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _show_ring(args: argparse.Namespace, tokens: int) -> None:
    """The demo itself; whatever ends it leaves no process and no file."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="cascadia-demo-") as scratch:
        model = _get_model(Path(scratch), args.nodes, console, sample=args.sample)
        with LocalRing(model, Path(scratch) / "state", flags=("--threads", "1")) as ring:
            endpoint = _start(ring, args.nodes, console, verbose=args.verbose)
            with Client(endpoint) as client:
                if args.chat:
                    converse(Talk(client, History(None), {"max_tokens": tokens}))
                else:
                    _summary(
                        _ask(client, args.prompt, tokens, console, sample=args.sample), args.nodes, console
                    )
            console.print("ending the nodes ...")


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _get_model(scratch: Path, nodes: int, console: Console, *, sample: bool) -> Path:
    """Make or fetch a checkpoint and export it into one shard a node."""
    if sample:
        console.print("making a small Inkling model of random numbers: its answers are no language")
        checkpoint = make_checkpoint(scratch / "checkpoint", find_recipe(SAMPLE))
    else:
        checkpoint = _pull(console)
    console.print(f"splitting it into {nodes} shards ...")
    export(checkpoint, scratch / "model", shards=nodes, encodings=EXACT)
    return scratch / "model"


def _pull(console: Console) -> Path:
    known = find_known(MODEL)
    console.print(f"model: {known.words}")
    try:
        return pull(known, lambda sentence: console.print(sentence, markup=False))
    except UnreachableError as error:
        raise UnreachableError(
            f"{error}. 'demo --sample' needs no download: the same with random numbers"
        ) from None


def _start(ring: LocalRing, nodes: int, console: Console, *, verbose: bool) -> str:
    """Start the nodes and return the head's client address when the ring is open."""
    console.print(f"starting {nodes} nodes of fleet '{ring.fleet}' on 127.0.0.1 ...")
    started = time.monotonic()
    for _ in range(nodes):
        ring.start_node()
    endpoint: str | None = None
    opened: set[int] = set()
    met = [0] * nodes
    compiling = False
    for event in ring.events(START_S, until_one_ends=True):
        seconds = time.monotonic() - started
        if event.event == "peer_joined":
            met[event.node] += 1
            if min(met) == nodes - 1 and sum(met) == nodes * (nodes - 1):
                console.print(f"{seconds:6.1f} s  every node has met all others")
        alarming = event.fields.get("level") in ("warning", "error") and event.event not in HIDDEN
        if verbose or alarming or event.event in TOLD:
            _show(event, seconds, console)
        elif event.event == "kernels_compiling" and not compiling:
            # One node does it while the others wait, and each says so.
            compiling = True
            console.print(f"{seconds:6.1f} s  {event.message}", markup=False)
        if event.event == "clients_served":
            endpoint = str(event.fields["endpoint"])
        elif event.event == "ring_open":
            opened.add(event.node)
        elif event.event == "ring_closed":
            opened.clear()
        if endpoint is not None and len(opened) == nodes:
            console.print(f"{seconds:6.1f} s  the ring of {nodes} nodes is open")
            return endpoint
    if (words := ring.ended()) is not None:
        raise CascadiaError(f"the ring can not open: {words}. Run the demo again")
    raise CascadiaError(
        f"the ring did not open within {START_S:.0f} s: this machine may be too busy or too small for "
        f"{nodes} nodes, try --nodes 3; the nodes said last:\n{ring.tail(1)}"
    )


def _show(event: NodeEvent, seconds: float, console: Console) -> None:
    console.print(f"{seconds:6.1f} s  node {event.node:2d}  {event.message or event.event}", markup=False)


def _ask(client: Client, prompt: str, max_tokens: int, console: Console, *, sample: bool) -> GenerateReply:
    """Ask once and print the answer as it comes."""
    console.print(f"asking: {prompt}\n", markup=False)
    options: ChatOptions = {"max_tokens": max_tokens, "ignore_eos": sample}
    question = [{"role": "user", "content": prompt}]
    stream = client.stream(prompt, **options) if sample else client.stream(messages=question, **options)
    with stream:
        for piece in stream:
            sys.stdout.write(piece.text or "")
            sys.stdout.flush()
        print(flush=True)
        return stream.reply


def _summary(reply: GenerateReply, nodes: int, console: Console) -> None:
    rate = reply.timings.decode_tok_s
    parts = [
        f"{reply.usage.prompt_tokens} prompt tokens, {reply.usage.completion_tokens} new ones",
        f"{nodes} nodes",
        f"first token after {reply.timings.ttft_s * 1000:.0f} ms",
    ]
    if rate is not None:
        parts += [f"{rate:.1f} tokens/s", f"{1000 / rate / nodes:.2f} ms a stage and hop"]
    console.print("\n" + "; ".join(parts))
