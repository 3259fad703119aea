"""`join`: make this PC a node of the fleet until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import structlog

from cascadia_p2p.config import Config, add_flags, flags_of, load_config
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.logs import configure_logs, name_node

FLAGS = (
    "model",
    "shard",
    "fleet",
    "bind",
    "port",
    "client_port",
    "metrics_port",
    "metrics_bind",
    "key",
    "insecure",
    "peers",
    "mdns",
    "device",
    "precision",
    "cache",
    "slots",
    "context",
    "prefixes",
    "rows",
    "queue",
    "threads",
    "state_dir",
    "log_format",
    "log_level",
)

INTERRUPTED = 130

SWITCH_S = 0.0003
"""How long the event loop may keep the data thread from a frame that has arrived, in seconds."""

_log = structlog.get_logger()

INTERRUPT = "it was asked to stop (Ctrl-C)"


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    add_flags(parser, *FLAGS)
    parser.add_argument("--while-stdin-open", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the node; 0 when its starter ended it, 130 after Ctrl-C."""
    config = load_config(flags_of(args), file=args.config)
    configure_logs(config.log_format, config.log_level)
    sys.setswitchinterval(SWITCH_S)
    try:
        if config.device != "CPU":
            _require_device(config.device)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_live(config, args.while_stdin_open))
    except CascadiaError as error:
        if config.log_format != "json":
            raise
        # Programs read these lines: the last one is an object as all others are.
        _log.error("node_failed", message=str(error), exit_code=error.exit_code)
        return error.exit_code


def _require_device(device: str) -> None:
    """Refuse a device that is not there before anything is announced, with the doctor's advice."""
    import psutil

    from cascadia_p2p.doctor.devices import InstalledOpenVino, require_device
    from cascadia_p2p.doctor.host import Host

    require_device(Host(), InstalledOpenVino(), device, int(psutil.virtual_memory().total))


async def _live(config: Config, while_stdin_open: bool) -> int:
    # The engine takes a second to import: flags are judged before. Imports leave no garbage to look for.
    gc.disable()
    try:
        from cascadia_p2p.node.node import Ending, Node
        from cascadia_p2p.node.places import Places
    finally:
        gc.enable()

    node: Node | None = None
    stopped = ""

    def stop(reason: str) -> bool:
        nonlocal stopped
        stopped = stopped or reason
        return node is not None

    def drain() -> None:
        if stop(INTERRUPT) and node is not None:
            node.drain(INTERRUPT)

    def leave(reason: str) -> None:
        if stop(reason) and node is not None:
            node.leave(reason)

    with _on_signals(drain):
        if while_stdin_open:
            _on_end_of_input(lambda: leave("its starter has ended"))
        ending, loaded = Ending.MOVED, None
        while ending is Ending.MOVED and not stopped:
            with Places.open(config) as places:
                name_node(places.identity.node_id)
                node = Node(config, places, loaded)
                ending = await node.run()
                loaded = node.loaded
    return INTERRUPTED if stopped == INTERRUPT else 0


def _on_end_of_input(leave: Callable[[], None]) -> None:
    """Call `leave` in the running loop when standard input ends: whoever started this process is gone."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(descriptor, 4096):
                pass
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(leave)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


@contextlib.contextmanager
def _on_signals(leave: Callable[[], None]) -> Iterator[None]:
    """Call `leave` in the running loop at Ctrl-C or a polite kill; a second one ends at once."""
    loop = asyncio.get_running_loop()
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def handle(number: int, _: object) -> None:
        signal.signal(number, before[signal.Signals(number)])
        loop.call_soon_threadsafe(leave)

    for kind in kinds:
        signal.signal(kind, handle)
    try:
        yield
    finally:
        for kind in kinds:
            signal.signal(kind, before[kind])


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes an event loop that can serve ZeroMQ's sockets; None where the usual one can."""
    # ZeroMQ's descriptors need a loop that can watch them; Windows' default one can not.
    return asyncio.SelectorEventLoop if sys.platform == "win32" else None
