"""Discovery between hosts: network namespaces on one switch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from types import ModuleType

import pytest
from speakers import Speaker, speaker_command

pytestmark = pytest.mark.lab
NODES = ["a" * 16, "b" * 16, "c" * 16]


class Hosts:
    """A lab with speakers in it."""

    def __init__(self, lab) -> None:  # type: ignore[no-untyped-def]
        self.lab = lab

    def speaker(self, host: int, **options: object) -> Speaker:
        """Start an speaker on a host and wait until it is up."""
        command = speaker_command(**{"fleet": "lab", "node": NODES[host], "port": 7600, **options})
        speaker = Speaker(self.lab.start(host, command, subprocess.DEVNULL))
        speaker.wait_for(lambda line: line["event"] == "up")
        return speaker


@pytest.fixture
def hosts(netlab: ModuleType) -> Iterator[Hosts]:
    with netlab.Lab(3, f"t{os.getpid()}") as lab:
        yield Hosts(lab)


def connected(host: int):  # type: ignore[no-untyped-def]
    return lambda line: line["event"] == "connected" and line["node"] == NODES[host]


def logged(name: str):  # type: ignore[no-untyped-def]
    return lambda line: line["event"] == "log" and line["name"] == name


def test_exo_06_two_fleets_on_one_network_keep_apart(hosts: Hosts) -> None:
    a, b = hosts.speaker(0), hosts.speaker(1)
    other = hosts.speaker(2, fleet="other")
    a.wait_for(connected(1))
    b.wait_for(connected(0))
    told = a.wait_for(logged("other_fleet_seen"))
    assert told["message"] == "fleet 'other' is on this network too; this node keeps to 'lab'"
    assert logged("other_fleet_seen")(other.wait_for(logged("other_fleet_seen")))
    assert not [line for line in other.everything() if line["event"] in ("candidate", "connected")]
    for speaker in (a, b):
        nodes = {line["node"] for line in speaker.everything() if line["event"] == "candidate"}
        assert NODES[2] not in nodes


def test_exo_01_blocked_multicast_is_said_with_counts_and_next_step(hosts: Hosts) -> None:
    for host in range(3):
        hosts.lab.multicast(host, False)
    a, b = hosts.speaker(0, alone_s=4), hosts.speaker(1, alone_s=4)
    for host, speaker in enumerate((a, b)):
        message = str(speaker.wait_for(logged("alone"))["message"])
        assert message.startswith("no other node of fleet 'lab' seen for ")
        assert f" s. mDNS on eth0 ({hosts.lab.ip(host)}): " in message
        assert ", 0 received from other machines" in message
        assert " 0 packets sent" not in message
        assert "open UDP port 5353" in message
        assert "--peer HOST:PORT" in message
        assert not [line for line in speaker.everything() if line["event"] == "candidate"]


def test_exo_01_multicast_that_comes_back_is_used(hosts: Hosts) -> None:
    hosts.lab.multicast(0, False)
    a, _ = hosts.speaker(0, alone_s=1), hosts.speaker(1)
    a.wait_for(logged("alone"))
    hosts.lab.multicast(0, True)
    a.wait_for(connected(1))


def test_exo_02_static_peers_work_without_multicast_and_beside_mdns(hosts: Hosts) -> None:
    hosts.lab.multicast(2, False)
    a, b = hosts.speaker(0), hosts.speaker(1)
    isolated = hosts.speaker(2, peers=[f"{hosts.lab.ip(0)}:7600"])
    assert isolated.wait_for(connected(0))["peer"] == f"{hosts.lab.ip(0)}:7600"
    a.wait_for(connected(1))
    b.wait_for(connected(0))


def test_exo_02_static_peers_work_with_mdns_off_whoever_starts_first(hosts: Hosts) -> None:
    peer = f"{hosts.lab.ip(1)}:7600"
    a = hosts.speaker(0, mdns=False, peers=[peer])
    a.wait_for(lambda line: line["event"] == "candidate")
    hosts.speaker(1, mdns=False)
    a.wait_for(connected(1))


def test_pet_05_ipv6_without_a_route_does_not_stop_ipv4(hosts: Hosts) -> None:
    hosts.speaker(1, mdns=False)
    a = hosts.speaker(0, mdns=False, peers=["[fd99::7]:7600", f"{hosts.lab.ip(1)}:7600"])
    a.wait_for(connected(1))


def test_stk_18_host_without_any_route_still_reaches_static_peers_later(hosts: Hosts) -> None:
    hosts.lab.configure(0, "addr flush dev eth0")
    a = hosts.speaker(0, peers=[f"{hosts.lab.ip(1)}:7600"])
    up = a.wait_for(lambda line: line["event"] == "up")
    assert up["ip"] == "127.0.0.1"
    assert "no usable network interface" in str(up["warning"])
    hosts.speaker(1)
    hosts.lab.configure(0, f"addr add {hosts.lab.ip(0)}/24 brd + dev eth0")
    a.wait_for(connected(1))


def test_stk_13_changed_address_is_announced(hosts: Hosts) -> None:
    a, b = hosts.speaker(0, look_s=0.5), hosts.speaker(1)
    b.wait_for(connected(0))
    hosts.lab.configure(0, "addr flush dev eth0", "addr add 10.77.0.99/24 brd + dev eth0")
    assert a.wait_for(lambda line: line["event"] == "moved")["ip"] == "10.77.0.99"
    b.wait_for(lambda line: line["event"] == "candidate" and line["endpoint"] == "10.77.0.99:7600")


def test_exo_08_fast_real_interface_is_chosen_beside_docker_and_dead_ones(hosts: Hosts) -> None:
    hosts.lab.configure(
        0,
        "link add docker0 type bridge",
        "addr add 172.17.0.1/16 dev docker0",
        "link set docker0 up",
        "link add aaa0 type veth peer name aaa1",
        "addr add 10.1.0.1/24 dev aaa0",
        "link add tun7 type veth peer name tun8",
        "addr add 10.2.0.1/24 dev tun7",
        "link set tun7 up",
        "link set tun8 up",
    )
    a = hosts.speaker(0)
    assert a.wait_for(lambda line: line["event"] == "up")["ip"] == hosts.lab.ip(0)
    hosts.speaker(1).wait_for(connected(0))


def test_stk_16_link_local_only_network_works(hosts: Hosts) -> None:
    for host in range(2):
        hosts.lab.configure(
            host,
            "addr flush dev eth0",
            f"addr add fe80::{host + 1}/64 dev eth0 nodad",
            # The same network on a second interface, so that the scope matters.
            "link add zzz0 type veth peer name zzz1",
            "link set zzz0 addrgenmode none",
            "link set zzz1 addrgenmode none",
            "link set zzz0 up",
            "link set zzz1 up",
        )
    a, b = hosts.speaker(0, bind="eth0"), hosts.speaker(1, bind="eth0")
    assert a.wait_for(lambda line: line["event"] == "up")["ip"] == "fe80::1%eth0"
    assert "fe80::2%" in str(a.wait_for(connected(1))["endpoint"])
    b.wait_for(connected(0))


def test_node_behind_a_cut_cable_is_found_after_it_is_mended(hosts: Hosts) -> None:
    hosts.lab.cut(1, silent=True)
    a, b = hosts.speaker(0), hosts.speaker(1)
    a.say("alone")
    a.wait_for(lambda line: line["event"] == "alone")
    hosts.lab.heal(1)
    a.wait_for(connected(1))
    b.wait_for(connected(0))


@pytest.mark.parametrize("first", ["loopback", "network"])
def test_node_on_the_loopback_address_hears_nothing_of_the_network(hosts: Hosts, first: str) -> None:
    made = {"loopback": {"bind": "127.0.0.1", "port": 7700, "node": "d" * 16}, "network": {}}
    speakers = {name: hosts.speaker(0, **made[name]) for name in sorted(made, key=lambda each: each != first)}
    alone, neighbour = speakers["loopback"], speakers["network"]
    hosts.speaker(1)
    neighbour.wait_for(connected(1))
    assert not [line for line in alone.everything() if line["event"] == "candidate"]
