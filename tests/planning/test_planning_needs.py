"""What a stage needs is said once: the planner's sums are those that loading checks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_world import INT4, demand, pcs, published, tiny_model

from cascadia_p2p.engine.footprint import RULES, Backend, Footprint
from cascadia_p2p.engine.load import REWIND
from cascadia_p2p.engine.memory import RESERVE, stage_memory
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.models.inkling.config import InklingConfig
from cascadia_p2p.models.inkling.memory import inkling_sizes
from cascadia_p2p.models.inkling.names import Spelling, plan_tensors
from cascadia_p2p.models.layout import TensorRole
from cascadia_p2p.models.sizes import Matrices, Part
from cascadia_p2p.planning.machine import Machine
from cascadia_p2p.planning.needs import Demand, Needs
from cascadia_p2p.planning.plan import Question, make_plan
from cascadia_p2p.sample.recipe import Recipe
from cascadia_p2p.types import Promise

promises = st.builds(Promise, st.integers(1, 300), st.integers(1, 5000), st.integers(1, 128))
footprints = st.sampled_from([*INT4.values(), Footprint()])


@settings(max_examples=60, deadline=None)
@given(promises, footprints, st.integers(0, 65), st.integers(1, 66), st.booleans())
def test_pri_10_parts_sum_to_what_loading_asks_for(
    promise: Promise, footprint: Footprint, first: int, count: int, big: bool
) -> None:
    sizes = published("975b") if big else tiny_model(66)
    layers = range(first, min(first + count, 66))
    needs = Needs(sizes, Demand(promise, footprint))
    stage = needs.stage(layers)
    asked = stage_memory(sizes, layers, promise, REWIND, footprint)
    assert sum(stage.weights.values()) == asked.weights
    assert (stage.caches, stage.buffers, stage.reserve) == (asked.caches, asked.buffers, RESERVE)
    assert stage.total == asked.total
    usable = 50 * 2**30
    gpu = 30 * 2**30 if footprint.backend.on_gpu else None
    lack = needs.lack(Machine("pc", 64 * 2**30, usable, gpu))[layers.start, layers.stop]
    assert lack == max(stage.total - usable, stage.gpu - gpu if gpu is not None else -usable)
    assert stage.gpu <= stage.total
    assert (stage.mapped > 0) == (first == 0)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 30), st.integers(1, 12), st.integers(1, 40), st.integers(1, 200), st.sampled_from(Backend)
)
def test_pri_10_a_plan_that_fits_covers_all_layers_within_every_budget(
    layers: int, nodes: int, mib: int, slots: int, backend: Backend
) -> None:
    sizes = tiny_model(layers)
    machines = tuple(
        Machine(f"pc {n}", 2**30, RESERVE + mib * 2**20, mib * 2**20 if backend.on_gpu else None)
        for n in range(nodes)
    )
    plan = make_plan(Question(sizes, demand(backend, slots, 256, 8), machines, streams=slots))
    numbers = [number for stage in plan.stages for number in stage.layers]
    assert numbers == list(range(layers))
    assert len(plan.stages) == min(nodes, layers)
    for stage in plan.stages:
        parts = [*stage.need.weights.values(), stage.need.caches, stage.need.buffers, stage.need.reserve]
        assert sum(parts) == stage.need.total
        if plan.fits:
            assert stage.need.total <= stage.machine.usable
            assert stage.machine.gpu is None or stage.need.gpu <= stage.machine.gpu
            assert not stage.lack
    if not plan.fits:
        assert any(stage.lack for stage in plan.stages)


def test_matrices_are_those_of_the_checkpoint() -> None:
    """Sizes from the config agree with the tensors that an export writes, part by part."""
    config = Recipe("sized", layers=8, experts=6, hidden=96).config()
    assert isinstance(config, InklingConfig)
    sizes = inkling_sizes(config)
    layout = plan_tensors(config, Spelling.A)

    def numbers(role: TensorRole, name: str = "") -> int:
        found = 0
        for plan in layout.tensors():
            if plan.role is role and name in plan.name:
                count = 1
                for length in plan.shape:
                    count *= length
                found += count
        return found

    def weights(part: Part) -> int:
        return sum(each.weights for each in sizes.matrices(range(8)) if each.part is part)

    assert weights(Part.ROUTED) == numbers(TensorRole.EXPERTS, ".experts.")
    assert weights(Part.SHARED) == numbers(TensorRole.EXPERTS, ".shared.")
    assert weights(Part.DENSE) == numbers(TensorRole.DENSE)
    assert weights(Part.PROJECTIONS) == numbers(TensorRole.PROJECTIONS)
    assert weights(Part.HEAD) == numbers(TensorRole.HEAD)
    assert sizes.embedding.weights == numbers(TensorRole.EMBEDDING)
    assert sum(layer.small for layer in sizes.layers) == numbers(TensorRole.SMALL, "layers.")


def test_bytes_of_the_published_model_are_those_of_its_facts() -> None:
    """One expert 31.85 MB, a sparse layer 8.2 GB, INT8 projections 130 MB a layer, the head 1.23 GB."""
    sizes = published("975b")
    footprint = INT4[Backend.KERNELS]
    expert = sum(footprint.bytes_of(Matrices(Part.ROUTED, *shape)) for shape in ((3072, 6144),) * 3)
    assert expert == pytest.approx(31.85e6, rel=1e-3)
    stage = Needs(sizes, demand(Backend.KERNELS)).stage(range(6, 12))
    assert stage.weights[Part.ROUTED] + stage.weights[Part.SHARED] == pytest.approx(6 * 8.218e9, rel=1e-3)
    assert stage.weights[Part.PROJECTIONS] == pytest.approx(6 * 130e6, rel=0.01)
    assert Needs(sizes, demand(Backend.KERNELS)).stage(range(60, 66)).weights[Part.HEAD] == pytest.approx(
        1.23e9, rel=0.01
    )
    # A global layer keeps 8 KiB a position, a sliding one 16 KiB for its window and what going back needs.
    only = Needs(sizes, demand(Backend.KERNELS, slots=1, context=8192)).stage
    history = 4 * 19 * (2 * 8 * 128 + 2 * 6144)
    assert only(range(5, 6)).caches == (64 + 8192) * 8192 + history


def test_every_rule_has_a_source_and_orders_forms_by_size() -> None:
    for backend in Backend:
        rules = [RULES[backend, form] for form in (Encoding.INT4, Encoding.INT8, Encoding.F32)]
        assert [rule.weight for rule in rules] == sorted(rule.weight for rule in rules)
        assert all(rule.source and rule.codes <= rule.weight for rule in rules)
    assert RULES[Backend.KERNELS, Encoding.INT4].weight == 0.5625
    assert 0.57 < RULES[Backend.OPENVINO_GPU, Encoding.INT4].weight < 0.59
    assert (
        RULES[Backend.OPENVINO_CPU, Encoding.INT4].least,
        RULES[Backend.OPENVINO_CPU, Encoding.INT4].weight,
    ) == (
        0.64,
        0.77,
    )


def test_stk_21_a_tensor_beyond_the_gpus_largest_allocation_is_refused_by_name() -> None:
    footprint = Footprint(Backend.OPENVINO_GPU, Encoding.INT4, Encoding.INT8, Encoding.F32, Encoding.BF16)
    question = Question(
        published("975b"),
        Demand(Promise(1, 1024, 64), footprint),
        pcs(20, "128GB", Backend.OPENVINO_GPU),
    )
    plan = make_plan(question)
    assert plan.problem.startswith("head: one tensor is 4.9 GB, and the GPU allocates at most 4.3 GB")
    # The same head as int8 is no problem, nor are 256 experts in one 4-bit constant.
    assert Needs(published("975b"), demand(Backend.OPENVINO_GPU)).too_large() is None
