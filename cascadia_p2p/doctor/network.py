"""Checks which interface a node would announce and why, USB network adapters, and that its ports are free."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import JsonValue

from cascadia_p2p.config import Config
from cascadia_p2p.discovery.interfaces import Address, Interface
from cascadia_p2p.doctor.finding import Finding, Level
from cascadia_p2p.doctor.host import Host, read_text, whole_number
from cascadia_p2p.errors import PortError

_GIGABIT: Final = 1000
_NCM_TIMER_US: Final = 100
"""Above this, waiting for more data to send together is a large part of a hop."""


def check_interfaces(address: Address, interfaces: Sequence[Interface], bind: str | None) -> Finding:
    """Which address would be announced, why, and what is passed over.

    Args:
        address: chosen from the interfaces.
        interfaces: all of this machine.
        bind: what the user asked for.
    """
    chosen = next((each for each in interfaces if address.ip in each.addresses), None)
    others = [
        f"{each.name} is {each.virtual or 'down'}"
        for each in interfaces
        if each is not chosen and (each.virtual or not each.up) and each.virtual != "loopback"
    ]
    also = [each.name for each in interfaces if each is not chosen and each.up and not each.virtual]
    parts = [f"{address} would be announced, {_why(address, chosen, bind)}"]
    if also:
        parts.append(f"also usable: {', '.join(also)}")
    if others:
        parts.append(f"passed over: {', '.join(others)}")
    message = "; ".join(parts)
    facts: dict[str, JsonValue] = {
        "address": address.ip,
        "interface": address.interface,
        "speed_mbit_s": chosen.speed if chosen else 0,
        "interfaces": [each.name for each in interfaces],
    }
    level, advice = _judge(address, chosen, bind, bool(also))
    return Finding("interface", level, message, advice, facts)


def _why(address: Address, chosen: Interface | None, bind: str | None) -> str:
    if bind is not None:
        return "as --bind says"
    if chosen is None or address.warning:
        return "because no interface is usable"
    kind = "Wi-Fi" if chosen.wireless else "cable"
    speed = f", {chosen.speed} Mbit/s" if chosen.speed else ""
    return f"the best that is up and real ({kind}{speed})"


def _judge(address: Address, chosen: Interface | None, bind: str | None, others: bool) -> tuple[Level, str]:
    if address.loopback:
        if bind is not None:
            return Level.OK, ""
        return Level.FAIL, "connect a network, or name an interface with --bind"
    if chosen is not None and chosen.virtual and chosen.virtual != "loopback":
        return (
            Level.WARN,
            f"{chosen.name} is for {chosen.virtual}: see that the other PCs reach {address.ip}, "
            "or change --bind",
        )
    if ipaddress.ip_address(address.ip).is_link_local:
        return Level.WARN, "no address came from a router: see that the cable and DHCP work"
    if chosen is not None and chosen.wireless:
        wired = "; another interface is there: name it with --bind" if others else ""
        return Level.WARN, f"Wi-Fi is slower than cable and uneven: use a cable{wired}"
    if chosen is not None and 0 < chosen.speed < _GIGABIT:
        return (
            Level.WARN,
            f"the link runs at {chosen.speed} Mbit/s: see that cable and switch can do a gigabit",
        )
    return Level.OK, ""


def check_usb(host: Host, interface: str) -> Iterator[Finding]:
    """An adapter on USB: its port's speed, whether it may fall asleep, and timers that hold back data."""
    if not host.linux:
        return
    network = host.path(f"/sys/class/net/{interface}")
    device = (network / "device").resolve()
    usb = _usb_device(device)
    if usb is None:
        return
    driver = (device / "driver").resolve().name
    problems: list[tuple[str, str]] = []
    speed = whole_number(read_text(usb / "speed"))
    if speed is not None and speed < _GIGABIT:
        problems.append((f"its port gives {speed} Mbit/s", "plug it into a USB 3 port"))
    if read_text(usb / "power" / "control") == "auto":
        path = _absolute(host, usb / "power" / "control")
        problems.append(("it may fall asleep between frames", f"echo on | sudo tee {path}"))
    timer = whole_number(read_text(network / "cdc_ncm" / "tx_timer_usecs"))
    if timer is not None and timer > _NCM_TIMER_US:
        path = f"/sys/class/net/{interface}/cdc_ncm/tx_timer_usecs"
        problems.append(
            (f"it holds data back for up to {timer} us to send more at once", f"echo 5 | sudo tee {path}")
        )
    message = f"{interface} is a USB adapter (driver {driver})"
    facts: dict[str, JsonValue] = {"driver": driver, "speed_mbit_s": speed, "tx_timer_us": timer}
    yield Finding(
        "usb",
        Level.WARN if problems else Level.OK,
        "; ".join([message, *(problem for problem, _ in problems)]),
        "; ".join(advice for _, advice in problems),
        facts,
    )


