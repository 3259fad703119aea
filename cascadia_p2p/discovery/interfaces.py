"""This machine's network interfaces, and the one address that a node binds and announces."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ifaddr
import psutil

from cascadia_p2p.errors import UsageError
from cascadia_p2p.types import Endpoint

__all__ = [
    "Address",
    "Interface",
    "choose_address",
    "list_interfaces",
    "nearest",
    "route_to",
    "unreachable_sentence",
]

_SYSTEM = Path("/sys/class/net")
_DOWN = {"down", "lowerlayerdown", "notpresent", "dormant"}
_ETHERNET_LIKE = {"1", "32"}  # ARPHRD_ETHER, ARPHRD_INFINIBAND
_VIRTUAL = [
    (re.compile(r"lo\d*$|loopback", re.I), "loopback"),
    (re.compile(r"docker|veth|br-|cni|flannel|cali|podman|lxc|lxd|kube", re.I), "containers"),
    (re.compile(r"virbr|vmnet|vboxnet|vnet\d|.*(hyper-v|virtualbox|vmware)", re.I), "virtual machines"),
    (re.compile(r"u?tun\d|tap|wg|zt|tailscale|ppp|.*(tap-|wireguard|tailscale|vpn)", re.I), "a tunnel"),
    (re.compile(r"dummy|ifb|awdl|llw|anpi|gif\d|stf\d|bridge\d", re.I), "virtual"),
]


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface.

    Args:
        name: as the system calls it.
        addresses: IPv4 and IPv6 addresses; link-local IPv6 ones with their scope, as in `fe80::1%eth0`.
        speed: Mbit/s, 0 when unknown.
        up: whether it can carry traffic now.
        wireless: whether it is Wi-Fi, as far as can be told.
        virtual: why it is not offered by itself (`containers`, `a tunnel`, ...); empty for a real one.
    """

    name: str
    addresses: tuple[str, ...]
    speed: int = 0
    up: bool = True
    wireless: bool = False
    virtual: str = ""


@dataclass(frozen=True, slots=True)
class Address:
    """The address that a node binds and announces.

    Args:
        ip: as sockets take it, with the scope of a link-local IPv6 address.
        interface: name of its interface.
        warning: a sentence for the user when this is not what one would wish for; else empty.
    """

    ip: str
    interface: str
    warning: str = ""

    def __str__(self) -> str:
        return f"{self.interface} ({self.ip})"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.ip).is_loopback


def list_interfaces(system: Path = _SYSTEM) -> list[Interface]:
    """All interfaces that have an address, in the system's order.

    Args:
        system: where Linux describes interfaces; elsewhere it does not exist, and names must do.
    """
    stats = psutil.net_if_stats()
    found = []
    for adapter in ifaddr.get_adapters():
        name = str(adapter.nice_name)
        addresses = tuple(_spell(ip.ip, name) for ip in adapter.ips)
        known = stats.get(name)
        speed = max(_number(system / name / "speed"), known.speed if known else 0)
        state = _read(system / name / "operstate")
        found.append(
            Interface(
                name=name,
                addresses=addresses,
                speed=speed,
                up=state not in _DOWN and (known is None or known.isup),
                wireless=_wireless(name, system / name),
                virtual=_virtual(name, addresses, system / name),
            )
        )
    return found


def nearest(endpoint: Endpoint) -> Endpoint:
    """An address to reach a port by: 127.0.0.1 when it is on this machine."""
    own = {address for interface in list_interfaces() for address in interface.addresses}
    return Endpoint("127.0.0.1", endpoint.port) if endpoint.host in own else endpoint


def choose_address(bind: str | None, interfaces: Sequence[Interface]) -> Address:
    """The one address to bind and announce.

    Without `bind`: among interfaces that are up and real, IPv4 before IPv6, cable before Wi-Fi, then the
    faster, then by name; with none, 127.0.0.1 and a warning.

    Args:
        bind: an address of this machine or the name of an interface, whatever its kind.
        interfaces: from `list_interfaces`.

    Raises:
        UsageError: `bind` is neither; the sentence lists what there is.
    """
    if bind is not None:
        return _named(bind, interfaces)
    ranked = sorted(
        (_rank(interface, ip), order, ip, interface.name)
        for interface in interfaces
        if interface.up and not interface.virtual
        for order, ip in enumerate(interface.addresses)
    )
    if ranked:
        return Address(ranked[0][2], ranked[0][3])
    reasons = [
        f"{each.name} is {'down' if not each.virtual else each.virtual}"
        for each in interfaces
        if each.virtual != "loopback"
    ]
    found = f" ({'; '.join(reasons)})" if reasons else ""
    return Address(
        "127.0.0.1",
        "loopback",
        f"no usable network interface{found}: using 127.0.0.1, where only nodes on this machine are found. "
        "Connect a network, or name an interface with --bind",
    )


