"""A plan as JSON values; the same facts that the command prints as text."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from cascadia_p2p.engine.footprint import RULES, Backend
from cascadia_p2p.planning.machine import Machine
from cascadia_p2p.planning.plan import Plan, PlannedStage
from cascadia_p2p.planning.predict import Prediction


def as_json(plan: Plan) -> dict[str, JsonValue]:
    """Everything in a plan. All sizes are bytes, all times seconds, all rates tokens a second.

    Keys: model, demand, rules (bytes a weight, with sources), fits, problem, advice, split, nodes, options
    (slots that so many equal PCs hold, and the fewest PCs for all slots, by backend), read (one token, by
    kind), left_out, standby, needed, predictions.
    """
    demand, promise = plan.demand, plan.demand.promise
    footprint = demand.footprint
    return {
        "model": {
            "family": plan.sizes.family,
            "layers": len(plan.sizes.layers),
            "hidden": plan.sizes.hidden,
            "weights": plan.sizes.weights,
        },
        "demand": {
            "slots": promise.slots,
            "context": promise.context,
            "rows": promise.rows,
            "prefixes": promise.kept,
            "backend": footprint.backend.value,
            "experts": footprint.experts.value,
            "projections": footprint.projections.value,
            "head": footprint.head.value,
            "embedding": footprint.embedding.value,
            "cache": footprint.cache.value,
            "streams": plan.streams,
        },
        "rules": _rules(footprint.backend),
        "fits": plan.fits,
        "problem": plan.problem,
        "advice": list(plan.advice),
        "split": list(plan.split),
        "nodes": [_stage(stage) for stage in plan.stages],
        "options": [
            {
                "backend": each.backend.value,
                "gpu_limit": each.gpu,
                "lean": each.lean,
                "slots": each.slots,
                "fewest_nodes": each.fewest,
                "planned": each.planned,
            }
            for each in plan.options
        ],
        "read": _counts(plan.read),
        "left_out": [
            {"node": each.name, "tokens_s_with": each.before, "tokens_s_without": each.after, "why": each.why}
            for each in plan.left_out
        ],
        "standby": list(plan.standby),
        "needed": plan.needed,
        "predictions": [_prediction(each) for each in plan.predictions],
    }


def _rules(backend: Backend) -> JsonValue:
    return {
        form.value: {"weight": rule.weight, "output": rule.output, "least": rule.least, "source": rule.source}
        for (each, form), rule in RULES.items()
        if each is backend
    }


def _stage(stage: PlannedStage) -> JsonValue:
    need = stage.need
    return {
        "node": stage.machine.name,
        "first_layer": stage.layers.start,
        "layers": len(stage.layers),
        "weights": _counts({str(part): count for part, count in need.weights.items()}),
        "caches": need.caches,
        "prefix": need.prefix,
        "buffers": need.buffers,
        "reserve": need.reserve,
        "total": need.total,
        "gpu": need.gpu,
        "mapped": need.mapped,
        "memory": _machine(stage.machine),
        "lack": stage.lack,
        "read": stage.read,
        "frame_s": stage.seconds,
        "tokens_s_without": stage.without,
    }


def _machine(machine: Machine) -> JsonValue:
    return {"shown": machine.shown, "usable": machine.usable, "gpu_limit": machine.gpu}


def _counts(counts: Mapping[str, int]) -> dict[str, JsonValue]:
    return dict(counts.items())


def _prediction(each: Prediction) -> JsonValue:
    hop = None if each.slowest_hop is None else each.hops[each.slowest_hop]
    return {
        "streams": each.streams,
        "rows": each.rows,
        "frames": each.frames,
        "tokens_s": each.tokens_s,
        "round_s": each.round_s,
        "trip_s": each.trip_s,
        "stages_s": list(each.stages),
        "hops_s": [one.seconds for one in each.hops],
        "slowest_node": each.slowest,
        "slowest_hop": None if hop is None else [hop.sender, hop.receiver],
        "limit": each.limit,
    }
