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


def lengthen(solutions: Sequence[Solution], inside_of: Sequence[int], graph: Graph, middle: Middle) -> Solution:
    """The plan that does with the whole ``graph`` as ``solutions`` with their short one, which they rewrite alike.

    inside_of: by piece of the whole, the number of the solution that it follows; what is no piece's is the last one's.
    """
    if not inside_of or min(inside_of) == max(inside_of):
        solutions, inside_of = [solutions[max(inside_of, default=0)]], []
        if middle[2] == 1:
            return solutions[0]
    solution = solutions[inside_of[-1] if inside_of else 0]
    short = solution.problem
    assert all(one.steps == solution.steps for one in solutions), "rewritten alike"
    problem = replace(short, graph=graph)
    blocks, wholes = split_blocks(short.graph, short.rules), split_blocks(graph, short.rules)
    places = places_of(short.graph, blocks, middle)
    assert [whole.key for whole in wholes] == [blocks[at].key for at in places], f"{graph.name}: other blocks"
    taken: dict[int, list[str]] = {}
    for step in solution.steps:
        taken.setdefault(step.block, []).append(step.rule)
    before, made = _rewritten(short, blocks, [taken.get(at, []) for at in range(len(blocks))])
    after, rewritten = _rewritten(problem, wholes, [taken.get(at, []) for at in places])
    ways = [_Way(one, made[0]) for one in solutions]
    of = pieces(rewritten[0]).of
    splits: dict[Node, tuple[Split, ...]] = {}
    storage: dict[Node, Storage] = {}
    for variant, at in zip(after, places, strict=True):
        for node, like in zip(variant.block.nodes, before[at].block.nodes, strict=True):
            new, its = rewritten[1][node], made[1][like]
            way = ways[inside_of[of[new]] if inside_of else 0]
            splits[new] = way.split(its)
            for operand, param in zip(new.operands, its.operands, strict=True):
                if operand.is_param and (rests := way.storage(param)) is not None:
                    storage.setdefault(operand, rests)
    assignment = Assignment(splits, storage, solution.assignment.leaving)
    steps = tuple(AlgebraicStep(rule, number) for number, at in enumerate(places) for rule in taken.get(at, ()))
    done = realize(replace(problem, graph=rewritten[0]), assignment)
    return replace(
        solution, problem=problem, graph=rewritten[0], steps=steps, assignment=assignment,
        cost_s=done.cost.seconds, memory_bytes=done.cost.memory_bytes, lower_bound_s=0.0, realized=done,
    )  # fmt: skip


class _Way:
    """What a solution of a short program does with the nodes of ``made``, which is its program over again."""

    def __init__(self, solution: Solution, made: Graph) -> None:
        self._assignment = solution.assignment
        self._known = dict(zip(_operators(made), _operators(solution.graph), strict=True))
        self._params = {node.attr("name"): node for node in solution.graph.params}

    def split(self, node: Node) -> tuple[Split, ...]:
        return self._assignment.splits[self._known[node]]

    def storage(self, param: Node) -> Storage | None:
        return self._assignment.storage.get(self._params[param.attr("name")])


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
