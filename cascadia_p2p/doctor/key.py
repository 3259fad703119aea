"""Checks the fleet's key on this PC."""

from __future__ import annotations

from pathlib import Path

from cascadia_p2p.config import Config, find_model
from cascadia_p2p.discovery.interfaces import Address
from cascadia_p2p.doctor.finding import Finding, Level
from cascadia_p2p.errors import CascadiaError, UsageError
from cascadia_p2p.keys.places import find_fleet_key
from cascadia_p2p.transport.curve import Keys


def check_key(config: Config, address: Address) -> tuple[Finding, Keys | None]:
    """Whether there is a key, whether it can be used, and where it lies.

    Args:
        config: as `join` would have it.
        address: that a node would bind.
    """
    try:
        key = find_fleet_key(config.fleet, key=config.key, model=_model(config))
    except CascadiaError as error:
        what, _, advice = str(error).partition(": ")
        return Finding("key", Level.FAIL, what, advice), None
    if key is not None:
        message = f"{key.path} closes the fleet (fingerprint {key.print})"
        finding = Finding("key", Level.OK, message, facts={"file": str(key.path), "fingerprint": key.print})
        return finding, Keys(key.pair, key.server)
    if address.loopback:
        return Finding("key", Level.OK, "no key: a node would serve this PC only, in the clear"), None
    if config.insecure:
        message = "no key, and --insecure: everybody on the network could read and use the fleet"
        return Finding("key", Level.WARN, message, "make a key: 'cascadia-p2p keygen'"), None
    advice = (
        "copy fleet.key from beside another PC's shards, or make one for the first PC: 'cascadia-p2p keygen'"
    )
    return Finding("key", Level.FAIL, f"no key: a node would not serve {address.ip}", advice), None


def _model(config: Config) -> Path | None:
    try:
        return find_model(config)
    except UsageError:
        # Another check tells.
        return None
