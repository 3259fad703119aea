"""What a node must have before it can live: its model, its identity, its address and its bound ports."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cascadia_p2p import __version__
from cascadia_p2p.config import Config, Limits, find_model
from cascadia_p2p.discovery.interfaces import Address, choose_address, list_interfaces
from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.identity import Identity
from cascadia_p2p.models.family import ModelConfig
from cascadia_p2p.node.answers import ModelFacts
from cascadia_p2p.node.door import Door
from cascadia_p2p.ring.profile import NodeProfile, Times
from cascadia_p2p.shards.manifest import Manifest, shard_directory
from cascadia_p2p.shards.reader import held_shards, held_sources
from cascadia_p2p.text.chat import Chat
from cascadia_p2p.text.tokenizer import Tokenizer
from cascadia_p2p.transport.control import ControlServer
from cascadia_p2p.transport.data import DataReceiver, DataTransport
from cascadia_p2p.transport.network import Network, allow_many_descriptors, listen
from cascadia_p2p.types import Endpoint, Promise
from cascadia_p2p.wire.messages import ErrorReply, encode

_WRONG_PORT = encode(
    ErrorReply.of(
        RequestError(
            ErrorCode.BAD_REQUEST,
            "this is a node's control port: send requests to the head node's client port, "
            f"{Config.model_fields['client_port'].default} unless it was moved; 'cascadia-p2p status "
            "--endpoint' with this address shows where that is",
        )
    )
)
"""What a client is told that found the wrong port."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """The exported model, as far as it is on this machine.

    Args:
        directory: of the export, or of one of its shards.
        manifest: read from there.
        config: the family's own.
        holds: shards whose directories are here.
    """

    directory: Path
    manifest: Manifest
    config: ModelConfig
    holds: tuple[int, ...]

    @classmethod
    def open(cls, directory: Path) -> LocalModel:
        """Read what is there.

        Raises:
            ShardError: there is no manifest, or it is damaged.
        """
        manifest = Manifest.load(directory)
        return cls(directory, manifest, manifest.model_config_of(), held_shards(directory))

    @property
    def name(self) -> str:
        """The model in a few words, the same on every machine."""
        return f"{self.manifest.family}, {self.config.layers} layers of {self.config.hidden}"

    @property
    def facts(self) -> ModelFacts:
        """What requests are judged by."""
        return ModelFacts(self.config.vocab_valid, frozenset(self.config.eos_ids), self.config.context)

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts can be texts."""
        return "tokenizer.json" in self.manifest.tokenizer

    def tokenizer(self, shard: int) -> Tokenizer | None:
        """The tokenizer that lies with a shard; None when the model has none.

        Raises:
            ShardError: the file is missing or damaged.
        """
        if not self.has_tokenizer:
            return None
        return Tokenizer.load(self._directory_of(shard) / "tokenizer.json")

    def chat(self, shard: int, tokenizer: Tokenizer) -> Chat:
        """How the model chats, by the files that lie with a shard."""
        return Chat.load(self._directory_of(shard), tokenizer)

    def _directory_of(self, shard: int) -> Path:
        inside = self.directory / shard_directory(shard)
        return inside if inside.is_dir() else self.directory


@dataclass(frozen=True, slots=True)
class Places:
    """Everything opened; `open` closes it again.

    Args:
        identity: the locked state directory.
        model: what there is to serve.
        address: bound and announced.
        door: whether the sockets are closed to strangers, and with which key.
        network: makes all sockets.
        control, receiver: bound.
        client_port: to be bound when this node becomes the head.
        promise: what this node offers to hold.
        metrics: listens for those who read the node's metrics; None when nobody shall.
        context_warning: a sentence to say at the start where a longer context was asked for than the model
            has; else empty.
    """

    identity: Identity
    model: LocalModel
    address: Address
    door: Door
    network: Network
    control: ControlServer
    transport: DataTransport
    receiver: DataReceiver
    client_port: int
    promise: Promise
    metrics: socket.socket | None = None
    context_warning: str = ""

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: Config) -> Iterator[Places]:
        """Open all, and close it at the end; in a running event loop.

        Raises:
            CascadiaError: there is no model, no state directory, no such address, no free port, no key where
                one is needed, or one that can not be used.
        """
        # Before anything is bound: strangers may fill a port soon after.
        allow_many_descriptors()
        model = LocalModel.open(find_model(config))
        address = choose_address(config.bind, list_interfaces())
        promise = Promise(
            config.slots, min(config.context, model.config.context), config.rows, config.prefixes
        )
        with contextlib.ExitStack() as stack:
            identity = stack.enter_context(Identity.open(config.state_root))
            door = Door.find(config, model.directory, address, identity.directory)
            network = stack.enter_context(Network(door.keys))
            control = ControlServer(network, address.ip, config.port, client_answer=_WRONG_PORT)
            stack.callback(control.close)
            transport = DataTransport(network)
            receiver = transport.bind(
                address.ip,
                config.port + 1 if config.port else 0,
                max_part=promise.rows * model.config.hidden * 4,
            )
            stack.callback(receiver.close)
            client_port = config.client_port or _free_port(address.ip)
            metrics = _listen_for_scrapers(config)
            if metrics is not None:
                stack.callback(metrics.close)
            yield cls(
                *(identity, model, address, door, network, control, transport, receiver, client_port),
                promise=promise,
                metrics=metrics,
                context_warning=_context_warning(config, model.config.context),
            )

    def profile(self, config: Config) -> NodeProfile:
        """The unchanging facts that the ring machine works with.

        Raises:
            UsageError: no shard is here, or not the one that was asked for.
        """
        manifest = self.model.manifest
        return NodeProfile(
            node=self.identity.node_id,
            instance=self.identity.instance,
            host=platform.node()[:64] or "this machine",
            software=__version__,
            fleet=config.fleet,
            model=self.model.name,
            fingerprint=manifest.fingerprint,
            sources=held_sources(self.model.directory),
            shards=manifest.shards,
            layers=manifest.layers,
            hidden=self.model.config.hidden,
            holds=self.model.holds,
            promise=self.promise,
            control=self.control.endpoint,
            data=self.receiver.endpoint,
            client=Endpoint(self.address.ip, self.client_port),
            device=config.device,
            precision=config.precision,
            cache=config.cache,
            pid=os.getpid(),
            shard=config.shard,
        )


def _context_warning(config: Config, longest: int) -> str:
    # The default is nobody's wish: many models have less.
    if config.context <= longest or (source := config.source("context")) == "default":
        return ""
    return (
        f"the model was made for {longest} positions, fewer than the {config.context} of {source}: a stream "
        f"has room for {longest} and longer requests are refused; use --context {longest}"
    )


def _listen_for_scrapers(config: Config) -> socket.socket | None:
    if config.metrics_port is None:
        return None
    return listen(config.metrics_bind, config.metrics_port, "--metrics-port", "--metrics-bind")


def _free_port(ip: str) -> int:
    """A port that nobody uses now; the head binds it when it becomes one."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((ip.partition("%")[0], 0))
        return int(probe.getsockname()[1])


def times_of(limits: Limits) -> Times:
    """The ring machine's times as the settings have them."""
    return Times(
        beat=limits.heartbeat_s,
        suspect=limits.suspect_s,
        gone=limits.gone_s,
        stuck=limits.stuck_s,
        settle=limits.settle_s,
    )
