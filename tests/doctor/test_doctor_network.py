"""What the doctor says of interfaces, ports, multicast, peers and the fleet; real sockets on 127.0.0.1."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest
from doctor_world import FileHost, speaking_node, status

from cascadia_p2p import __version__
from cascadia_p2p.config import load_config
from cascadia_p2p.discovery.interfaces import Address, Interface, choose_address
from cascadia_p2p.discovery.mdns import Mdns
from cascadia_p2p.discovery.txt import Announcement
from cascadia_p2p.doctor.finding import Finding, Level
from cascadia_p2p.doctor.multicast import Heard, check_multicast, probe_multicast
from cascadia_p2p.doctor.network import PortHolder, check_firewall, check_interfaces, check_ports, check_usb
from cascadia_p2p.doctor.peers import Met, check_fleet, check_peer, check_versions
from cascadia_p2p.errors import PortError
from cascadia_p2p.local import free_ports
from cascadia_p2p.transport.network import require_free
from cascadia_p2p.types import Endpoint, Instance, NodeId
from cascadia_p2p.wire.frames import PROTOCOL

LOOPBACK = Address("127.0.0.1", "lo")
LO = Interface("lo", ("127.0.0.1", "::1"), virtual="loopback")
DOCKER = Interface("docker0", ("172.17.0.1",), virtual="containers")
VPN = Interface("wg0", ("10.8.0.2",), virtual="a tunnel")
CABLE = Interface("enp3s0", ("192.168.1.20",), speed=2500)
SLOW = Interface("enp3s0", ("192.168.1.20",), speed=100)
WIFI = Interface("wlan0", ("192.168.1.30",), speed=866, wireless=True)
UNLED = Interface("enp3s0", ("169.254.7.9",), speed=1000)
DOWN = Interface("enp4s0", ("192.168.9.9",), up=False)


# --- interfaces ---------------------------------------------------------------------------------------


def interface_finding(*interfaces: Interface, bind: str | None = None) -> Finding:
    return check_interfaces(choose_address(bind, interfaces), interfaces, bind)


def test_stk_14_docker_and_vpn_are_passed_over_and_said_so() -> None:
    found = interface_finding(LO, DOCKER, VPN, WIFI, CABLE, DOWN)
    assert found.level is Level.OK
    assert found.message == (
        "enp3s0 (192.168.1.20) would be announced, the best that is up and real (cable, 2500 Mbit/s); "
        "also usable: wlan0; passed over: docker0 is containers, wg0 is a tunnel, enp4s0 is down"
    )


@pytest.mark.parametrize(
    ("interfaces", "bind", "level", "advice"),
    [
        ((LO, CABLE), None, Level.OK, ""),
        ((LO, WIFI), None, Level.WARN, "use a cable"),
        ((LO, SLOW), None, Level.WARN, "the link runs at 100 Mbit/s"),
        ((LO, UNLED), None, Level.WARN, "DHCP"),
        ((LO, DOCKER), None, Level.FAIL, "name an interface with --bind"),
        ((LO,), None, Level.FAIL, "connect a network"),
        ((LO, CABLE), "127.0.0.1", Level.OK, ""),
        ((LO, CABLE, VPN), "wg0", Level.WARN, "wg0 is for a tunnel"),
        ((LO, CABLE, WIFI), "wlan0", Level.WARN, "another interface is there"),
    ],
)
def test_interfaces_are_judged(
    interfaces: tuple[Interface, ...], bind: str | None, level: Level, advice: str
) -> None:
    found = interface_finding(*interfaces, bind=bind)
    assert found.level is level
    assert advice in found.advice
    assert bool(found.advice) == (level is not Level.OK)


def usb_adapter(host: FileHost, name: str, driver: str, speed: str, control: str) -> FileHost:
    """An interface on USB, linked together as Linux does."""
    usb = "/sys/devices/pci0000:00/0000:00:14.0/usb2/2-1"
    host.put(f"{usb}/idVendor", "0bda").put(f"{usb}/speed", speed).put(f"{usb}/power/control", control)
    network = f"{usb}/2-1:1.0/net/{name}"
    host.put(f"{network}/address", "00:e0:4c:68:00:01")
    host.path(f"/sys/bus/usb/drivers/{driver}").mkdir(parents=True)
    host.path(f"{usb}/2-1:1.0/driver").symlink_to(host.path(f"/sys/bus/usb/drivers/{driver}"))
    host.path(f"{network}/device").symlink_to(host.path(f"{usb}/2-1:1.0"))
    host.path("/sys/class/net").mkdir(parents=True)
    host.path(f"/sys/class/net/{name}").symlink_to(host.path(network))
    return host


def test_a_usb_adapter_is_examined(tmp_path: Path) -> None:
    host = usb_adapter(FileHost(tmp_path), "enx00e0", "r8152", "5000\n", "on\n")
    (found,) = check_usb(host, "enx00e0")
    assert (found.level, found.message) == (Level.OK, "enx00e0 is a USB adapter (driver r8152)")
    assert found.facts["speed_mbit_s"] == 5000


def test_usb_timers_sleep_and_slow_ports_are_told_with_the_command(tmp_path: Path) -> None:
    host = usb_adapter(FileHost(tmp_path), "enx00e0", "cdc_ncm", "480\n", "auto\n")
    host.put("/sys/class/net/enx00e0/cdc_ncm/tx_timer_usecs", "400\n")
    (found,) = check_usb(host, "enx00e0")
    assert found.level is Level.WARN
    assert "its port gives 480 Mbit/s" in found.message
    assert "it may fall asleep between frames" in found.message
    assert "holds data back for up to 400 us" in found.message
    assert found.advice.split("; ") == [
        "plug it into a USB 3 port",
        "echo on | sudo tee /sys/devices/pci0000:00/0000:00:14.0/usb2/2-1/power/control",
        "echo 5 | sudo tee /sys/class/net/enx00e0/cdc_ncm/tx_timer_usecs",
    ]


def test_what_is_not_on_usb_is_no_matter(tmp_path: Path) -> None:
    host = FileHost(tmp_path)
    card = "/sys/devices/pci0000:00/0000:03:00.0"
    host.put(f"{card}/net/enp3s0/address")
    host.path(f"{card}/net/enp3s0/device").symlink_to(host.path(card))
    host.path("/sys/class/net").mkdir(parents=True)
    host.path("/sys/class/net/enp3s0").symlink_to(host.path(f"{card}/net/enp3s0"))
    assert not list(check_usb(host, "enp3s0"))
    assert not list(check_usb(host, "lo"))
    assert not list(check_usb(FileHost(tmp_path, "win32"), "enp3s0"))


# --- ports and firewall -------------------------------------------------------------------------------


def ports_finding(port: int, client: int, holders: dict[int, PortHolder] | None = None) -> Finding:
    config = load_config({"port": port, "client_port": client}, environ={})
    (found,) = check_ports(config, "127.0.0.1", require_free, holders or {})
    return found


def test_free_ports_are_named_and_left_free() -> None:
    port, client = free_ports(), free_ports()
    for _ in range(2):
        found = ports_finding(port, client)
        assert found.level is Level.OK
        assert f"control {port}, data {port + 1}, client {client} (TCP)" in found.message


def test_exo_21_a_port_in_use_is_named_with_its_flag() -> None:
    port, client = free_ports(), free_ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        found = ports_finding(port, client)
        assert found.level is Level.FAIL
        assert f"data port {port + 1} on 127.0.0.1 is in use by" in found.message
        assert "choose another with --port" in found.message
        ours = ports_finding(port, client, {port + 1: PortHolder("a node of fleet 'cascadia'", "cascadia")})
        assert ours.level is Level.OK
        assert f"data port {port + 1} by a node of fleet 'cascadia'" in ours.message
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", client))
        taken.listen()
        assert "--client-port" in ports_finding(port, client).message
        ours = ports_finding(port, client, {client: PortHolder("the head of fleet 'cascadia'", "cascadia")})
        assert ours.message == (
            f"in use as they should be: client port {client} by the head of fleet 'cascadia'; a head of "
            "another fleet on this PC needs --client-port"
        )
        theirs = ports_finding(port, client, {client: PortHolder("the head of fleet 'x'", "x")})
        assert theirs.level is Level.FAIL
        assert f"client port {client} is held by the head of fleet 'x', and this PC" in theirs.message
        assert "fleet 'cascadia': choose another port with --client-port" in theirs.message


def test_an_address_of_another_machine_can_not_be_bound() -> None:
    with pytest.raises(PortError, match="is not an address of this machine"):
        require_free("203.0.113.7", 0, "--port")


def test_firewalls_that_are_on_are_told_with_the_command(tmp_path: Path) -> None:
    config = load_config({"port": 7600}, environ={})
    assert not list(check_firewall(FileHost(tmp_path), config))
    host = FileHost(tmp_path / "ufw").put("/etc/ufw/ufw.conf", "# x\nENABLED=yes\nLOGLEVEL=low\n")
    (found,) = check_firewall(host, config)
    assert (found.level, "sudo ufw allow 7600:7601/tcp" in found.advice) == (Level.WARN, True)
    off = FileHost(tmp_path / "off").put("/etc/ufw/ufw.conf", "ENABLED=no\n")
    assert not list(check_firewall(off, config))
    other = FileHost(tmp_path / "d").put("/run/firewalld/pid")
    (found,) = check_firewall(other, config)
    assert "--add-port=7600-7601/tcp" in found.advice
    said = {"netsh": "Private Profile Settings:\nState                                 ON\n"}
    (found,) = check_firewall(FileHost(tmp_path, "win32", said=said), config)
    assert "private" in found.advice


# --- multicast ----------------------------------------------------------------------------------------


def probed(address: Address) -> Heard:
    """What is heard in a short time, or in a longer one on a machine that stalls."""
    for wait_s in (0.5, 5.0, 30.0):
        heard = probe_multicast(address, wait_s=wait_s)
        if heard.echoed or heard.problem:
            break
    return heard


def test_stk_18_the_own_probe_is_sent_and_heard() -> None:
    heard = probed(LOOPBACK)
    assert (heard.problem, heard.hosts) == ("", set())
    assert heard.sent >= 1
    assert heard.echoed >= 1
    found = check_multicast(LOOPBACK, True, heard)
    assert (found.level, found.message) == (Level.OK, "sent and heard at lo (127.0.0.1), within this PC")
    assert found.facts["echoed"] == heard.echoed


def test_the_probe_works_over_ipv6_too() -> None:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    heard = probed(Address("::1", "lo"))
    # Loopback has no route for IPv6 multicast on every system: then the reason must be told.
    assert heard.echoed or heard.problem


def test_stk_18_an_address_without_multicast_is_told() -> None:
    away = Address("203.0.113.7", "gone0")
    heard = probe_multicast(away, wait_s=0.2)
    assert heard.problem
    assert check_multicast(away, True, heard).level is Level.FAIL
    found = check_multicast(away, False, heard)
    assert found.level is Level.WARN
    assert "multicast does not work at gone0 (203.0.113.7): " in found.message
    assert "--peer HOST:PORT" in found.advice


@pytest.mark.parametrize(
    ("heard", "level", "words"),
    [
        (Heard(sent=4, echoed=4, hosts={"192.168.1.7"}), Level.OK, "1 other machine answered"),
        (Heard(sent=4, echoed=4, hosts={"a", "b"}), Level.OK, "2 other machines answered"),
        (Heard(sent=4, echoed=4, local=3), Level.WARN, "no other machine answered"),
        (Heard(sent=4, echoed=0, hosts={"192.168.1.7"}), Level.FAIL, "not even this PC heard them"),
    ],
)
def test_exo_01_what_was_heard_is_judged_with_counts(heard: Heard, level: Level, words: str) -> None:
    found = check_multicast(Address("192.168.1.20", "enp3s0"), True, heard)
    assert found.level is level
    assert words in found.message
    assert found.facts["sent"] == 4


# --- peers --------------------------------------------------------------------------------------------


def peer(endpoint: Endpoint, timeout_s: float = 3.0) -> tuple[list[Finding], list[Met]]:
    return asyncio.run(check_peer(endpoint, "cascadia", (LO, CABLE), timeout_s))


def with_node(
    body: dict[str, object], *, delay_s: float = 0.0, padding: bool = True
) -> tuple[list[Finding], list[Met]]:
    """What is found of a node that answers with this body."""

    async def examine() -> tuple[list[Finding], list[Met]]:
        async with speaking_node(body, delay_s, padding) as endpoint:  # type: ignore[arg-type]
            return await check_peer(endpoint, "cascadia", (LO, CABLE), 60.0)

    return asyncio.run(examine())


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a busy machine keeps too: how it answers is not what is tested."""
    monkeypatch.setattr("cascadia_p2p.doctor.peers._SLOW_RTT_S", 30.0)
    monkeypatch.setattr("cascadia_p2p.doctor.peers._SLOW_RATE", 1e2)
    monkeypatch.setattr("cascadia_p2p.node.query._BURST_LIMIT_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_a_node_that_answers_is_measured() -> None:
    with socket.create_server(("127.0.0.1", 0)) as data:
        findings, met = with_node(status(data=f"127.0.0.1:{data.getsockname()[1]}"))
    assert [each.check for each in findings] == ["peer", "peer_data"]
    way, port = findings
    assert way.level is Level.OK
    assert isinstance(way.facts["rtt_s"], float)
    assert 0 < way.facts["rtt_s"] < 30
    assert isinstance(way.facts["bytes_s"], float)
    assert way.facts["bytes_s"] > 1e2
    assert f"version {__version__}, fleet 'cascadia', ring looking" in way.message
    assert port.level is Level.OK
    assert [each.name for each in met] == ["elsewhere/abababab"]


def test_ring_05_a_slow_first_answer_does_not_make_a_way_slow() -> None:
    async def examine() -> tuple[list[Finding], list[Met]]:
        async with speaking_node(status(), slow_first=3) as endpoint:
            return await check_peer(endpoint, "cascadia", (LO, CABLE), 60.0)

    findings, _ = asyncio.run(examine())
    rtt = findings[0].facts["rtt_s"]
    assert isinstance(rtt, float)
    assert rtt < 0.3, "the median of several"


@pytest.mark.usefixtures("patient")
def test_exo_21_a_closed_data_port_is_told_though_control_answers() -> None:
    closed = free_ports()
    findings, _ = with_node(status(data=f"192.168.77.1:{closed}"))
    assert [each.level for each in findings] == [Level.OK, Level.FAIL]
    # At the address that answered, whatever the node calls itself.
    assert findings[1].message.startswith(f"127.0.0.1:{closed}, the port for activations of 127.0.0.1:")
    assert f"open TCP port {closed}" in findings[1].advice


def test_a_slow_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cascadia_p2p.node.query._BURST_LIMIT_S", 60.0)
    # So slow that what a busy machine adds is little.
    findings, _ = with_node(status(), delay_s=0.25)
    assert findings[0].level is Level.WARN
    rtt = findings[0].facts["rtt_s"]
    assert isinstance(rtt, float)
    assert 0.25 <= rtt < 1.25
    rate = findings[0].facts["bytes_s"]
    assert isinstance(rate, float)
    # Three times 4 KiB, 250 ms each.
    assert rate == pytest.approx(4200 / 0.25, rel=0.4)


@pytest.mark.usefixtures("patient")
def test_a_release_that_does_not_know_padding_is_measured_without_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cascadia_p2p.node.query._BURST_LIMIT_S", 0.2)
    findings, _ = with_node(status(), padding=False)
    assert findings[0].level is Level.OK
    assert findings[0].facts["bytes_s"] is None
    assert "unknown speed" in findings[0].message


def test_a_node_of_another_fleet_is_told() -> None:
    findings, _ = with_node(status(fleet="other"))
    assert findings[0].level is Level.FAIL
    assert "this PC would join fleet 'cascadia'" in findings[0].advice


def test_dll_14_a_wrong_port_is_told_with_address_and_interface() -> None:
    endpoint = Endpoint("127.0.0.1", free_ports())
    findings, met = peer(endpoint, 3.0)
    assert not met
    (found,) = findings
    assert found.level is Level.FAIL
    assert found.message == f"{endpoint} can not be reached from 127.0.0.1 (lo): connection refused"
    assert f"nothing listens on port {endpoint.port}" in found.advice


def test_dll_14_what_is_no_node_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        findings, _ = peer(Endpoint("127.0.0.1", silent.getsockname()[1]), 0.5)
        assert time.monotonic() - start < 30
    assert findings[0].level is Level.FAIL
    assert "no answer" in findings[0].message


def test_dll_14_an_unknown_name_is_told() -> None:
    findings, _ = peer(Endpoint("no-such-host.invalid", 7600), 1.0)
    assert findings[0].level is Level.FAIL
    assert "no-such-host.invalid:7600 can not be reached" in findings[0].message


# --- versions and fleet -------------------------------------------------------------------------------


def met(name: str, software: str = __version__, fingerprint: str = "f") -> Met:
    return Met(name, software, fingerprint, 0, f"{name}:7600")


def test_pet_12_mixed_versions_are_told_by_node() -> None:
    assert not check_versions([])
    (same,) = check_versions([met("a"), met("b")])
    assert (same.level, same.message) == (
        Level.OK,
        f"all 2 nodes and this program are version {__version__}",
    )
    (mixed,) = check_versions([met("a"), met("b", "9.9.9"), met("c", "9.9.9")])
    assert mixed.level is Level.WARN
    assert "9.9.9: b, c" in mixed.message
    assert f"{__version__}: this PC's program, a" in mixed.message


def test_nodes_with_different_models_are_told() -> None:
    findings = check_versions([met("a"), met("b", fingerprint="g")])
    assert [each.check for each in findings] == ["versions", "models"]
    assert findings[1].level is Level.WARN


def announcement(node: str, port: int, shard: int | None, fleet: str = "doctors") -> Announcement:
    return Announcement(
        PROTOCOL, fleet, NodeId(node * 16), Instance(node * 16), "m", shard, 3, port, port + 1
    )


def test_nodes_of_the_fleet_are_found_and_asked() -> None:
    """One that answers, one that can only be seen, and one of another fleet."""

    async def examine(look_s: float) -> tuple[list[Finding], list[Met]]:
        dead = free_ports()
        async with speaking_node(status(software="9.9.9")) as endpoint:
            speakers = [Mdns([LOOPBACK], "doctors", None, lambda _: None) for _ in range(3)]
            speakers[0].start(announcement("a", endpoint.port, 0))
            speakers[1].start(announcement("b", dead, 2))
            speakers[2].start(announcement("c", dead, 1, "strangers"))
            try:
                return await check_fleet(LOOPBACK, "doctors", look_s)
            finally:
                await asyncio.gather(*(each.stop() for each in speakers))

    expected = "2 nodes of fleet 'doctors' seen, 2 of 3 shards; 1 of them can be seen but not reached"
    # A machine that stalls hears late of some.
    for look_s in (2.5, 10.0, 60.0):
        findings, nodes = asyncio.run(examine(look_s))
        if findings[0].message == expected and len(findings) == 2:
            break
    seen, other = findings
    assert seen.level is Level.WARN
    assert seen.message == expected
    assert seen.facts["missing_shards"] == [1]
    # Other tests' fleets may be on this machine, too.
    assert (other.check, other.level) == ("other_fleets", Level.OK)
    assert "'strangers'" in other.message
    assert [each.software for each in nodes] == ["9.9.9"]
    assert check_versions(nodes)[0].level is Level.WARN


def test_an_empty_network_is_no_fault() -> None:
    findings, nodes = asyncio.run(check_fleet(LOOPBACK, "nobody-here", 0.3))
    assert findings[0].message == "no node of fleet 'nobody-here' announces itself here yet"
    assert {each.level for each in findings} == {Level.OK}
    assert not nodes
