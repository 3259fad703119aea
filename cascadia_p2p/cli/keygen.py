"""`keygen`: make the fleet's key, issue keys to clients and withdraw them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cascadia_p2p.cli.join import loop_factory
from cascadia_p2p.config import Config, add_flags, flags_of, load_config
from cascadia_p2p.discovery.lookup import find_nodes
from cascadia_p2p.errors import CascadiaError, UnreachableError, UsageError
from cascadia_p2p.keys.clients import ClientList, load_clients, save_clients
from cascadia_p2p.keys.files import KeyFile, is_there, read_key, write_key
from cascadia_p2p.keys.places import (
    FLEET_KEY,
    client_list_path,
    find_fleet_key,
    fleet_key_path,
    make_fleet_key,
)
from cascadia_p2p.logs import configure_logs
from cascadia_p2p.node.query import share_clients
from cascadia_p2p.transport.curve import KeyPair, Keys
from cascadia_p2p.types import Endpoint

LOOK_S: Final = 1.5
SHARE_S: Final = 2.0
SUFFIX: Final = ".client.key"


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    parser.epilog = (
        "Without --client, --revoke or --list: makes the fleet's key, or says where it is. Whoever has that "
        "file can "
        "join the fleet; whoever has a client's key can ask it over the network. A change of the list is "
        "told to "
        "every node that is found by mDNS or named with --peer; nodes on this PC, and nodes that start "
        "later, read it "
        "by themselves."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--client", metavar="NAME", help="issue a key to a client")
    what.add_argument(
        "--revoke", metavar="NAME", help="withdraw a client's key; ends its connections at once"
    )
    what.add_argument("--list", action="store_true", help="show the clients")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"with --client: where to write its key (default: NAME{SUFFIX} in the current directory)",
    )
    add_flags(parser, "fleet", "key", "peers", "mdns")


def run(args: argparse.Namespace) -> int:
    """Make or issue; the file's path goes to stdout, everything else to stderr."""
    config = load_config(flags_of(args), file=args.config)
    configure_logs("console", "warning")
    if args.out is not None and args.client is None:
        raise UsageError("--out is where --client writes: give --client NAME too")
    if args.client is None and args.revoke is None and not args.list:
        return _fleet(config)
    key = _fleet_key(config)
    path = client_list_path(config.fleet)
    clients = load_clients(path, key.pair)
    if args.list and not clients.entries:
        _say(f"no client of fleet '{config.fleet}' has been issued a key here: --client NAME issues one")
    if args.list:
        for entry in sorted(clients.entries.values(), key=lambda entry: (entry.name, entry.key)):
            print(f"{entry.name}\t{'withdrawn' if entry.revoked else 'admitted'}")
        return 0
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        nodes = runner.run(_nodes(config))
        # Others may have issued keys elsewhere.
        clients, _ = runner.run(_share(key, clients, nodes))
        if args.client is not None:
            clients = _issue(key, clients, path, args.client, args.out)
        else:
            clients = clients.revoke(args.revoke)
            # Nodes are told even where this PC can not keep it.
            with contextlib.suppress(CascadiaError):
                save_clients(path, clients, key.pair)
        clients, told = runner.run(_share(key, clients, nodes))
    _keep(path, clients, key, told)
    if args.revoke is not None:
        _say(f"the key of '{args.revoke}' is withdrawn")
    _tell(told, nodes)
    return 0


def _keep(path: Path, clients: ClientList, key: KeyFile, told: Sequence[Endpoint]) -> None:
    """Write the list.

    Raises:
        CascadiaError: it can not be written; the sentence says who knows it all the same.
    """
    try:
        save_clients(path, clients, key.pair)
    except CascadiaError as error:
        if not told:
            raise
        raise CascadiaError(
            f"{error}; the fleet knows the change all the same, told {', '.join(map(str, told))}, and this "
            "PC learns it from there when the file can be written and a key is next issued or withdrawn"
        ) from None


