"""Whether two nodes suit each other, and the sentence that both are shown when they do not.

The rules, in the order in which they are checked:

1. The same instance: a node that has met itself; known silently, never refused.
2. The same protocol number. The release may differ (a warning); the number changes with every change of the
   wire.
3. The same fleet: two fleets on one network live beside each other.
4. Another node id: the same id from a second living instance is a copied state directory.
5. The same number of shards, the same fingerprint (config, source index, split, encodings, tokenizer), and
   the same sample of every file of the checkpoint that the shards of both were read from.
"""

from __future__ import annotations

from typing import Final

from cascadia_p2p.wire.messages import Introduction, OtherVersion, Refusal, RefusalCode

ENDING: Final = frozenset({RefusalCode.VERSION, RefusalCode.MODEL, RefusalCode.IDENTITY})
"""Refusals that end a newcomer when they come from an open ring; another fleet's ring ends nobody."""

_RULE: Final = "the nodes of a ring need the same protocol number"


def label(who: Introduction) -> str:
    """How a node is named to people: host and the start of its id, since a machine may run several."""
    return f"{who.host or 'a node'}/{who.node[:8]}"


def is_self(own: Introduction, other: Introduction) -> bool:
    """Whether `other` is this very process, met over one of its own addresses."""
    return own.instance == other.instance and own.node == other.node


def check(own: Introduction, other: Introduction, *, serving: bool) -> Refusal | None:
    """What is wrong between the two, as the message for the other; None when they suit.

    Args:
        own: this node.
        other: the node that introduced itself, not this one.
        serving: this node's ring is open.
    """
    fault = _fault(own, other)
    return None if fault is None else refusal(own, *fault, serving=serving)


def refusal(own: Introduction, code: RefusalCode, message: str, *, serving: bool) -> Refusal:
    """A refusal in this node's name."""
    return Refusal(
        node=own.node,
        instance=own.instance,
        code=code,
        message=message[:4096],
        serving=serving,
        software=own.software,
        protocol=own.protocol,
    )


def other_version(own: Introduction, other: OtherVersion, source: str) -> str:
    """The sentence for a greeting whose protocol can not be read further.

    Args:
        own: this node.
        other: what could be read.
        source: the address that it came from.
    """
    return (
        f"{label(own)} runs cascadia-p2p {own.software} (protocol {own.protocol}) and the node at {source} "
        f"runs cascadia-p2p {other.software or 'of an unknown version'} (protocol {other.protocol}): "
        f"{_RULE}; install the same release on both"
    )


def mixed_software(own: Introduction, other: Introduction) -> str | None:
    """A warning when two nodes that suit run different releases; None when they run the same."""
    if own.software == other.software:
        return None
    return (
        f"{label(own)} runs cascadia-p2p {own.software} and {label(other)} runs {other.software}; both "
        f"speak protocol {own.protocol} and may join, but one release everywhere is what is tested"
    )


def mixed_numbers(own: Introduction, other: Introduction) -> str | None:
    """A warning when two nodes that suit compute or keep numbers in different ways; None when they do not."""
    differ = [
        f"--{name} {mine} on {label(own)} and {theirs} on {label(other)}"
        for name in ("precision", "cache")
        if (mine := getattr(own, name)) and (theirs := getattr(other, name)) and mine != theirs
    ]
    if not differ:
        return None
    return (
        f"{', '.join(differ)}: they may join, but which of them computes a shard then changes answers; start "
        "all nodes of a ring alike"
    )


def clone(own: Introduction, kept: Introduction, other: Introduction, *, serving: bool) -> Refusal:
    """The refusal for a second living instance of a node id.

    Args:
        own: this node, who refuses.
        kept: the instance that was here first and still speaks.
        other: the instance that came later.
        serving: this node's ring is open.
    """
    return refusal(
        own,
        RefusalCode.IDENTITY,
        f"node id {other.node} is in use by {label(kept)} (instance {kept.instance}, process {kept.pid} at "
        f"{kept.control}) and by {label(other)} (instance {other.instance}, process {other.pid} at "
        f"{other.control}): a state directory was copied; give one of them another --state-dir",
        serving=serving,
    )


def replaced(own: Introduction, other: Introduction, *, serving: bool) -> Refusal:
    """The refusal for an instance that a newer one has replaced, or that has said goodbye."""
    return refusal(
        own,
        RefusalCode.IDENTITY,
        f"instance {other.instance} of node {label(other)} has left or was replaced by a newer one; restart "
        "it to join again",
        serving=serving,
    )


def _fault(own: Introduction, other: Introduction) -> tuple[RefusalCode, str] | None:
    here, there = label(own), label(other)
    if own.protocol != other.protocol:
        return RefusalCode.VERSION, (
            f"{here} runs cascadia-p2p {own.software} (protocol {own.protocol}) and {there} runs "
            f"cascadia-p2p {other.software} (protocol {other.protocol}): {_RULE}; install the same release "
            "on both"
        )
    if own.fleet != other.fleet:
        return RefusalCode.FLEET, (
            f"{here} belongs to fleet '{own.fleet}' and {there} to fleet '{other.fleet}': two fleets never "
            "join; start both with the same --fleet if they should"
        )
    if own.node == other.node:
        return RefusalCode.IDENTITY, clone(own, own, other, serving=False).message
    if own.shards != other.shards:
        return RefusalCode.MODEL, (
            f"model '{own.model}' on {here} is split into {own.shards} shards and '{other.model}' on "
            f"{there} into {other.shards}: one ring needs one export; copy the shards of the same export, "
            "or use another --fleet"
        )
    if own.fingerprint != other.fingerprint:
        return RefusalCode.MODEL, (
            f"{here} holds model '{own.model}' with fingerprint {own.fingerprint[:16]} and {there} holds "
            f"'{other.model}' with {other.fingerprint[:16]}: weights, split, encodings or tokenizer differ, "
            "and one ring needs one export; copy the shards of the same export, or use another --fleet"
        )
    for number, (mine, theirs) in enumerate(zip(own.sources, other.sources, strict=False), 1):
        if mine and theirs and mine != theirs:
            return RefusalCode.MODEL, (
                f"{here} and {there} hold '{own.model}' of one config but of other weights: file {number} of "
                f"{len(own.sources)} of the checkpoint was {mine} on {here} and {theirs} on {there}; export "
                "both from the same checkpoint, or use another --fleet"
            )
    return None
