"""Checks nodes that are named or found: whether they answer, how fast the way is, and their versions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from cascadia_p2p import __version__
from cascadia_p2p.discovery.interfaces import Address, Interface, unreachable_sentence
from cascadia_p2p.discovery.mdns import Found, Mdns, Sightings
from cascadia_p2p.doctor.finding import Finding, Level
from cascadia_p2p.errors import NotAdmittedError, UnreachableError
from cascadia_p2p.node.query import Answer, ask_node, measure_node
from cascadia_p2p.transport.curve import Keys
from cascadia_p2p.types import Endpoint

_SLOW_RTT_S: Final = 5e-3
_SLOW_RATE: Final = 50e6
"""Below half a gigabit, in bytes a second."""

_CONNECT_S: Final = 1.0
_LOOK_S: Final = 1.5
_ASK_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Met:
    """A node that answered.

    Args:
        name: host and the id's first digits.
        software: its release.
        fingerprint: of its model.
        shard: that it claims, if any.
        control: where it answered.
    """

    name: str
    software: str
    fingerprint: str
    shard: int | None
    control: str


async def check_peer(
    peer: Endpoint,
    fleet: str,
    interfaces: Sequence[Interface],
    timeout_s: float = 3.0,
    keys: Keys | None = None,
) -> tuple[list[Finding], list[Met]]:
    """One named peer: control port, data port, delay and speed of the way.

    Args:
        peer: its control address.
        fleet: that a node here would join.
        interfaces: of this machine, to word what is wrong.
        timeout_s: for the first answer.
        keys: the fleet's.
    """
    try:
        answer = await measure_node(peer, timeout_s, keys)
    except NotAdmittedError as error:
        what, _, advice = f"the node at {peer} {error}".partition(": ")
        return [Finding("peer", Level.FAIL, what, advice, {"peer": str(peer)})], []
    except UnreachableError as error:
        message = unreachable_sentence(peer, str(error), interfaces)
        what, _, advice = message.partition("; ")
        return [Finding("peer", Level.FAIL, what, advice, {"peer": str(peer)})], []
    met = _met(answer.body, str(peer))
    return [_way(peer, answer, fleet), await _data_port(peer, answer)], [met] if met else []


def _way(peer: Endpoint, answer: Answer, fleet: str) -> Finding:
    facts: dict[str, JsonValue] = {"peer": str(peer), "rtt_s": answer.rtt_s, "bytes_s": answer.rate}
    speed = "unknown speed" if answer.rate is None else f"at least {answer.rate * 8 / 1e6:.0f} Mbit/s"
    theirs = answer.body.get("fleet")
    message = (
        f"{peer} answers in {answer.rtt_s * 1e3:.2f} ms, {speed}; version {answer.body.get('software')}, "
        f"fleet '{theirs}', ring {answer.body.get('state')}"
    )
    if theirs != fleet:
        return Finding(
            "peer",
            Level.FAIL,
            message,
            f"this PC would join fleet '{fleet}': change --fleet here or there",
            facts,
        )
    if answer.rtt_s > _SLOW_RTT_S:
        return Finding(
            "peer",
            Level.WARN,
            message,
            "a hop costs every token this much: use cable, one switch, and see the lines on USB and power",
            facts,
        )
    if answer.rate is not None and answer.rate < _SLOW_RATE:
        return Finding(
            "peer", Level.WARN, message, "slower than a gigabit: see that cables and switch can do it", facts
        )
    return Finding("peer", Level.OK, message, facts=facts)


async def _data_port(peer: Endpoint, answer: Answer) -> Finding:
    """Whether the port for activations can be reached, too: a firewall may let one of both through."""
    own = next((node for node in _rows(answer.body, "nodes")), {})
    try:
        data = Endpoint.parse(str(own.get("data")))
    except Exception:  # whatever another version may say here
        data = Endpoint(peer.host, peer.port + 1)
    # The address that answered is the one that is reached from here.
    data = Endpoint(peer.host, data.port)
    start = time.perf_counter()
    try:
        async with asyncio.timeout(_CONNECT_S):
            # All of a name's addresses have their turn within the limit.
            _, writer = await asyncio.open_connection(data.host, data.port, happy_eyeballs_delay=0.1)
    except (OSError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or "no answer"
        return Finding(
            "peer_data",
            Level.FAIL,
            f"{data}, the port for activations of {peer}, can not be reached: {str(reason).lower()}",
            f"open TCP port {data.port} in that PC's firewall",
            {"peer": str(peer), "data": str(data)},
        )
    writer.close()
    seconds = time.perf_counter() - start
    return Finding(
        "peer_data",
        Level.OK,
        f"{data}, its port for activations, is open ({seconds * 1e3:.2f} ms)",
        facts={"peer": str(peer), "data": str(data), "connect_s": seconds},
    )


async def check_fleet(
    address: Address, fleet: str, look_s: float = _LOOK_S, keys: Keys | None = None
) -> tuple[list[Finding], list[Met]]:
    """Nodes that announce themselves at this address.

    Args:
        address: where to listen.
        fleet: whose nodes count.
        look_s: seconds to wait for answers.
        keys: the fleet's.
    """
    news: asyncio.Queue[Found] = asyncio.Queue()
    mdns = Mdns([address], fleet, None, news.put_nowait)
    mdns.start()
    try:
        await asyncio.sleep(look_s)
        found = {each.name: each for each in mdns.known}
        sightings, problem = mdns.sightings, mdns.problem
    finally:
        await mdns.stop()
    if problem:
        return [Finding("fleet", Level.WARN, f"nodes can not be looked for by mDNS: {problem}")], []
    asked = await asyncio.gather(*(_ask(each, keys) for each in found.values()))
    met = [each for each in asked if each is not None]
    seen = _seen(fleet, list(found.values()), met, closed=keys is not None)
    return [seen, *_others(sightings)], met


async def _ask(found: Found, keys: Keys | None) -> Met | None:
    for endpoint in found.endpoints:
        try:
            return _met(await ask_node(endpoint, _ASK_S, keys), str(endpoint))
        except UnreachableError:
            continue
    return None


def _seen(fleet: str, found: Sequence[Found], met: Sequence[Met], *, closed: bool) -> Finding:
    if not found:
        return Finding("fleet", Level.OK, f"no node of fleet '{fleet}' announces itself here yet")
    shards = {each.announcement.shard for each in found if each.announcement.shard is not None}
    total = found[0].announcement.shards
    missing = sorted(set(range(total)) - shards)
    message = (
        f"{len(found)} node{'s' * (len(found) > 1)} of fleet '{fleet}' seen, {len(shards)} of {total} shards"
    )
    facts: dict[str, JsonValue] = {"nodes": [each.name for each in met], "missing_shards": list(missing)}
    apart = sum(each.announcement.closed != closed for each in found)
    if apart:
        what = "have no key, and this PC has one" if closed else "have a key, and this PC has none"
        advice = "copy fleet.key from beside the shards of a PC that has it to those that have not"
        return Finding("fleet", Level.WARN, f"{message}; {apart} of them {what}", advice, facts)
    if len(met) < len(found):
        return Finding(
            "fleet",
            Level.WARN,
            f"{message}; {len(found) - len(met)} of them can be seen but not reached",
            "open their control port (TCP) in their firewalls, and see that they have the same key: --peer "
            "tells",
            facts,
        )
    return Finding("fleet", Level.OK, message, facts=facts)


def _others(sightings: Sightings) -> list[Finding]:
    findings: list[Finding] = []
    if sightings.fleets:
        names = ", ".join(f"'{name}'" for name in sorted(sightings.fleets))
        findings.append(Finding("other_fleets", Level.OK, f"other fleets on this network: {names}"))
    if sightings.versions:
        versions = ", ".join(sorted(sightings.versions))
        findings.append(
            Finding(
                "other_versions",
                Level.WARN,
                f"nodes of another protocol version are on this network: {versions}",
                "install one version on every PC",
            )
        )
    return findings


def check_versions(met: Iterable[Met]) -> list[Finding]:
    """That all nodes that answered, and this program, are of one version, and hold one model."""
    nodes = {each.control: each for each in met}.values()
    if not nodes:
        return []
    by_version: dict[str, list[str]] = {__version__: ["this PC's program"]}
    for node in nodes:
        by_version.setdefault(node.software, []).append(node.name)
    findings = []
    if len(by_version) > 1:
        listed = "; ".join(f"{version}: {', '.join(names)}" for version, names in sorted(by_version.items()))
        findings.append(
            Finding(
                "versions",
                Level.WARN,
                f"software versions are mixed: {listed}",
                "install one version on every PC",
                {version: list(names) for version, names in by_version.items()},
            )
        )
    else:
        findings.append(
            Finding(
                "versions", Level.OK, f"all {len(nodes)} nodes and this program are version {__version__}"
            )
        )
    if len(models := {node.fingerprint for node in nodes}) > 1:
        findings.append(
            Finding(
                "models",
                Level.WARN,
                f"the nodes hold {len(models)} different models, splits or encodings",
                "give each PC a shard of the same export",
                {node.name: node.fingerprint for node in nodes},
            )
        )
    return findings


def _met(body: dict[str, JsonValue], control: str) -> Met | None:
    own = next((node for node in _rows(body, "nodes")), None)
    if own is None:
        return None
    shard = own.get("shard")
    return Met(
        name=f"{own.get('host')}/{str(own.get('node'))[:8]}",
        software=str(body.get("software")),
        fingerprint=str(body.get("fingerprint")),
        shard=shard if isinstance(shard, int) else None,
        control=str(own.get("control") or control),
    )


def _rows(body: dict[str, JsonValue], name: str) -> list[dict[str, JsonValue]]:
    rows = body.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
