"""`status`: show the ring, its nodes and what is missing."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys

import orjson
from pydantic import JsonValue
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from cascadia_p2p.client import Client, node_keys
from cascadia_p2p.config import Config, add_flags, flags_of, load_config
from cascadia_p2p.discovery.interfaces import nearest
from cascadia_p2p.discovery.lookup import find_nodes_sync
from cascadia_p2p.errors import (
    NoHeadError,
    NotAdmittedError,
    RequestError,
    UnreachableError,
    UsageError,
    WireError,
)
from cascadia_p2p.node.query import ask_node
from cascadia_p2p.transport.curve import Keys
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.work import read_work

ANSWER_S = 3.0
WORK_S = 1.0
"""How long each node has to say where its time goes, in seconds."""

COLUMNS = ("stage", "shard", "state", "node", "control", "frames in", "out", "heard")
"""Titles of the table of nodes, of which only states may go on in a second line: people copy the others."""

SLOW = 1.5
"""Times what the other stages take, from which on a stage is named."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--timeout", type=_seconds, default=ANSWER_S, metavar="SECONDS", help=f"for an answer ({ANSWER_S:g})"
    )
    parser.add_argument(
        "--peer", metavar="HOST:PORT", help="control address of any node; asked in place of looking for one"
    )
    add_flags(parser, "endpoint", "fleet", "key")


def run(args: argparse.Namespace) -> int:
    """Ask the head, or any node while there is no head, and print what it knows."""
    config = load_config(flags_of(args), file=args.config)
    if args.peer is not None and config.endpoint is not None:
        raise UsageError("give --endpoint or --peer, not both")
    keys = node_keys(config.fleet, config.key)
    peer = None if args.peer is None else Endpoint.parse(args.peer)
    body = _with_work(_ask(config, keys, peer, args.timeout), keys)
    if args.json:
        sys.stdout.buffer.write(orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    else:
        _show(body)
    return 0


def _with_work(body: dict[str, JsonValue], keys: Keys | None) -> dict[str, JsonValue]:
    """The body with what each node alone knows, where it can be asked: its engine, where its time goes."""
    nodes = _rows(body, "nodes")
    others = [node for node in nodes if node.get("node") != body.get("node")]
    door = body.get("door")
    if keys is None and isinstance(door, dict) and door.get("closed"):
        # Their consoles would warn of a stranger.
        answers: dict[int, dict[str, JsonValue]] = {id(node): {"closed": True} for node in others}
    else:
        answers = dict(zip(map(id, others), asyncio.run(_ask_all(others, keys)), strict=True))
    for node in nodes:
        answer = answers.get(id(node), body)
        counted = answer.get("data_thread")
        node["work"] = counted.get("work") if isinstance(counted, dict) else None
        node["engine"] = answer.get("engine")
        if answer.get("closed"):
            node["closed"] = True
    return body


async def _ask_all(nodes: list[dict[str, JsonValue]], keys: Keys | None) -> list[dict[str, JsonValue]]:
    return await asyncio.gather(*(_ask_one(node, keys) for node in nodes))


async def _ask_one(node: dict[str, JsonValue], keys: Keys | None) -> dict[str, JsonValue]:
    try:
        return await ask_node(Endpoint.parse(str(node.get("control"))), WORK_S, keys)
    except NotAdmittedError:
        return {"closed": True}
    except (UnreachableError, UsageError):
        return {}


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return value


def _ask(config: Config, keys: Keys | None, peer: Endpoint | None, timeout_s: float) -> dict[str, JsonValue]:
    if peer is not None:
        return asyncio.run(ask_node(peer, timeout_s, keys))
    if config.endpoint is not None:
        return _ask_endpoint(config.endpoint, config, keys, timeout_s)
    found = find_nodes_sync(config.fleet)
    refusal: NotAdmittedError | None = None
    for each in found:
        for client in each.clients:
            try:
                return _ask_head(nearest(client), config, timeout_s)
            except NotAdmittedError as error:
                refusal = error
            except (UnreachableError, WireError):
                continue
    for each in found:
        for control in each.endpoints:
            try:
                return asyncio.run(ask_node(control, timeout_s, keys))
            except NotAdmittedError as error:
                refusal = error
            except UnreachableError:
                continue
    if refusal is not None:
        raise refusal
    raise UnreachableError(
        f"no node of fleet '{config.fleet}' answers: start nodes with 'cascadia-p2p join', check --fleet, "
        "or name one with --endpoint tcp://HOST:PORT (client or control port)"
    )


def _ask_endpoint(
    endpoint: Endpoint, config: Config, keys: Keys | None, timeout_s: float
) -> dict[str, JsonValue]:
    """A head's client port, or any node's control port."""
    try:
        return _ask_head(endpoint, config, timeout_s)
    except NoHeadError as error:
        raise UnreachableError(
            f"{error.what}; a node listens at the address that its console names"
        ) from None
    except (RequestError, NotAdmittedError) as error:
        # So a control port answers what clients ask: in words, or by its lock.
        if isinstance(error, NotAdmittedError) and keys is None:
            raise
        return asyncio.run(ask_node(endpoint, timeout_s, keys))


def _ask_head(endpoint: Endpoint, config: Config, timeout_s: float) -> dict[str, JsonValue]:
    with Client(endpoint, fleet=config.fleet, timeout_s=timeout_s, key=config.key) as client:
        return client.status()


def _show(body: dict[str, JsonValue]) -> None:
    console, table = Console(highlight=False, markup=False, emoji=False, soft_wrap=True), _nodes(body)
    epoch = body.get("epoch")
    counter = f", epoch {epoch['counter']}" if isinstance(epoch, dict) else ""
    console.print(
        f"fleet '{body.get('fleet')}', model '{body.get('model')}': ring {body.get('state')}{counter}"
    )
    if body.get("waiting_for"):
        console.print(f"waiting for {body['waiting_for']}")
    if body.get("paused"):
        console.print(f"no new requests start: {body['paused']}")
    served = [str(node["client"]) for node in _rows(body, "nodes") if node.get("client")]
    if served:
        console.print(f"clients are served at {', '.join(served)}")
    _fit(console, table)
    console.print(table, soft_wrap=False)
    for node in _in_order(body):
        if node.get("claim") in ("loaded", "serving"):
            console.print(_work(node))
    for sentence in (*_ring_words(body), *_refused_words(body), *journal_words(body)):
        console.print(sentence)
    requests = body.get("requests")
    if isinstance(requests, dict):
        console.print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in requests.items()))


