"""`plan` on the command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import orjson
import psutil
import pytest
from fixtures.dense import MODELS, make_dense
from fixtures.exports import exact_export as export
from fixtures.gguf_files import Kind, write_gguf
from fixtures.reference import load_case
from planning_world import CONFIGS, node

from cascadia_p2p.cli import main

BIG = str(CONFIGS / "inkling-975b")
ELEVEN = ("--nodes", "11", "--memory", "64GB", "--context", "1024", "--prefixes", "0")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    code, out, _ = run(capsys, *arguments, "--json")
    found = json.loads(out)
    assert isinstance(found, dict)
    return code, found


def test_it_says_whether_975b_fits_eleven_64_gb_pcs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, BIG, *ELEVEN, "--device", "GPU", "--slots", "176")
    assert code == 4
    assert "sold with 64GB, shows 61.0 GiB, a node may use 58.0 GiB, and the GPU may take 53.0 GiB" in out
    assert re.search(r"^kernels +173 +13$", out, re.M)
    assert re.search(r"^openvino-gpu \(this plan\) +lifted +151 +13$", out, re.M)
    assert re.search(r"^openvino-gpu +shipped +none: the weights are too large +22$", out, re.M)
    assert err == (
        "cascadia-p2p: it does not fit: 9 nodes, node 1 to node 9, each lack 1.5 GiB; with 11 such PCs it "
        "would fit with --slots 151 or with --context 512; the fewest such PCs that hold it are 13\n"
    )


def test_a_plan_that_fits_says_so_and_how_to_lift_the_gpus_limit(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, BIG, *ELEVEN, "--device", "GPU", "--slots", "128")
    assert (code, err) == (0, "")
    assert "\nit fits\n" in out
    assert f"ttm.pages_limit={53 * 262144} " in out
    assert "split: 7,6,6,6,6,6,6,6,6,6,5\n" in out


def test_it_says_what_each_kept_prefix_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight blocks of five layers with a window, and inputs of convolutions; one node has seven layers."""
    asked = (BIG, *ELEVEN[:-1], "16", "--device", "GPU", "--slots", "128")
    code, out, _ = run(capsys, *asked)
    assert code == 0
    assert "\n16 kept prefixes, each 49 MiB on the node that needs most for it, beside blocks" in out
    plan = as_json(capsys, *asked)[1]
    nodes = plan["nodes"]
    assert isinstance(nodes, list)
    inputs = 3 * (5 * 2 * 16 * 128 + 2 * 8 * 128 + 6 * 2 * 6144)
    assert nodes[1]["prefix"] == 5 * 512 * 16384 + 4 * inputs
    less = as_json(capsys, *asked[:-5], "0", *asked[-4:])[1]["nodes"]
    assert isinstance(less, list)
    assert nodes[1]["caches"] - less[1]["caches"] == 16 * nodes[1]["prefix"]
    _, _, err = run(capsys, *ELEVEN[:-1], "400", BIG, "--device", "GPU", "--slots", "128")
    assert re.search(r"would fit with --prefixes \d+ or with", err)


def test_json_holds_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = as_json(capsys, BIG, *ELEVEN, "--device", "GPU", "--slots", "176")
    assert code == 4
    assert plan["fits"] is False
    nodes = plan["nodes"]
    assert isinstance(nodes, list)
    assert sum(each["layers"] for each in nodes) == 66
    for each in nodes:
        parts = sum(each["weights"].values()) + each["caches"] + each["buffers"] + each["reserve"]
        assert parts == each["total"]
        over = max(each["total"] - each["memory"]["usable"], each["gpu"] - each["memory"]["gpu_limit"])
        assert each["lack"] == max(over, 0)


def test_the_same_plan_from_a_directory_and_from_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*ELEVEN, "--slots", "64")
    assert run(capsys, BIG, *arguments) == run(capsys, f"{BIG}/config.json", *arguments)


def test_without_nodes_the_fewest_that_suffice_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = as_json(capsys, BIG, "--memory", "64GB", "--context", "1024", "--slots", "176")
    assert (code, len(plan["nodes"])) == (0, 13)  # type: ignore[arg-type]


def test_without_memory_the_pcs_are_like_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    _, plan = as_json(capsys, BIG, "--nodes", "3", "--leave", "1GiB")
    memory = plan["nodes"][0]["memory"]  # type: ignore[index]
    assert memory["shown"] == psutil.virtual_memory().total
    assert memory["usable"] == memory["shown"] - 2**30


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("planned")
    export(load_case("tiny12").build(out / "checkpoint"), out / "model", split=(5, 4, 3))
    return out / "model"