def _fleet(config: Config) -> int:
    """Make the fleet's key where there is none."""
    path = config.key or fleet_key_path(config.fleet)
    found = find_fleet_key(config.fleet, key=path if is_there(path) else None)
    if found is not None:
        _say(f"fleet '{config.fleet}' has a key already (fingerprint {found.print}); it stays as it is")
        print(found.path)
        return 0
    made = make_fleet_key(config.fleet, path)
    _say(
        f"made the key of fleet '{config.fleet}' (fingerprint {made.print}). 'cascadia-p2p export' lays it "
        "beside the "
        f"shards; for shards that are exported already, copy it to each as {FLEET_KEY}. Make no second one "
        "for the "
        "same fleet on another PC"
    )
    print(made.path)
    return 0


def _fleet_key(config: Config) -> KeyFile:
    found = find_fleet_key(config.fleet, key=config.key)
    if found is None:
        raise UsageError(
            f"fleet '{config.fleet}' has no key on this PC: run this where it was made, name it with --key "
            "FILE (it "
            f"lies beside every shard as {FLEET_KEY}), or make one with 'cascadia-p2p keygen'"
        )
    return found


def _issue(key: KeyFile, clients: ClientList, path: Path, name: str, out: Path | None) -> ClientList:
    """Write a client's key, then the list with it: a key that nobody admits harms less than a lost one."""
    pair = KeyPair.new()
    issued = clients.issue(name, pair.public)
    target = out or Path(f"{name}{SUFFIX}")
    _require_absent(target, clients)
    write_key(KeyFile(target, key.fleet, pair, key.pair.public, name))
    try:
        save_clients(path, issued, key.pair)
    except CascadiaError:
        target.unlink(missing_ok=True)
        raise
    _say(
        f"issued a key to '{name}': give it that file, which it names with --key FILE or keeps as "
        f"{fleet_key_path(key.fleet).with_suffix(SUFFIX)}"
    )
    print(target)
    return issued


def _require_absent(target: Path, clients: ClientList) -> None:
    """See that a client's key would be written over nothing.

    Raises:
        CascadiaError: a file is there; the sentence says whose withdrawn key it is, if it is one.
    """
    if not is_there(target):
        return
    entry = None
    # What is no key, or not to be read, is in the way all the same.
    with contextlib.suppress(CascadiaError):
        entry = clients.entries.get(read_key(target).pair.public)
    what = f", the withdrawn key of '{entry.name}'," if entry is not None and entry.revoked else ""
    raise CascadiaError(
        f"{target}{what} is there already and is not written over: move it away, or name another file with "
        "--out FILE"
    )


async def _nodes(config: Config) -> list[Endpoint]:
    """Control addresses of nodes, as named and as found."""
    found = list(config.peers)
    if config.mdns:
        with contextlib.suppress(UnreachableError):
            for node in await find_nodes(config.fleet, timeout=LOOK_S, bind=config.bind):
                found += node.endpoints[:1]
    return list(dict.fromkeys(found))


async def _share(
    key: KeyFile, clients: ClientList, nodes: Sequence[Endpoint]
) -> tuple[ClientList, list[Endpoint]]:
    """Bring this list and those of the nodes together; the list of all, and who has it now."""
    keys = Keys(key.pair, key.pair.public)
    told = []
    answers = await asyncio.gather(
        *(share_clients(node, keys, clients, SHARE_S) for node in nodes), return_exceptions=True
    )
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, CascadiaError):
            _say(f"warning: {answer}")
        elif isinstance(answer, BaseException):
            raise answer
        else:
            clients = clients.join(answer)
            told.append(node)
    return clients, told


def _tell(told: Sequence[Endpoint], nodes: Sequence[Endpoint]) -> None:
    if told:
        _say(f"told {', '.join(map(str, told))}; every node of the fleet knows within a few seconds")
    elif not nodes:
        _say(
            "no running node was found: those on this PC read it by themselves, and others learn it from "
            "them. Name "
            "one with --peer HOST:PORT to tell it now"
        )


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)
