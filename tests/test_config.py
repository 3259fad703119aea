from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from pydantic import ValidationError

from cascadia_p2p.config import Config, add_flags, find_model, flags_of, load_config
from cascadia_p2p.errors import UsageError
from cascadia_p2p.types import Endpoint

CONFIGS = Path(__file__).parent.parent / "configs"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(
    flags: dict[str, object] | None = None, environ: dict[str, str] | None = None, file: Path | None = None
) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(flags, environ=environ or {}, file=file)
    return str(caught.value)


def test_order_of_precedence_and_sources(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.toml", 'slots = 3\nport = 100\nshard = 1\nfleet = "file"\n[limits]\ngone_s = 4\n'
    )
    environ = {"CASCADIA_PORT": "200", "CASCADIA_SHARD": "2", "CASCADIA_LIMITS_GONE_S": "5.5", "HOME": "/x"}
    config = load_config({"shard": "7", "port": None}, environ=environ, file=file)
    assert (config.slots, config.port, config.shard, config.rows) == (3, 200, 7, 64)
    assert config.limits.gone_s == 5.5
    assert config.source("slots") == f"file {file}, key slots"
    assert config.source("port") == "environment CASCADIA_PORT"
    assert config.source("limits.gone_s") == "environment CASCADIA_LIMITS_GONE_S"
    assert config.source("shard") == "flag --shard"
    assert config.source("rows") == "default"
    with pytest.raises(KeyError):
        config.source("colour")


def test_bytes_that_are_no_text_are_refused_but_in_paths() -> None:
    assert (
        refusal({"fleet": "caf\udce9"}) == r"flag --fleet: 'caf\udce9' holds bytes that are no text in UTF-8"
    )
    assert refusal({"peers": ["caf\udce9:7600"]}).startswith("flag --peer: ")
    assert refusal(environ={"CASCADIA_ENDPOINT": "\udce9:1"}).startswith("environment CASCADIA_ENDPOINT: ")
    assert load_config({"model": "caf\udce9"}, environ={}).model == Path("caf\udce9")


def test_frozen_and_built_directly() -> None:
    config = Config(fleet="lab", peers=(Endpoint("a", 1),))
    assert config.source("fleet") == "argument"
    with pytest.raises(ValidationError):
        config.fleet = "other"


def test_config_file_named_by_environment(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", "slots = 5")
    assert load_config(environ={"CASCADIA_CONFIG": str(file)}).slots == 5
    assert "flag --config, does not exist" in refusal(file=tmp_path / "none.toml")
    assert "flag --config, does not exist: '~' names no user" in refusal(file=Path("~nosuchuserx/none.toml"))
    deep = tmp_path / "deep.toml"
    deep.write_text("fleet = " + "[" * 10_000)
    assert "deep.toml is not valid TOML" in refusal(file=deep)
    assert "environment CASCADIA_CONFIG" in refusal(environ={"CASCADIA_CONFIG": str(tmp_path / "none.toml")})


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", False), ("off", False), ("no", False), ("false", False), ("1", True), ("ON", True)],
)
def test_cas_11_flag_0_means_off(text: str, value: bool) -> None:
    assert load_config(environ={"CASCADIA_MDNS": text}).mdns is value


def test_empty_variable_counts_as_unset() -> None:
    config = load_config(environ={"CASCADIA_MDNS": "", "CASCADIA_BIND": ""})
    assert config.mdns is True
    assert config.bind is None


def test_rpc_15_same_flags_in_every_command() -> None:
    names = ("model", "peers", "mdns", "fleet", "bind", "log_format")
    argv = ["--model", "M", "--peer", "a:1", "--peer", "[::1]:2", "--no-mdns"]
    argv += ["--fleet", "f", "--bind", "eth0", "--log-format", "json"]
    results = []
    for command in ("join", "generate", "status"):
        parser = argparse.ArgumentParser(prog=command)
        add_flags(parser, *names)
        results.append(load_config(flags_of(parser.parse_args(argv)), environ={}))
    assert results[0] == results[1] == results[2]
    assert results[0].peers == (Endpoint("a", 1), Endpoint("::1", 2))
    assert results[0].mdns is False
    assert results[0].source("mdns") == "flag --no-mdns"
    assert results[0].source("peers") == "flag --peer"