def test_an_exports_split_and_forms_are_kept(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in (exported, exported / "manifest.json", exported / "shard-01"):
        code, plan = as_json(capsys, str(source), "--memory", "1GiB", "--leave", "0MiB")
        assert code == 0
        assert plan["split"] == [5, 4, 3]
        assert plan["demand"]["experts"] == "f32"  # type: ignore[index]
        assert plan["demand"]["embedding"] == "f32"  # type: ignore[index]
    code, _, err = run(capsys, str(exported), "--experts", "int4")
    assert (code, "this export has f32" in err) == (2, True)


def test_pri_14_a_twelfth_pc_is_a_standby(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(exported), "--nodes", "4", "--memory", "1GiB", "--leave", "0MiB")
    assert code == 0
    assert "node 3 has nothing to do: it would wait as a standby" in out


def test_dll_05_too_few_pcs_for_an_export_are_refused(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, str(exported), "--nodes", "2", "--memory", "1GiB", "--leave", "0MiB")
    assert code == 4
    assert "split into 3 shards and there are 2 PCs: shard 2 would have no node" in err


def test_dense_models_and_gguf_files_are_planned_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = next(iter(MODELS.values()))
    checkpoint = make_dense(tmp_path / "checkpoint", model)
    gguf = write_gguf(tmp_path / "gguf" / "model.gguf", model)
    small = ("--nodes", "2", "--memory", "2GiB", "--leave", "0MiB", "--context", "256", "--slots", "4")
    code, plan = as_json(capsys, str(checkpoint), *small)
    assert code == 0
    assert plan["model"]["family"] == "llama"  # type: ignore[index]
    assert sum(plan["split"]) == plan["model"]["layers"]  # type: ignore[arg-type,index]
    assert as_json(capsys, str(checkpoint / "config.json"), *small) == (code, plan)
    # A file of float32 numbers is quantised as any checkpoint is, but the embedding stays as it is.
    plan["demand"]["embedding"] = "f32"  # type: ignore[index]
    plan["nodes"][0]["mapped"] *= 2  # type: ignore[index]
    for source in (gguf, gguf.parent):
        assert as_json(capsys, str(source), *small) == (code, plan)


def test_a_gguf_files_own_forms_are_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = next(iter(MODELS.values()))
    wide = replace(model, config={**model.config, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96})
    gguf = write_gguf(tmp_path / "model.gguf", wide, kind_of=lambda name, values: Kind.Q8_0)
    small = ("--nodes", "2", "--memory", "2GiB", "--leave", "0MiB", "--context", "256", "--slots", "4")
    code, plan = as_json(capsys, str(gguf), *small)
    assert (code, plan["demand"]["experts"]) == (0, "int8g32")  # type: ignore[index]
    _, plan = as_json(capsys, str(gguf), "--experts", "int4", *small)
    assert plan["demand"]["experts"] == "int4"  # type: ignore[index]


def test_profiles_give_speeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, fast = tmp_path / "one.json", tmp_path / "fast.json"
    one.write_text(node("pc", 100e9).model_dump_json())
    fast.write_bytes(orjson.dumps([node("pc", 200e9).model_dump(mode="json")]))
    big = ("--memory", "1024GiB", "--slots", "16", "--streams", "8")
    code, plan = as_json(capsys, BIG, "--profile", str(one), str(fast), *big)
    assert code == 0
    nodes = {each["node"]: each["layers"] for each in plan["nodes"]}  # type: ignore[attr-defined]
    assert set(nodes) == {"pc-1", "pc-2"}
    assert nodes["pc-2"] > nodes["pc-1"]
    streams = [each["streams"] for each in plan["predictions"]]  # type: ignore[attr-defined]
    assert streams == [1, 2, 4, 8, 16]
    code, out, _ = run(capsys, BIG, "--nodes", "11", "--profile", str(one), *big)
    assert code == 0
    assert re.search(r"^ *1 +1 +1 +\d+\.\d\d +\d+\.\d\d +the trip of \d+ ms", out, re.M)
    assert re.search(r"at 8 streams the slowest node is pc-\d+, \d+\.\d ms a frame", out)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ((BIG, "--memory", "64"), 2, "--memory '64' is no amount of memory"),
        ((BIG, "--nodes", "0", "--memory", "64GB"), 2, "--nodes is 0"),
        ((BIG, "--device", "GPU", "--backend", "kernels"), 2, "--backend kernels computes on the CPU"),
        ((BIG, "--device", "NPU"), 2, "--device NPU: what weights take there is not known"),
        ((BIG, "--streams", "99", "--slots", "4"), 2, "--streams is 99: expected 1 to 4"),
        ((BIG, "--slots", "0"), 2, "--slots"),
        ((BIG, "--profile", "/nowhere.json"), 2, "--profile /nowhere.json can not be read"),
        (("/nowhere",), 2, "/nowhere is no model: give the directory of a checkpoint"),
    ],
)
def test_wrong_flags_are_said(
    arguments: tuple[str, ...], code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = run(capsys, *arguments)
    assert (found, out) == (code, "")
    assert named in err
    assert err.startswith("cascadia-p2p: ")


def test_a_config_of_no_family_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "abacus"}')
    code, _, err = run(capsys, str(path))
    assert code == 1
    assert err.startswith(f"cascadia-p2p: {path}: ")
    assert "abacus" in err
    path.write_text("[]")
    assert run(capsys, str(path))[0] == 1


def test_pri_11_exit_code_4_for_profiles_that_lack_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.json"
    path.write_text(node("small PC", 100e9, memory_usable=2**34).model_dump_json())
    code, out, err = run(capsys, BIG, "--profile", str(path))
    assert code == 4
    assert re.search(r"it does not fit: small PC lacks \d+\.\d GiB", err)
    assert "66: 0-65" in out