def route_to(endpoint: Endpoint) -> str | None:
    """The own address from which this machine would reach an endpoint, or None; sends nothing."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def unreachable_sentence(endpoint: Endpoint, reason: str, interfaces: Sequence[Interface]) -> str:
    """Why a node can not be reached: the address tried, the interface used, what failed, and what to look at.

    Args:
        endpoint: the address tried.
        reason: what the system said, as in `connection refused`.
        interfaces: from `list_interfaces`.
    """
    source = route_to(endpoint)
    if source is None:
        return (
            f"{endpoint} can not be reached: {reason}. This machine has no route to it: "
            f"check the address against its interfaces, {_listed(interfaces)}"
        )
    name = next(
        (each.name for each in interfaces if source in map(_without_scope, each.addresses)), "unknown"
    )
    if "refused" in reason.lower():
        hint = (
            f"the machine answers, but nothing listens on port {endpoint.port}: check --port and --bind there"
        )
    else:
        hint = f"check that the node runs there, and that TCP port {endpoint.port} is open in its firewall"
    return f"{endpoint} can not be reached from {source} ({name}): {reason}; {hint}"


def _named(bind: str, interfaces: Sequence[Interface]) -> Address:
    for interface in interfaces:
        if bind == interface.name:
            if not interface.addresses:
                raise UsageError(f"--bind {bind}: this interface has no address")
            return Address(min(interface.addresses, key=lambda ip: _rank(interface, ip)), bind)
        for ip in interface.addresses:
            if bind in (ip, _without_scope(ip)):
                return Address(ip, interface.name)
    try:
        if ipaddress.ip_address(bind).is_loopback:
            return Address(bind, "loopback")
    except ValueError:
        pass
    raise UsageError(
        f"--bind {bind} is neither an address nor an interface of this machine: it has {_listed(interfaces)}"
    )


def _rank(interface: Interface, ip: str) -> tuple[int, bool, int, str]:
    address = ipaddress.ip_address(ip)
    if address.is_link_local:
        kind = 2 if address.version == 4 else 3
    else:
        kind = 0 if address.version == 4 else 1
    return kind, interface.wireless, -interface.speed, interface.name


def _listed(interfaces: Iterable[Interface]) -> str:
    return (
        ", ".join(f"{each.name} ({', '.join(each.addresses) or 'no address'})" for each in interfaces)
        or "none"
    )


def _spell(ip: str | tuple[str, int, int], interface: str) -> str:
    if isinstance(ip, str):
        return ip
    return f"{ip[0]}%{interface}" if ipaddress.ip_address(ip[0]).is_link_local else ip[0]


def _without_scope(ip: str) -> str:
    return ip.partition("%")[0]


def _wireless(name: str, system: Path) -> bool:
    if (system / "wireless").exists() or (system / "phy80211").exists():
        return True
    return not system.exists() and re.search(r"wi-?fi|wireless|wlan|802\.11", name, re.I) is not None


def _virtual(name: str, addresses: Iterable[str], system: Path) -> str:
    if any(ipaddress.ip_address(ip).is_loopback for ip in addresses):
        return "loopback"
    for form, reason in _VIRTUAL:
        if form.match(name):
            return reason
    if (system / "tun_flags").exists() or "DEVTYPE=wireguard" in _read(system / "uevent"):
        return "a tunnel"
    if (system / "bridge").exists():
        ports = [system.parent / port.name for port in (system / "brif").glob("*")]
        if not any((port / "device").exists() for port in ports):
            return "a bridge without a real port"
    kind = _read(system / "type")
    return "" if not kind or kind in _ETHERNET_LIKE else "not Ethernet"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _read(path)
    return int(text) if text.isdigit() else 0
