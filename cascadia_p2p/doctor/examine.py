"""Runs all checks in order and gives their findings as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from enum import StrEnum
from functools import partial
from typing import Final

import psutil
from pydantic import JsonValue

from cascadia_p2p.config import Config
from cascadia_p2p.discovery.interfaces import Address, Interface, choose_address, list_interfaces
from cascadia_p2p.doctor.devices import check_devices
from cascadia_p2p.doctor.finding import Finding, Level
from cascadia_p2p.doctor.host import Host
from cascadia_p2p.doctor.key import check_key
from cascadia_p2p.doctor.memory import check_bandwidth, check_memory
from cascadia_p2p.doctor.model import check_model
from cascadia_p2p.doctor.multicast import check_multicast, probe_multicast
from cascadia_p2p.doctor.network import PortHolder, check_firewall, check_interfaces, check_ports, check_usb
from cascadia_p2p.doctor.peers import Met, check_fleet, check_peer, check_versions
from cascadia_p2p.doctor.power import check_clock, check_power
from cascadia_p2p.doctor.processor import check_processor
from cascadia_p2p.doctor.software import check_software
from cascadia_p2p.errors import NotAdmittedError, PortError, UnreachableError, UsageError, WireError
from cascadia_p2p.node.query import ask_node
from cascadia_p2p.shards.reader import VerifyProgress
from cascadia_p2p.transport.client_connection import AsyncClientConnection
from cascadia_p2p.transport.curve import Keys
from cascadia_p2p.transport.network import require_free
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.client import StatusReply, StatusRequest, decode_reply
from cascadia_p2p.wire.model import encode

_ASK_S: Final = 2.0
"""How long who holds a port has to answer, in seconds."""


class Group(StrEnum):
    """What can be examined by itself."""

    SOFTWARE = "software"
    """Python, packages, OpenVINO and its devices."""
    MACHINE = "machine"
    """Processor, memory, power and clock."""
    NETWORK = "network"
    """Interfaces, ports, multicast, peers and the fleet."""
    MODEL = "model"
    """Files of the model, and room for it."""


async def examine(
    config: Config,
    host: Host,
    *,
    groups: Collection[Group] = tuple(Group),
    contents: bool = True,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> AsyncIterator[Finding]:
    """All findings on this PC, its network, its fleet and its model.

    Args:
        config: as `join` would have it.
        host: this machine.
        groups: what to examine.
        contents: whether to read the model's files in full.
        progress: told while they are read.
    """
    if Group.SOFTWARE in groups:
        for finding in await asyncio.to_thread(_software, config, host):
            yield finding
    if Group.MACHINE in groups:
        yield check_processor(host, config.threads)
        yield check_memory(host)
        yield await asyncio.to_thread(check_bandwidth, config.threads)
        yield await asyncio.to_thread(check_power, host)
        yield await asyncio.to_thread(check_clock, host)
    if Group.NETWORK in groups:
        async for finding in _network(config, host):
            yield finding
    if Group.MODEL in groups:
        work = partial(check_model, config, contents=contents, progress=progress)
        for finding in await asyncio.to_thread(lambda: list(work())):
            yield finding


def _software(config: Config, host: Host) -> list[Finding]:
    shown = int(psutil.virtual_memory().total)
    return [*check_software(host), *check_devices(host, config.device, shown)]


async def _network(config: Config, host: Host) -> AsyncIterator[Finding]:
    interfaces = list_interfaces()
    try:
        address = choose_address(config.bind, interfaces)
    except UsageError as error:
        yield Finding("interface", Level.FAIL, str(error), "change --bind")
        return
    yield check_interfaces(address, interfaces, config.bind)
    for finding in check_usb(host, address.interface):
        yield finding
    key, keys = check_key(config, address)
    yield key
    for finding in await _ports(config, host, address, keys):
        yield finding
    met: list[Met] = []
    if config.mdns:
        heard = await asyncio.to_thread(probe_multicast, address)
        yield check_multicast(address, not config.peers, heard)
        findings, nodes = await check_fleet(address, config.fleet, keys=keys)
        met += nodes
        for finding in findings:
            yield finding
    else:
        yield Finding("multicast", Level.OK, "mDNS is off: nodes are found by --peer only")
    async for finding in _peers(config, interfaces, met, keys):
        yield finding
    for finding in check_versions(met):
        yield finding


async def _peers(
    config: Config, interfaces: list[Interface], met: list[Met], keys: Keys | None
) -> AsyncIterator[Finding]:
    # One after another: at once they would share the link whose speed is measured.
    for peer in config.peers:
        findings, nodes = await check_peer(peer, config.fleet, interfaces, keys=keys)
        met += nodes
        for finding in findings:
            yield finding


async def _ports(config: Config, host: Host, address: Address, keys: Keys | None) -> list[Finding]:
    holders = await _holders(config, address, keys)
    findings = list(check_ports(config, address.ip, require_free, holders))
    return findings if address.loopback else [*findings, *check_firewall(host, config)]


async def _holders(config: Config, address: Address, keys: Keys | None) -> dict[int, PortHolder]:
    """Ports that a node on this PC holds, whatever its control port is."""
    found: dict[int, PortHolder] = {}
    wanted = {config.port, config.port + 1} if config.port else set()
    # Either port of a pair may be the other one of a node that is there.
    for control in (config.port, config.port + 1, config.port - 1):
        if {control, control + 1} & wanted - found.keys() and _taken(address.ip, control):
            holder = await _node_at(Endpoint(address.ip, control), keys)
            if holder is not None:
                found |= {control: holder, control + 1: holder}
    if config.client_port and _taken(address.ip, config.client_port):
        holder = await _head_at(config.client_port)
        if holder is not None:
            found[config.client_port] = holder
    return found


def _taken(ip: str, port: int) -> bool:
    try:
        require_free(ip, port, "")
    except PortError:
        return True
    return False


async def _node_at(control: Endpoint, keys: Keys | None) -> PortHolder | None:
    """The node whose control port this is; None when nothing answers like one."""
    try:
        return _holder("a node", await ask_node(control, _ASK_S, keys))
    except NotAdmittedError:
        return PortHolder("a node whose door is closed to this PC")
    except UnreachableError:
        return None


async def _head_at(port: int) -> PortHolder | None:
    """The head whose client port this is; None when nothing answers like one."""
    # There every head serves its own machine, and asks for no key.
    at = Endpoint("127.0.0.1", port)
    async with AsyncClientConnection(at, connect_timeout_s=_ASK_S) as connection:
        try:
            reply = decode_reply(await connection.request(encode(StatusRequest()), _ASK_S))
        except (UnreachableError, WireError):
            return None
    return _holder("the head", reply.status) if isinstance(reply, StatusReply) else None


def _holder(who: str, body: Mapping[str, JsonValue]) -> PortHolder:
    fleet = str(body.get("fleet"))
    return PortHolder(f"{who} of fleet '{fleet}' (version {body.get('software')})", fleet)
