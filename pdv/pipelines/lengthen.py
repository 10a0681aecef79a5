"""A plan of a short program, carried over to the whole: equal layers do alike. Entry point: ``lengthen``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ir.graph import Graph, Node
from ir.operator import Split
from pdv.pcg.plan_cost import realize
from pdv.problem import AlgebraicStep, Assignment, Problem, Solution, Storage
from pdv.rewrite.rule import by_name
from pdv.schedule.pieces import pieces
from pdv.search.assemble import rewritten_graph
from pdv.search.blocks import Block, split_blocks, tied_params
from pdv.search.variants.variants import Variant, apply_rules

Middle = tuple[int, int, int]
"""The pieces [start, stop) that stand for so many times as many."""


def lengthen(solution: Solution, graph: Graph, middle: Middle) -> Solution:
    """The plan that does with the whole ``graph`` as ``solution`` with its short one."""
    short = solution.problem
    if middle[2] == 1:
        return solution
    problem = replace(short, graph=graph)
    blocks, wholes = split_blocks(short.graph, short.rules), split_blocks(graph, short.rules)
    places = places_of(short.graph, blocks, middle)
    assert [whole.key for whole in wholes] == [blocks[at].key for at in places], f"{graph.name}: other blocks"
    taken: dict[int, list[str]] = {}
    for step in solution.steps:
        taken.setdefault(step.block, []).append(step.rule)
    before, made = _rewritten(short, blocks, [taken.get(at, []) for at in range(len(blocks))])
    after, rewritten = _rewritten(problem, wholes, [taken.get(at, []) for at in places])
    known = dict(zip(_operators(made[0]), _operators(solution.graph), strict=True))
    params = {node.attr("name"): node for node in solution.graph.params}
    splits: dict[Node, tuple[Split, ...]] = {}
    storage: dict[Node, Storage] = {}
    for variant, at in zip(after, places, strict=True):
        for node, like in zip(variant.block.nodes, before[at].block.nodes, strict=True):
            new = rewritten[1][node]
            splits[new] = solution.assignment.splits[known[made[1][like]]]
            for operand, its in zip(new.operands, made[1][like].operands, strict=True):
                if operand.is_param and params[its.attr("name")] in solution.assignment.storage:
                    storage.setdefault(operand, solution.assignment.storage[params[its.attr("name")]])
    assignment = Assignment(splits, storage, solution.assignment.leaving)
    steps = tuple(AlgebraicStep(rule, number) for number, at in enumerate(places) for rule in taken.get(at, ()))
    done = realize(replace(problem, graph=rewritten[0]), assignment)
    return replace(
        solution, problem=problem, graph=rewritten[0], steps=steps, assignment=assignment,
        cost_s=done.cost.seconds, memory_bytes=done.cost.memory_bytes, lower_bound_s=0.0, realized=done,
    )  # fmt: skip


def places_of(graph: Graph, blocks: Sequence[Block], middle: Middle) -> list[int]:
    """By block of the whole program, the block of the short one that it is like; none where no block is repeated."""
    start, stop, times = middle
    of = pieces(graph).of
    inside = [at for at, block in enumerate(blocks) if start <= of[block.nodes[0]] < stop]
    return [] if not inside else [*range(inside[0]), *inside * times, *range(inside[-1] + 1, len(blocks))]


def _rewritten(
    problem: Problem, blocks: Sequence[Block], names: Sequence[Sequence[str]]
) -> tuple[list[Variant], tuple[Graph, dict[Node, Node]]]:
    """Each block after its rules; the program of these, and where each of their nodes went."""
    rules, tied = by_name(problem.rules), tied_params(problem.graph)
    variants = [
        apply_rules(block, [rules[name] for name in own], tied) if own else Variant(block)
        for block, own in zip(blocks, names, strict=True)
    ]
    return variants, rewritten_graph(problem.graph, list(zip(blocks, variants, strict=True)))


def _operators(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if not node.is_leaf]