def _fit(console: Console, table: Table) -> None:
    """Widen the console to what the table needs, in which a terminal may break states."""
    needed = Measurement.get(console, console.options.update(max_width=sys.maxsize), table)
    console.width = max(console.width, needed.minimum if console.file.isatty() else needed.maximum)


def _refused_words(body: dict[str, JsonValue]) -> list[str]:
    """What the node that answered did not take, by reason; nothing where that is nothing."""
    thread, door = body.get("data_thread"), body.get("door")
    tables: list[tuple[str, JsonValue]] = [("control messages and log", body.get("dropped"))]
    if isinstance(thread, dict):
        tables += [("frames", thread.get("dropped")), ("segments", thread.get("failed"))]
    if isinstance(door, dict):
        tables.append(("door", {name: door.get(name) for name in ("turned_away", "rejected_lists")}))
    ports = body.get("ports")
    if isinstance(ports, dict):
        tables += [
            ("dialled nodes" if port == "dialled" else f"{port} port", counts)
            for port, counts in ports.items()
        ]
    tables.append(("mDNS", body.get("mdns")))
    found = []
    for title, counts in tables:
        counted = counts.items() if isinstance(counts, dict) else ()
        words = [
            f"{name.replace('_', ' ')} {value}" for name, value in counted if isinstance(value, int) and value
        ]
        if words:
            found.append(f"not taken, {title}: {', '.join(words)}")
    return found


def journal_words(body: dict[str, JsonValue]) -> list[str]:
    """Who would go on with the head's answers; of a standby, how many it has."""
    journal = body.get("journal")
    if not isinstance(journal, dict):
        return []
    names = {
        str(node.get("node")): f"{node.get('host')}/{str(node.get('node'))[:8]}"
        for node in _rows(body, "nodes")
    }
    words = []
    for told in _rows(journal, "told"):
        name = names.get(str(told.get("node")), str(told.get("node")))
        all_of_them = "all" if told.get("followed") else "not yet all"
        words.append(
            f"standby {name} has been told {all_of_them} of the {told.get('answers')} answers of this head"
        )
    if journal.get("from") is not None:
        words.append(
            f"this standby has been told {journal.get('answers')} answers, {journal.get('complete')} complete"
        )
    return words


