"""How nodes come to know of each other: mDNS, addresses named by hand, and this machine's interfaces."""

from cascadia_p2p.discovery.discovery import Candidate, Discovery
from cascadia_p2p.discovery.interfaces import (
    Address,
    Interface,
    choose_address,
    list_interfaces,
    unreachable_sentence,
)
from cascadia_p2p.discovery.lookup import find_head, find_nodes, find_nodes_sync
from cascadia_p2p.discovery.mdns import Found, Mdns, Sightings
from cascadia_p2p.discovery.traffic import Traffic
from cascadia_p2p.discovery.txt import SERVICE_TYPE, Announcement

__all__ = [
    "SERVICE_TYPE",
    "Address",
    "Announcement",
    "Candidate",
    "Discovery",
    "Found",
    "Interface",
    "Mdns",
    "Sightings",
    "Traffic",
    "choose_address",
    "find_head",
    "find_nodes",
    "find_nodes_sync",
    "list_interfaces",
    "unreachable_sentence",
]
