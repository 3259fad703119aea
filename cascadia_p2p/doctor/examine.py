"""Runs all checks in order and gives their findings as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from enum import StrEnum
from functools import partial

import psutil

from cascadia_p2p.config import Config
from cascadia_p2p.discovery.interfaces import Address, Interface, choose_address, list_interfaces
from cascadia_p2p.doctor.devices import check_devices
from cascadia_p2p.doctor.finding import Finding, Level
from cascadia_p2p.doctor.host import Host
from cascadia_p2p.doctor.key import check_key
from cascadia_p2p.doctor.memory import check_bandwidth, check_memory
from cascadia_p2p.doctor.model import check_model
from cascadia_p2p.doctor.multicast import check_multicast, probe_multicast
from cascadia_p2p.doctor.network import check_firewall, check_interfaces, check_ports, check_usb
from cascadia_p2p.doctor.peers import Met, check_fleet, check_peer, check_versions
from cascadia_p2p.doctor.power import check_clock, check_power
from cascadia_p2p.doctor.processor import check_processor
from cascadia_p2p.doctor.software import check_software
from cascadia_p2p.errors import UnreachableError, UsageError
from cascadia_p2p.node.query import ask_node
from cascadia_p2p.shards.reader import VerifyProgress
from cascadia_p2p.transport.curve import Keys
from cascadia_p2p.transport.network import require_free
from cascadia_p2p.types import Endpoint


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


async def _holders(config: Config, address: Address, keys: Keys | None) -> dict[int, str]:
    """Ports that a node of ours on this PC holds."""
    if not config.port:
        return {}
    try:
        body = await ask_node(Endpoint(address.ip, config.port), 0.5, keys)
    except UnreachableError:
        return {}
    words = f"a node of fleet '{body.get('fleet')}' (version {body.get('software')})"
    ports = [config.port, config.port + 1]
    if body.get("is_head"):
        ports.append(config.client_port)
    return dict.fromkeys(ports, words)
