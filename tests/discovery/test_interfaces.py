from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from cascadia_p2p.discovery.interfaces import (
    Address,
    Interface,
    _virtual,
    choose_address,
    list_interfaces,
    route_to,
    unreachable_sentence,
)
from cascadia_p2p.discovery.watch import Change, NetworkWatch
from cascadia_p2p.errors import UsageError
from cascadia_p2p.types import Endpoint

LO = Interface("lo", ("127.0.0.1", "::1"), virtual="loopback")
DOCKER = Interface("docker0", ("172.17.0.1",), 10000, virtual="containers")
CABLE = Interface("eth0", ("10.0.0.1", "fd00::1", "fe80::1%eth0"), 1000)
FAST = Interface("eth1", ("10.0.1.1",), 10000)
WIFI = Interface("wlan0", ("10.0.2.1",), 20000, wireless=True)
UNPLUGGED = Interface("eth2", ("10.0.3.1",), 40000, up=False)


def down(interface: Interface) -> Interface:
    return dataclasses.replace(interface, up=False)


@pytest.mark.parametrize(
    ("interfaces", "expected"),
    [
        ([LO, CABLE, WIFI], "10.0.0.1"),
        ([WIFI, CABLE, FAST, UNPLUGGED], "10.0.1.1"),
        ([WIFI, UNPLUGGED], "10.0.2.1"),
        ([DOCKER, CABLE], "10.0.0.1"),
        ([Interface("b", ("10.0.0.2",)), Interface("a", ("10.0.0.3",))], "10.0.0.3"),
        ([Interface("a", ("169.254.1.1",)), WIFI], "10.0.2.1"),
        ([Interface("a", ("fd00::2",), 10000), CABLE], "10.0.0.1"),
        ([Interface("a", ("fe80::2%a", "fd00::2"))], "fd00::2"),
        ([Interface("a", ("fe80::2%a",))], "fe80::2%a"),
        ([Interface("a", ("10.0.0.9", "10.0.0.8"))], "10.0.0.9"),
    ],
)
def test_exo_08_cable_before_wifi_and_fast_before_slow(interfaces: list[Interface], expected: str) -> None:
    address = choose_address(None, interfaces)
    assert address.ip == expected
    assert not address.warning


def test_stk_14_docker_is_never_announced() -> None:
    address = choose_address(None, [LO, DOCKER, UNPLUGGED])
    assert address.ip == "127.0.0.1"
    assert "docker0 is containers; eth2 is down" in address.warning
    assert "--bind" in address.warning


def test_nothing_at_all_gives_loopback_with_a_warning() -> None:
    assert choose_address(None, []).warning.startswith("no usable network interface: using 127.0.0.1")


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("docker0", Address("172.17.0.1", "docker0")),
        ("172.17.0.1", Address("172.17.0.1", "docker0")),
        ("eth0", Address("10.0.0.1", "eth0")),
        ("fd00::1", Address("fd00::1", "eth0")),
        ("fe80::1", Address("fe80::1%eth0", "eth0")),
        ("127.0.0.1", Address("127.0.0.1", "lo")),
        ("127.0.0.9", Address("127.0.0.9", "loopback")),
    ],
)
def test_bind_takes_an_address_or_an_interface_of_any_kind(bind: str, expected: Address) -> None:
    assert choose_address(bind, [LO, DOCKER, CABLE]) == expected


@pytest.mark.parametrize("bind", ["eth9", "10.9.9.9", "nonsense", ""])
def test_wrong_bind_lists_what_there_is(bind: str) -> None:
    with pytest.raises(UsageError, match=r"it has lo .*docker0 \(172\.17\.0\.1\)"):
        choose_address(bind, [LO, DOCKER])
    with pytest.raises(UsageError, match="no address"):
        choose_address("eth0", [Interface("eth0", ())])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lo", "loopback"),
        ("docker0", "containers"),
        ("br-5f2a", "containers"),
        ("veth12ab", "containers"),
        ("virbr0", "virtual machines"),
        ("tun0", "a tunnel"),
        ("tap3", "a tunnel"),
        ("wg0", "a tunnel"),
        ("utun4", "a tunnel"),
        ("tailscale0", "a tunnel"),
        ("awdl0", "virtual"),
        ("Hyper-V Virtual Ethernet Adapter", "virtual machines"),
        ("eth0", ""),
        ("enp3s0", ""),
        ("wlp2s0", ""),
        ("br0", ""),
        ("en0", ""),
        ("Intel(R) Ethernet Connection", ""),
    ],
)
def test_stk_14_kinds_by_name(tmp_path: Path, name: str, reason: str) -> None:
    assert _virtual(name, ["10.0.0.1"], tmp_path / name) == reason


