"""The one typed configuration of all commands, and where each of its values came from.

Order of precedence: flag, environment variable (`CASCADIA_*`), TOML file (`--config`), default. Text from
flags and the environment is read leniently (`0`, `off`, `no` and `false` all switch a thing off); TOML values
must have the right type. An empty variable counts as unset. Paths in a TOML file start at the file.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

import platformdirs
import psutil
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from cascadia_p2p.errors import UsageError
from cascadia_p2p.types import Endpoint

__all__ = ["APP", "Config", "Limits", "add_flags", "find_model", "flags_of", "load_config"]

APP = "cascadia-p2p"
"""The name under which the user's directories hold our files."""

_PREFIX = "CASCADIA_"
_FLEET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_Build = Callable[[], "Config"]


def _fleet(value: object) -> object:
    if isinstance(value, str) and not _FLEET.fullmatch(value):
        raise ValueError(
            f"'{value}' is not a fleet's name: expected 1 to 63 letters, digits, dots, dashes, underscores, "
            "a letter or digit first"
        )
    return value


def _endpoint(value: object) -> Endpoint:
    if isinstance(value, Endpoint):
        return value
    if not isinstance(value, str):
        raise ValueError("expected text like 192.168.1.20:7600")
    try:
        return Endpoint.parse(value)
    except UsageError as error:
        raise ValueError(str(error)) from error


def _optional_endpoint(value: object) -> Endpoint | None:
    return None if value is None else _endpoint(value)


def _peers(value: object) -> tuple[Endpoint, ...]:
    if isinstance(value, str):
        value = value.replace(",", " ").split()
    if not isinstance(value, list | tuple):
        raise ValueError("expected a list of addresses like 192.168.1.20:7600")
    if len(value) > _MAX_PEERS:
        raise ValueError(f"{len(value)} addresses: expected at most {_MAX_PEERS}")
    return tuple(dict.fromkeys(_endpoint(item) for item in value))


def _path(value: object) -> Path | None:
    if value is None or isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("expected the name of a file or directory")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ValueError("expected the name of a file or directory, and '~' names no user here") from None


def _bind(value: object) -> object:
    if value in ("0.0.0.0", "::", "*"):
        raise ValueError(
            f"'{value}' means every interface, and a node announces one address: "
            "give one of its addresses or the name of one interface"
        )
    return value