def _nodes(body: dict[str, JsonValue]) -> Table:
    stages = {str(row["node"]): row for row in _rows(body, "stages")}
    rows = []
    for node in _in_order(body):
        stage = stages.get(str(node.get("node")), {})
        heard = node.get("heard_s")
        row = (
            _text(stage.get("stage")),
            _text(node.get("shard")),
            _state(node),
            f"{node.get('host')}/{str(node.get('node'))[:8]}",
            _text(node.get("control")),
            _text(stage.get("frames_in")),
            _text(stage.get("frames_out")),
            f"{heard:.1f} s ago" if isinstance(heard, float) and heard else "",
        )
        rows.append(row)
    table = Table(box=None, pad_edge=False)
    for title, *cells in zip(COLUMNS, *rows, strict=True):
        whole = None if title == "state" else max(map(cell_len, (title, *cells)))
        table.add_column(title, overflow="fold", no_wrap=whole is not None, min_width=whole)
    for row in rows:
        table.add_row(*row)
    return table


def _in_order(body: dict[str, JsonValue]) -> list[dict[str, JsonValue]]:
    """The nodes, those in the ring first and in its order."""
    stages = {str(row.get("node")): row for row in _rows(body, "stages")}

    def place(node: dict[str, JsonValue]) -> tuple[int, str]:
        return _order(stages.get(str(node.get("node")))), str(node.get("node"))

    return sorted(_rows(body, "nodes"), key=place)


def _work(node: dict[str, JsonValue]) -> str:
    """One node's engine, and where its time goes since its shard was loaded."""
    line = f"{node.get('host')}/{str(node.get('node'))[:8]} ({_engine(node)}): "
    work = read_work(node.get("work"))
    if work is None and node.get("closed"):
        return f"{line}only the fleet's own key (--key FILE) opens it, and shows where its time goes"
    if work is None:
        return f"{line}it does not say where its time goes"
    if not work.frames:
        return f"{line}no frame yet"
    whole = max(work.busy_s + work.wait_s + work.send_s, 1e-9)
    parts = ", ".join(f"{name} {share:.0%}" for name, share in work.shares().items() if share >= 0.005)
    return (
        f"{line}{1e3 * work.busy_s / work.frames:.2f} ms a frame of {work.rows / work.frames:.1f} rows, "
        f"{parts}; busy {work.busy_s / whole:.0%}, waiting {work.wait_s / whole:.0%}, "
        f"sending {work.send_s / whole:.0%}"
    )


def _ring_words(body: dict[str, JsonValue]) -> list[str]:
    """How long a frame takes round the ring, and which stage holds the others up."""
    placed = {str(row.get("node")) for row in _rows(body, "stages")}
    works = [
        (node, work)
        for node in _in_order(body)
        if str(node.get("node")) in placed
        and (work := read_work(node.get("work"))) is not None
        and work.frames
    ]
    if len(works) < 2 or len(works) < len(placed):
        return []
    each = [1e3 * work.busy_s / work.frames for _, work in works]
    words = []
    counted = body.get("data_thread")
    round_ms = counted.get("round_ms") if isinstance(counted, dict) else None
    if isinstance(round_ms, float):
        hop = max(0.0, round_ms - sum(each[1:])) / len(works)
        words.append(
            f"round the ring: {round_ms:.2f} ms from the head to its tokens, {sum(each[1:]):.2f} of them in "
            f"the other stages; {hop:.2f} ms a hop, with what frames wait for one another"
        )
    slowest = max(range(len(each)), key=each.__getitem__)
    usual = statistics.median(each[:slowest] + each[slowest + 1 :])
    if each[slowest] > SLOW * usual:
        node = works[slowest][0]
        words.append(
            f"stage {slowest} ({node.get('host')}/{str(node.get('node'))[:8]}) is the slowest: "
            f"{each[slowest]:.2f} ms a frame where the others take {usual:.2f}: the ring is no faster than it"
        )
    return words


def _engine(node: dict[str, JsonValue]) -> str:
    engine = node.get("engine")
    if not isinstance(engine, dict):
        return _text(node.get("device"))
    return " ".join(_text(engine.get(name)) for name in ("device", "precision", "cache"))


def _state(node: dict[str, JsonValue]) -> str:
    state = str(node.get("claim", ""))
    if node.get("standby"):
        state += ", standby"
    if node.get("suspect"):
        state += ", suspect"
    progress = node.get("progress")
    if state.startswith("loading") and isinstance(progress, float):
        state += f" {progress:.0%}"
        if node.get("stalled"):
            state += ", stalled"
    return state


def _rows(body: dict[str, JsonValue], name: str) -> list[dict[str, JsonValue]]:
    rows = body.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _order(stage: dict[str, JsonValue] | None) -> int:
    number = stage.get("stage") if stage else None
    return number if isinstance(number, int) else 1 << 20


def _text(value: JsonValue) -> str:
    return "" if value is None else str(value)