def test_stk_14_kinds_by_what_the_system_says(tmp_path: Path) -> None:
    def interface(name: str, **files: str) -> str:
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
        return _virtual(name, ["10.0.0.1"], tmp_path / name)

    assert interface("corp", tun_flags="0x1002") == "a tunnel"
    assert interface("mesh", uevent="DEVTYPE=wireguard\n") == "a tunnel"
    assert interface("point", type="512") == "not Ethernet"
    assert interface("net1", type="1") == ""
    for name in ("br0", "br1"):
        (tmp_path / name / "bridge").mkdir(parents=True)
        (tmp_path / name / "brif").mkdir()
    (tmp_path / "br1" / "brif" / "net2").mkdir()
    (tmp_path / "net2" / "device").mkdir(parents=True)
    assert _virtual("br0", ["10.0.0.1"], tmp_path / "br0") == "a bridge without a real port"
    assert _virtual("br1", ["10.0.0.1"], tmp_path / "br1") == ""


def test_this_machine_has_a_loopback_interface() -> None:
    loopback = [each for each in list_interfaces() if "127.0.0.1" in each.addresses]
    assert [each.virtual for each in loopback] == ["loopback"]


def test_dll_14_connection_errors_tell_address_interface_reason_and_hint() -> None:
    sentence = unreachable_sentence(Endpoint("127.0.0.1", 9), "connection refused", [LO])
    assert "127.0.0.1:9 can not be reached from 127.0.0.1 (lo): connection refused" in sentence
    assert "nothing listens on port 9" in sentence
    silent = unreachable_sentence(Endpoint("127.0.0.1", 9), "timed out", [LO])
    assert "TCP port 9 is open in its firewall" in silent


@pytest.mark.skipif(sys.platform != "linux", reason="240.0.0.0/4 has no route on Linux")
def test_dll_14_no_route_is_said_with_the_own_addresses() -> None:
    assert route_to(Endpoint("255.255.255.255", 9)) is None
    sentence = unreachable_sentence(Endpoint("255.255.255.255", 9), "network is unreachable", [CABLE])
    assert "no route" in sentence
    assert "eth0 (10.0.0.1" in sentence


def watch(bind: str | None, *interfaces: Interface) -> NetworkWatch:
    return NetworkWatch(bind, choose_address(bind, interfaces))


def looks(watch: NetworkWatch, *rounds: list[Interface]) -> list[Change]:
    return [watch.look(interfaces, float(at), float(at)) for at, interfaces in enumerate(rounds)]


def test_stk_13_another_address_is_followed_after_two_looks() -> None:
    renewed = Interface("eth0", ("10.0.0.77",), 1000)
    follower = watch(None, LO, CABLE)
    assert looks(follower, [CABLE], [renewed], [renewed]) == [Change.NONE, Change.NONE, Change.MOVED]
    assert follower.address == Address("10.0.0.77", "eth0")


def test_stk_13_a_lease_that_is_renewed_moves_nobody() -> None:
    follower = watch(None, LO, CABLE)
    assert looks(follower, [LO, WIFI], [LO, CABLE], [LO, WIFI], [LO, CABLE]) == [
        Change.NONE,
        Change.AGAIN,
        Change.NONE,
        Change.AGAIN,
    ]


def test_stk_13_pulled_cable_keeps_the_address_and_announces_again_after() -> None:
    follower = watch(None, LO, CABLE)
    changes = looks(
        follower, [down(CABLE), LO], [down(CABLE), LO], [down(CABLE), LO], [CABLE, LO], [CABLE, LO]
    )
    assert changes == [Change.NONE, Change.NONE, Change.NONE, Change.AGAIN, Change.NONE]
    assert follower.address.ip == "10.0.0.1"


def test_stk_13_pulled_cable_moves_to_wifi_and_stays_there() -> None:
    follower = watch(None, LO, CABLE, WIFI)
    assert looks(follower, [down(CABLE), WIFI], [down(CABLE), WIFI], [CABLE, WIFI])[1:] == [
        Change.MOVED,
        Change.NONE,
    ]
    assert follower.address.ip == "10.0.2.1"


def test_a_faster_interface_that_comes_later_moves_nobody() -> None:
    assert looks(watch(None, CABLE), [CABLE, FAST], [CABLE, FAST], [CABLE, FAST]) == [Change.NONE] * 3


def test_first_network_after_a_start_without_one_is_taken() -> None:
    follower = watch(None, LO)
    assert looks(follower, [LO], [LO, CABLE], [LO, CABLE]) == [Change.NONE, Change.NONE, Change.MOVED]
    assert follower.address.warning == ""


def test_bind_keeps_an_address_and_follows_an_interface() -> None:
    renewed = Interface("eth0", ("10.0.0.77",))
    assert Change.MOVED not in looks(watch("10.0.0.1", CABLE), [WIFI], [renewed], [renewed], [renewed])
    assert Change.MOVED in looks(watch("eth0", CABLE), [WIFI], [renewed], [renewed])
    assert looks(watch("127.0.0.1", LO), [CABLE], [CABLE], [LO])[:2] == [Change.NONE, Change.NONE]


def test_stk_13_sleep_of_the_machine_announces_again() -> None:
    follower = watch(None, CABLE)
    assert follower.look([CABLE], 100.0, 1000.0) is Change.NONE
    assert follower.look([CABLE], 103.0, 1003.1) is Change.NONE
    assert follower.look([CABLE], 106.0, 4606.0) is Change.AGAIN
    assert follower.look([CABLE], 109.0, 4609.0) is Change.NONE
