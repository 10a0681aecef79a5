"""How a step of a plan runs, as steps of its derivation and back: micro-batches, and the stages of a pipeline.

    accumulate    the batch is taken in equal parts, one after the other; the gradient is the sum of theirs. It asks
                  that no row of the batch sees another (``rows_apart``), which is looked up in the operators' splits.
    stage         operators, by number, run on the devices of one stage. What they compute stays what it is; it asks
                  that no stage reads what a later one computes.

Entry points: ``running_steps`` writes them, ``read_running`` reads them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from ir.graph import Graph, Node
from ir.rows import rows_apart
from pdv.emit.analysis.staged import Running
from pdv.pcg.spread import spread_to_pcg
from pdv.problem import Derived
from pdv.problem.workload import EMITTED, ONE_STAGE, Execution, Order, Stages

ACCUMULATE, STAGE = "accumulate", "stage"
RUNNING = (ACCUMULATE, STAGE)
Step = Mapping[str, Any]  # Any: JSON; docs/plan-format.md


def running_steps(graph: Graph, stages: Stages, execution: Execution) -> list[dict[str, Any]]:
    """The steps of a plan whose rewritten graph is ``graph``; none for one micro-batch and one stage."""
    steps: list[dict[str, Any]] = []
    if execution.micro_batches > 1:
        sites: list[Any] = [node.attr("name") for node in graph.inputs]
        steps.append({"rule": ACCUMULATE, "bindings": {"micro_batches": execution.micro_batches}, "sites": sites})
    if stages.count > 1:
        numbers: dict[int, list[int]] = {stage: [] for stage in range(stages.count)}
        for number, node in enumerate(_operators(graph)):
            if node.needs_grad:
                numbers[stages.chunk_of[node]].append(number)
        for stage, sites in numbers.items():
            bindings = {"stage": stage, "of": stages.count, "order": execution.order}
            steps.append({"rule": STAGE, "bindings": bindings, "sites": sites})
    return steps


def read_running(
    source: Graph, graph: Graph, steps: Sequence[Step], execution: Execution = EMITTED
) -> tuple[Stages, Execution]:
    """What the steps say of the operators of ``graph``, the rewritten one of ``source``.

    Raises:
        ValueError: if a step does not apply.
    """
    nodes = _operators(graph)
    of: dict[Node, int] = {}
    shapes: set[tuple[int, str]] = set()
    for step in steps:
        bindings = step["bindings"]
        if step["rule"] == ACCUMULATE:
            count = bindings["micro_batches"]
            _require(type(count) is int and count > 1, f"a step of {count!r} micro-batches")
            _require(step["sites"] == [node.attr("name") for node in graph.inputs], "accumulate is of all inputs")
            _require(rows_apart(source), "a step in micro-batches: rows of the batch depend on one another")
            execution = replace(execution, micro_batches=count)
        elif step["rule"] == STAGE:
            stage, count, order = bindings["stage"], bindings["of"], bindings["order"]
            _require(type(stage) is int and type(count) is int and 0 <= stage < count, f"stage {stage!r} of {count!r}")
            _require(order in get_args(Order), f"the order {order!r}")
            shapes.add((count, order))
            for number in step["sites"]:
                _require(0 <= number < len(nodes) and nodes[number] not in of, f"operator {number} in stage {stage}")
                of[nodes[number]] = stage
    if not shapes:
        return ONE_STAGE, execution
    _require(len(shapes) == 1, f"stages of several pipelines: {sorted(shapes)}")
    ((count, order),) = shapes
    _require(set(of.values()) == set(range(count)), f"stages {sorted(set(of.values()))} of {count}")
    _require(set(of) == {node for node in nodes if node.needs_grad}, "operators without a stage, or without gradient")
    _require(not graph.updates, "a pipeline of a program that overwrites buffers")
    late = [node for node, stage in of.items() if any(of.get(operand, 0) > stage for operand in node.operands)]
    _require(not late, f"a stage reads what a later one computes: {late[:3]}")
    return Stages(count, chunk_of=of), replace(execution, order=order)  # type: ignore[arg-type]  # one of Order


def running_of(derived: Derived, stages: Stages, execution: Execution) -> Running:
    """The same as the emitter takes it: the stage of each node of a PCG that has a gradient."""
    if stages.count == 1:
        return Running(micro_batches=execution.micro_batches)
    stage_of = spread_to_pcg(derived, stages.chunk_of)
    own = {node: stage for node, stage in stage_of.items() if node.needs_grad}
    return Running(own, stages.count, execution.micro_batches, execution.order)


def _operators(graph: Graph) -> tuple[Node, ...]:
    return tuple(node for node in graph.nodes if not node.is_leaf)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