def test_flag_switches_back_on_what_the_environment_switched_off() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "mdns")
    config = load_config(flags_of(parser.parse_args(["--mdns"])), environ={"CASCADIA_MDNS": "0"})
    assert config.mdns is True
    assert config.source("mdns") == "flag --mdns"


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("prot = 1", "unknown key 'prot'; did you mean 'port'?"),
        ("[limits]\ngon_s = 1", "unknown key 'limits.gon_s'; did you mean 'limits.gone_s'?"),
        ('port = "7600"', "key port: '7600' is not right: expected a valid integer"),
        ("mdns = 1", "key mdns"),
        ("peers = 1", "key peers: expected a list of addresses"),
        ('peers = ["x"]', "'x' is not an address"),
        ("fleet = 3", "key fleet"),
        ('key = "a\\u0000b"', "key key: expected the name of a file"),
        ('key = "~nobody-of-this-name/x"', "'~' names no user here"),
        ("limits = 3", "limits"),
        ("[limits]\nsuspect_s = 9", "must grow in this order"),
        ("[limits]\ngone_s = inf", "key limits.gone_s"),
        ("x =", "is not valid TOML"),
    ],
)
def test_file_errors_name_file_and_key(tmp_path: Path, toml: str, words: str) -> None:
    message = refusal(file=write(tmp_path / "c.toml", toml))
    assert words in message
    assert "c.toml" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": "abc"}, "flag --port: 'abc' is not right"),
        ({"port": "65535"}, "flag --port"),
        ({"precision": "best"}, "expected 'exact', 'fine' or 'fast'"),
        ({"cache": "int8"}, "expected 'f32' or 'bf16'"),
        ({"fleet": "a b"}, "flag --fleet: 'a b' is not a fleet's name"),
        ({"bind": "0.0.0.0"}, "a node announces one address"),
        ({"peers": ["host"]}, "flag --peer: 'host' is not an address"),
        ({"peers": ["host:0"]}, "expected 1 to 65535"),
        ({"log_format": "xml"}, "expected 'console' or 'json'"),
        ({"threads": "0"}, "flag --threads"),
        ({"timeout": "nan"}, "flag --timeout"),
        ({"port": "7699"}, "flag --port: client_port 7700 is taken"),
        ({"device": "GPU;1"}, "flag --device"),
        ({"portt": "1"}, "'portt' is not a setting; did you mean 'port'?"),
    ],
)
def test_flag_errors_name_the_flag(flags: dict[str, object], words: str) -> None:
    assert words in refusal(flags)


def test_environment_errors_name_the_variable() -> None:
    assert "CASCADIA_PROT is not one of this program's; did you mean 'CASCADIA_PORT'?" in refusal(
        environ={"CASCADIA_PROT": "1"}
    )
    assert "environment CASCADIA_MDNS: 'maybe'" in refusal(environ={"CASCADIA_MDNS": "maybe"})


def test_limits_of_two_sources_are_compared_after_the_join(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", "[limits]\nsuspect_s = 3")
    assert load_config(environ={"CASCADIA_LIMITS_GONE_S": "10"}, file=file).limits.suspect_s == 3


def test_paths_in_a_file_start_at_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", 'model = "shards"\nstate_dir = "/var/x"')
    config = load_config(environ={}, file=file)
    assert config.model == tmp_path / "shards"
    assert config.state_root == Path("/var/x")
    assert load_config({"model": "shards"}, environ={}).model == Path("shards")


def test_find_model_looks_in_order(tmp_path: Path) -> None:
    here, data = tmp_path / "here", tmp_path / "data"
    here.mkdir()
    with pytest.raises(UsageError, match="export CHECKPOINT OUT"):
        find_model(Config(), directory=here, data=data)
    installed = data / "models" / "small"
    installed.mkdir(parents=True)
    write(installed / "manifest.json", "{}")
    assert find_model(Config(), directory=here, data=data) == installed
    write(here / "manifest.json", "{}")
    assert find_model(Config(), directory=here, data=data) == here
    assert find_model(Config(model=installed / "manifest.json"), directory=here, data=data) == installed
    with pytest.raises(UsageError, match=r"nowhere holds no manifest\.json"):
        find_model(Config(model=tmp_path / "nowhere"), directory=here, data=data)
    (here / "manifest.json").unlink()
    (data / "models" / "large").mkdir()
    write(data / "models" / "large" / "manifest.json", "{}")
    with pytest.raises(UsageError, match="several models"):
        find_model(Config(), directory=here, data=data)


@pytest.mark.parametrize("name", ["fleet-of-eleven.toml", "local-ring.toml"])
def test_shipped_configs_load(name: str) -> None:
    config = load_config(environ={}, file=CONFIGS / name)
    assert config.fleet != Config().fleet
