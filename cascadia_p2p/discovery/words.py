"""The sentence for a node that sees no other."""

from __future__ import annotations

from collections.abc import Mapping

from cascadia_p2p.discovery.interfaces import Address
from cascadia_p2p.discovery.mdns import Mdns
from cascadia_p2p.discovery.traffic import Traffic
from cascadia_p2p.types import Endpoint

__all__ = ["alone_sentence"]


def alone_sentence(
    fleet: str, address: Address, seconds: float, mdns: Mdns | None, peers: Mapping[Endpoint, str]
) -> str:
    """Say what was tried, what was counted, and what to do next.

    Args:
        fleet: this node's.
        address: where it speaks.
        seconds: how long it has been looking.
        mdns: None when it is off.
        peers: static peers not reached, with what failed.
    """
    parts = [f"no other node of fleet '{fleet}' seen for {seconds:.0f} s"]
    if mdns is None:
        parts.append("mDNS is off (--no-mdns)")
    elif mdns.problem:
        parts.append(f"mDNS does not work on {address}: {mdns.problem}")
    else:
        parts.append(f"mDNS on {address}: {_counts(mdns.traffic)}")
    for peer, problem in peers.items():
        parts.append(f"--peer {peer} {f'can not be looked up ({problem})' if problem else 'does not answer'}")
    return ". ".join(parts) + f". {_advice(address, mdns, bool(peers))}"


def _counts(traffic: Traffic) -> str:
    words = f"{traffic.sent} packets sent"
    if traffic.failed:
        words += f" ({traffic.failed} of them refused by the system: {traffic.failure})"
    words += f", {traffic.echoed} of them heard back, {traffic.others} received from other machines"
    if traffic.local:
        words += f", {traffic.local} from other programs on this one"
    return words


def _advice(address: Address, mdns: Mdns | None, peers: bool) -> str:
    if address.loopback:
        return "This is the loopback address: for other machines, give this one's own with --bind ADDR"
    name = "Name" if not peers else "Check the addresses given, or name"
    way_out = f"{name} one other node with --peer HOST:PORT"
    if mdns is None or mdns.problem:
        return way_out
    if mdns.sightings.other_versions:
        versions = ", ".join(sorted(mdns.sightings.versions))
        return f"There are nodes of protocol version {versions} here: install the same release everywhere"
    if mdns.sightings.fleets:
        fleets = ", ".join(sorted(mdns.sightings.fleets))
        return f"Other fleets are here: {fleets}. Start nodes of this one with the same --fleet"
    if mdns.traffic.others:
        hosts = ", ".join(sorted(mdns.traffic.hosts)[:4])
        return f"Multicast from other machines arrives ({hosts}), so start another node, or {_lower(way_out)}"
    blocked = "Multicast may be blocked (firewall, Wi-Fi isolation, VPN, another subnet)"
    if not mdns.traffic.echoed:
        blocked = "Not even own packets come back, so this machine itself may block multicast"
    return f"{blocked}: open UDP port 5353, choose another interface with --bind, or {_lower(way_out)}"


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]