def _usb_device(device: Path) -> Path | None:
    """The directory of the USB device that an interface belongs to."""
    if not any(part.startswith("usb") for part in device.parts):
        return None
    return next((each for each in (device, *device.parents) if (each / "idVendor").exists()), None)


def _absolute(host: Host, path: Path) -> str:
    root = str(host.root.resolve())
    return str(path) if root == "/" else str(path).removeprefix(root)


class PortHolder(NamedTuple):
    """Who holds a port of this PC and speaks our protocol: in words, and its fleet if it said one."""

    words: str
    fleet: str | None = None


def check_ports(
    config: Config, ip: str, try_port: Callable[[str, int, str], None], holders: Mapping[int, PortHolder]
) -> Iterator[Finding]:
    """That control, data and client port can be bound.

    Args:
        config: names the ports.
        ip: address that they are bound at.
        try_port: raises PortError when it can not.
        holders: nodes on this PC, by the ports that they hold.
    """
    wanted = (
        ("control", config.port, "--port"),
        ("data", config.port + 1 if config.port else 0, "--port"),
        ("client", config.client_port, "--client-port"),
    )
    problems: list[str] = []
    ours: list[str] = []
    flags: set[str] = set()
    for name, port, flag in wanted:
        try:
            try_port(ip, port, flag)
        except PortError as error:
            holder = holders.get(port)
            if holder is None:
                problems.append(f"{name} {error}")
            elif holder.fleet in (None, config.fleet):
                ours.append(f"{name} port {port} by {holder.words}")
                flags.add(flag)
            else:
                problems.append(
                    f"{name} port {port} is held by {holder.words}, and this PC is set to fleet "
                    f"'{config.fleet}': choose another port with {flag}, or that fleet with --fleet"
                )
    numbers = ", ".join(f"{name} {port or 'any'}" for name, port, _ in wanted)
    facts: dict[str, JsonValue] = {name: port for name, port, _ in wanted}
    if problems:
        yield Finding(
            "ports", Level.FAIL, "; ".join(problems), "end that program, or use the flag that is named", facts
        )
    elif ours:
        yield Finding(
            "ports",
            Level.OK,
            f"in use as they should be: {', '.join(ours)}; {_for_others(flags)}",
            facts=facts,
        )
    else:
        yield Finding("ports", Level.OK, f"free: {numbers} (TCP), and mDNS uses 5353 (UDP)", facts=facts)


def _for_others(flags: Collection[str]) -> str:
    """What those on this PC need that come after the node that holds these flags' ports."""
    if flags == {"--client-port"}:
        return "a head of another fleet on this PC needs --client-port"
    return "a second node on this PC needs --port"


def check_firewall(host: Host, config: Config) -> Iterator[Finding]:
    """A firewall of this PC that would have to let the ports through."""
    ports = f"{config.port}:{config.port + 1}/tcp"
    if host.linux and "ENABLED=yes" in host.read("/etc/ufw/ufw.conf").replace('"', ""):
        yield Finding(
            "firewall",
            Level.WARN,
            "ufw is on: other PCs reach this one only through ports that it lets in",
            f"sudo ufw allow {ports}; sudo ufw allow {config.client_port}/tcp; sudo ufw allow 5353/udp",
        )
    elif host.linux and host.path("/run/firewalld").exists():
        yield Finding(
            "firewall",
            Level.WARN,
            "firewalld runs: other PCs reach this one only through ports that it lets in",
            f"sudo firewall-cmd --permanent --add-port={ports.replace(':', '-')} "
            f"--add-port={config.client_port}/tcp --add-service=mdns; sudo firewall-cmd --reload",
        )
    elif host.system == "win32":
        said = host.run(["netsh", "advfirewall", "show", "currentprofile", "state"])
        if said is not None and "ON" in said.upper():
            yield Finding(
                "firewall",
                Level.OK,
                "Windows' firewall is on",
                "let Python through when Windows asks, on the kind of network (private) that this one is",
            )
