"""What docs/planning.md says is what the planner says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from planning_world import INT4, demand, pcs, published

from cascadia_p2p.engine.footprint import RULES, Backend, Footprint
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.planning.machine import GpuMemory
from cascadia_p2p.planning.measured import read_measured
from cascadia_p2p.planning.needs import Demand, Needs
from cascadia_p2p.planning.split import fewest_stages
from cascadia_p2p.types import Promise

TEXT = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
ROWS = {
    "CPU, our kernels": (Backend.KERNELS, GpuMemory.LIFTED, False),
    "GPU, limit lifted": (Backend.OPENVINO_GPU, GpuMemory.LIFTED, False),
    "GPU, limit as shipped": (Backend.OPENVINO_GPU, GpuMemory.SHIPPED, False),
    "CPU, OpenVINO's plugin (0.77 bytes a weight)": (Backend.OPENVINO_CPU, GpuMemory.LIFTED, False),
    "CPU, OpenVINO's plugin (0.64)": (Backend.OPENVINO_CPU, GpuMemory.LIFTED, True),
}


def table(head: str) -> dict[str, list[str]]:
    """The rows of the table with this first cell, by their first cells."""
    lines = TEXT.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {head}"))
    rows: dict[str, list[str]] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
        rows[first] = rest
    return rows


def fewest(model: str, row: str, memory: str, slots: int) -> int | None:
    backend, gpu, lean = ROWS[row]
    footprint = Footprint(backend, Encoding.INT4, Encoding.INT8, Encoding.INT8, Encoding.BF16, lean)
    needs = Needs(published(model), Demand(Promise(slots, 1024, 64), footprint))
    return fewest_stages(needs.lack(pcs(1, memory, backend, gpu)[0]) <= 0)


@pytest.mark.parametrize("row", ROWS)
def test_the_numbers_of_64_gb_pcs(row: str) -> None:
    cells = table("64 GB PCs for ... slots")[row]
    for model, place, nodes in (("975b", 0, 11), ("small-276b", 4, 4)):
        counts = [fewest(model, row, "64GB", slots) for slots in (1, 64, 176)]
        assert [str(count) for count in counts] == cells[place : place + 3]
        held = re.match(r"\d+", cells[place + 3])
        most = int(held[0]) if held else 0
        assert most == 0 or (fewest(model, row, "64GB", most) or 99) <= nodes
        assert (fewest(model, row, "64GB", most + 1) or 99) > nodes


def test_the_numbers_of_other_pcs() -> None:
    for row, cells in table("PCs for 64 slots").items():
        for model, place in (("975b", 0), ("small-276b", 4)):
            counts = [fewest(model, row, f"{size}GB", 64) for size in (32, 64, 96, 128)]
            assert [str(count) for count in counts] == cells[place : place + 4]


def test_the_rules() -> None:
    rows = table("backend")
    for name, backend in (
        ("`kernels`, CPU", Backend.KERNELS),
        ("`openvino`, CPU", Backend.OPENVINO_CPU),
        ("`openvino`, GPU", Backend.OPENVINO_GPU),
    ):
        for form, cell in zip((Encoding.INT4, Encoding.INT8, Encoding.F32), rows[name], strict=False):
            number = re.match(r"[\d.]+", cell)
            assert number is not None
            assert float(number[0]) == pytest.approx(RULES[backend, form].weight, abs=5e-4)


def test_the_example_of_a_profile_is_one() -> None:
    example = re.search(r"```json\n(.*?)```", TEXT, re.S)
    assert example is not None
    (found,) = read_measured(example[1].encode(), "docs/planning.md")
    assert found.name == "pc-a"
    # The layer that is timed there is one of 975B on the GPU.
    needs = Needs(published("975b"), demand(Backend.OPENVINO_GPU))
    layer = needs.stage(range(10, 11)).weights
    assert found.times[0].weight_bytes == pytest.approx(sum(layer.values()), rel=0.005)
    assert INT4[Backend.OPENVINO_GPU] == needs.demand.footprint