def _device(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _physical_cores() -> int:
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


_MAX_PEERS = 1024
_Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
_OptionalPath = Annotated[Path | None, PlainValidator(_path)]


_PARTIAL = {"partial": True}
"""Validation context of one source alone: values are compared with each other only after the join."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)


class Limits(_Section):
    """Time limits in seconds."""

    heartbeat_s: _Seconds = Field(0.1, description="between two heartbeats to a neighbour")
    suspect_s: _Seconds = Field(0.6, description="silence after which nothing new is admitted")
    gone_s: _Seconds = Field(2.0, description="silence after which a node is lost")
    stuck_s: _Seconds = Field(5.0, description="least time without progress after which a node is stuck")
    settle_s: _Seconds = Field(1.0, description="quiet time without a newcomer before shards are assigned")
    alone_s: _Seconds = Field(10.0, description="time alone after which a node says so")
    queue_wait_s: _Seconds = Field(600.0, description="longest wait of a request in an open ring's queue")
    recovery_s: _Seconds = Field(
        900.0, description="longest wait of a request for a ring: for a lost node, or another in its place"
    )
    drain_s: _Seconds = Field(
        60.0, description="longest time that a node which is asked to end goes on with what runs"
    )

    @model_validator(mode="after")
    def _ordered(self, info: ValidationInfo) -> Self:
        if info.context is not _PARTIAL and not self.heartbeat_s < self.suspect_s < self.gone_s:
            raise ValueError(
                f"heartbeat_s ({self.heartbeat_s}), suspect_s ({self.suspect_s}) and gone_s ({self.gone_s}) "
                "must grow in this order"
            )
        return self


class Config(_Section):
    """All settings of all commands; frozen. `source(name)` tells where a value came from."""

    model: _OptionalPath = Field(None, description="directory of the exported model, or of one of its shards")
    shard: int | None = Field(
        None, ge=0, le=4095, description="index of the shard to hold (default: assigned)"
    )
    fleet: Annotated[str, BeforeValidator(_fleet)] = Field(
        "cascadia",
        description="name of the fleet; nodes of other fleets are ignored",
    )
    bind: Annotated[str | None, BeforeValidator(_bind)] = Field(
        None, min_length=1, max_length=255, description="address or interface name to bind and announce"
    )
    port: int = Field(
        7600, ge=0, le=65534, description="control port; data is the next one; 0 means any free port"
    )
    client_port: int = Field(
        7700, ge=0, le=65535, description="port for clients, bound by the serving head only"
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="serve counters for Prometheus on this port (default: not at all)"
    )
    metrics_bind: str = Field(
        "127.0.0.1",
        min_length=1,
        max_length=255,
        description="address for --metrics-port; what is served there is neither encrypted nor guarded",
    )
    peers: Annotated[tuple[Endpoint, ...], PlainValidator(_peers)] = Field(
        (), description="control address of another node, as HOST:PORT; may be repeated"
    )
    mdns: bool = Field(True, description="find nodes by mDNS")
    device: Annotated[str, BeforeValidator(_device)] = Field(
        "CPU",
        pattern=r"^[A-Z]+(\.[0-9]+)?$",
        description="where the matrices are computed: CPU, GPU, GPU.1, ...",
    )
    precision: Literal["exact", "fine", "fast"] = Field(
        "fine",
        description="of activations in products: exact is FP32, fine two 8-bit planes, fast one; weights "
        "that are stored as FP32 are always multiplied exactly",
    )
    cache: Literal["f32", "bf16"] = Field(
        "f32", description="how keys and values are kept: bf16 takes half the memory and rounds them"
    )
    slots: int = Field(16, ge=1, le=4096, description="streams at once")
    context: int = Field(2048, ge=1, le=1 << 24, description="positions a stream, at most the model's own")
    prefixes: int = Field(
        16, ge=0, le=65535, description="prompts' beginnings to keep for later requests; 0 keeps none"
    )
    rows: int = Field(64, ge=1, le=4096, description="rows a frame")
    queue: int = Field(256, ge=0, le=1_000_000, description="requests that may wait")
    threads: int = Field(
        default_factory=_physical_cores,
        ge=1,
        le=4096,
        description="compute threads (default: physical cores)",
    )
    state_dir: _OptionalPath = Field(
        None, description="directory for the node id, the lock and scratch files"
    )
    log_format: Literal["console", "json"] | None = Field(
        None, description="console or json (default: console on a terminal)"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severity logged"
    )
    endpoint: Annotated[Endpoint | None, PlainValidator(_optional_endpoint)] = Field(
        None, description="the head node's client address (default: found by mDNS)"
    )
    key: _OptionalPath = Field(
        None,
        description="key file: the fleet's for nodes, or a client's (default: beside the shards, else the "
        "user's own)",
    )
    insecure: bool = Field(
        False, description="without a key, speak in the clear beyond this PC; everybody there can take part"
    )
    timeout: _Seconds = Field(600.0, description="seconds a client command waits for its answer")
    limits: Limits = Limits()

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def source(self, name: str) -> str:
        """Where the value of `name` (`port`, `limits.gone_s`) came from, as in `flag --port`."""
        if name in self._sources:
            return self._sources[name]
        if name not in _PATHS:
            raise KeyError(name)
        return "argument" if name in self.model_fields_set else "default"

    @property
    def state_root(self) -> Path:
        """The state directory: as configured, else the user's own."""
        return self.state_dir or platformdirs.user_state_path(APP)

    @model_validator(mode="after")
    def _ports_apart(self, info: ValidationInfo) -> Self:
        if info.context is not _PARTIAL and self.port and self.client_port in (self.port, self.port + 1):
            raise ValueError(
                f"client_port {self.client_port} is taken: port {self.port} means control on {self.port} "
                f"and data on {self.port + 1}"
            )
        taken = {self.port, self.port + 1 if self.port else 0, self.client_port} - {0}
        if info.context is not _PARTIAL and self.metrics_port in taken:
            raise ValueError(
                f"metrics_port {self.metrics_port} is taken: control, data and clients have "
                f"{', '.join(map(str, sorted(taken)))}"
            )
        return self


def _paths() -> dict[str, tuple[str, ...]]:
    top: dict[str, tuple[str, ...]] = {name: (name,) for name in Config.model_fields if name != "limits"}
    return top | {f"limits.{name}": ("limits", name) for name in Limits.model_fields}


_PATHS = _paths()
_VARIABLES = {_PREFIX + "_".join(path).upper(): name for name, path in _PATHS.items()}


def load_config(
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Config:
    """Read the configuration from all its sources.

    Args:
        flags: the command line's values by field name (text, number, list of texts); None means not given.
        environ: the environment, by default this process's own.
        file: the TOML file of `--config`; without it `CASCADIA_CONFIG` is looked at.

    Raises:
        UsageError: an unknown key, a wrong type or a value out of range, named with its source.
    """
    environ = os.environ if environ is None else environ
    named_by = "flag --config"
    if file is None and environ.get(_PREFIX + "CONFIG"):
        file, named_by = Path(environ[_PREFIX + "CONFIG"]), f"environment {_PREFIX}CONFIG"
    given = _Given()
    if file is not None:
        given.add_file(file, named_by)
    given.add_environment(environ)
    given.add_flags(flags or {})
    return given.build()


class _Given:
    """What the sources hold, each later one replacing the earlier ones' values."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}
        self._sources: dict[str, str] = {}

    def add_file(self, path: Path, named_by: str) -> None:
        try:
            path = path.expanduser()
        except RuntimeError:
            raise UsageError(f"{path}, named by {named_by}, does not exist: '~' names no user here") from None
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UsageError(f"{path}, named by {named_by}, does not exist") from error
        except OSError as error:
            raise UsageError(f"{path}, named by {named_by}, can not be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{path} is not valid TOML: {error}") from error
        sources = {name: f"file {path}, key {name}" for name in _PATHS}
        parsed = _checked(
            lambda: Config.model_validate(table, strict=True, context=_PARTIAL), f"file {path}", sources
        )
        for name in _names(table):
            value = _get(parsed, name)
            if isinstance(value, Path) and not value.is_absolute():
                value = path.parent / value
            self._values[name], self._sources[name] = value, sources[name]

    def add_environment(self, environ: Mapping[str, str]) -> None:
        texts: dict[str, str] = {}
        for variable, text in environ.items():
            if not variable.startswith(_PREFIX) or variable == _PREFIX + "CONFIG" or not text:
                continue
            if variable not in _VARIABLES:
                hint = _suggest(variable, _VARIABLES)
                raise UsageError(f"environment variable {variable} is not one of this program's{hint}")
            texts[_VARIABLES[variable]] = text
        self._add_texts(texts, {name: f"environment {variable}" for variable, name in _VARIABLES.items()})

    def add_flags(self, flags: Mapping[str, object]) -> None:
        texts: dict[str, str] = {}
        for name, value in flags.items():
            if name not in _PATHS:
                raise UsageError(f"'{name}' is not a setting{_suggest(name, _PATHS)}")
            if value is not None:
                texts[name] = _text(value)
        self._add_texts(texts, {name: f"flag {_flag(name, texts.get(name))}" for name in _PATHS})

    def _add_texts(self, texts: Mapping[str, str], sources: Mapping[str, str]) -> None:
        if not texts:
            return
        for name, text in texts.items():
            # A path may be any bytes.
            if name not in ("model", "state_dir", "key") and not _is_text(text):
                raise UsageError(f"{sources[name]}: {text!a} holds bytes that are no text in UTF-8")
        nested = _nest(texts)
        parsed = _checked(
            lambda: Config.model_validate_strings(nested, context=_PARTIAL), "settings", sources
        )
        for name in texts:
            self._values[name], self._sources[name] = _get(parsed, name), sources[name]

    def build(self) -> Config:
        config = _checked(lambda: Config.model_validate(_nest(self._values)), "settings", self._sources)
        config._sources.update(self._sources)
        return config


def _checked(build: _Build, where: str, sources: Mapping[str, str]) -> Config:
    try:
        return build()
    except ValidationError as error:
        raise UsageError(_sentence(error, where, sources)) from None


def _sentence(error: ValidationError, where: str, sources: Mapping[str, str]) -> str:
    first = error.errors(include_url=False)[0]
    keys = [str(part) for part in first["loc"]]
    name = next((name for name, path in _PATHS.items() if list(path) == keys[: len(path)]), None)
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key '{'.'.join(keys)}'{_suggest('.'.join(keys), _PATHS)}"
    message = first["msg"].removeprefix("Value error, ").replace("Input should be ", "expected ")
    if name is None:
        touched = [sources[key] for key in _PATHS if key.split(".")[-1] in message.split() and key in sources]
        prefix = "" if first["type"] == "value_error" else f"'{'.'.join(keys)}': "
        return f"{'; '.join(touched) or where}: {prefix}{message}"
    if first["type"] == "value_error":
        return f"{sources.get(name, where)}: {message}"
    return f"{sources.get(name, where)}: {first['input']!r} is not right: {message[0].lower()}{message[1:]}"


def _is_text(text: str) -> bool:
    """Whether none of it stands for bytes that could not be decoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _suggest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _names(table: Mapping[str, object]) -> Iterator[str]:
    for name, path in _PATHS.items():
        inner: object = table
        for key in path:
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        if inner is not None:
            yield name


def _nest(values: Mapping[str, object]) -> dict[str, object]:
    limits = {name.split(".")[1]: value for name, value in values.items() if "." in name}
    top: dict[str, object] = {name: value for name, value in values.items() if "." not in name}
    return top | {"limits": limits} if limits else top


def _get(config: Config, name: str) -> object:
    value: object = config
    for key in _PATHS[name]:
        value = getattr(value, key)
    return value


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value)
    return str(value)


def _flag(name: str, text: str | None = None) -> str:
    if name == "peers":
        return "--peer"
    if name == "mdns":
        return "--mdns" if text == "True" else "--no-mdns"
    return "--" + name.replace("_", "-").replace(".", "-")


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Give a command the flags of these fields and `--config`, spelled alike in all commands."""
    for name in names:
        field = Config.model_fields[name]
        words = field.description or ""
        default = field.default
        if isinstance(default, str | int | float) and not isinstance(default, bool):
            words += f" (default: {default})"
        if name == "mdns":
            parser.add_argument("--mdns", action=argparse.BooleanOptionalAction, default=None, help=words)
        elif name == "insecure":
            parser.add_argument("--insecure", action="store_true", default=None, help=words)
        elif name == "peers":
            parser.add_argument("--peer", dest=name, action="append", metavar="HOST:PORT", help=words)
        else:
            parser.add_argument(_flag(name), dest=name, metavar=_metavar(name), help=words)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")


_METAVARS = {
    "model": "DIR",
    "state_dir": "DIR",
    "key": "FILE",
    "fleet": "NAME",
    "bind": "ADDR",
    "metrics_bind": "ADDR",
    "device": "NAME",
    "endpoint": "tcp://HOST:PORT",
    "timeout": "SECONDS",
}


def _metavar(name: str) -> str:
    outer = get_args(Config.model_fields[name].annotation)
    choices = [arg for item in outer for arg in get_args(item) or (item,) if isinstance(arg, str)]
    return "|".join(choices) or _METAVARS.get(name, "N")


def flags_of(namespace: argparse.Namespace) -> dict[str, object]:
    """The parsed arguments that are fields of the configuration, for `load_config`."""
    return {name: value for name, value in vars(namespace).items() if name in _PATHS}


def find_model(config: Config, *, directory: Path | None = None, data: Path | None = None) -> Path:
    """The model's directory: as configured, else the current one, else the only one in the data directory.

    Args:
        config: `config.model` may name the directory or its manifest.json.
        directory: the current directory.
        data: the user's data directory for this program.

    Raises:
        UsageError: there is none, or more than one in the data directory; the sentence tells how to get one.
    """
    if config.model is not None:
        found = config.model.parent if config.model.name == "manifest.json" else config.model
        if not (found / "manifest.json").is_file():
            raise UsageError(
                f"{config.source('model')}: {found} holds no manifest.json: expected a directory that "
                "'cascadia-p2p export' wrote, or one of its shard directories"
            )
        return found
    directory = directory or Path.cwd()
    if (directory / "manifest.json").is_file():
        return directory
    data = data or platformdirs.user_data_path(APP)
    models = sorted(path.parent for path in (data / "models").glob("*/manifest.json"))
    if len(models) == 1:
        return models[0]
    if models:
        listed = ", ".join(str(path) for path in models)
        raise UsageError(f"several models are installed ({listed}): choose one with --model DIR")
    raise UsageError(
        f"no model: no manifest.json in {directory}, and nothing in {data / 'models'}. Give --model DIR; "
        "'cascadia-p2p export CHECKPOINT OUT --shards N' makes such a directory from a checkpoint"
    )
