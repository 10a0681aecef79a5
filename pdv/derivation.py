"""A plan as the list of substitutions that make it, written to JSON and replayed from it (DESIGN section 5).

Algebraic steps name a rule and a block of the source graph (blocks are numbered in program order, and the rule is
applied everywhere that it matches inside). Parallel steps name ``split-<op>-<loop>``, an axis and the operators (by
number in the rewritten graph, leaves not counted). Storage steps say where a parameter rests.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ir.errors import PdvError, ShapeError, ShardingError, VerificationError
from ir.graph import Graph, Node
from ir.operator import Split
from ir.sharding import Invariant, Shard, format_sharding, invariant, parse_sharding
from ir.verify import check_outputs, infer_shardings
from pdv.pcg.derive import derive
from pdv.pcg.redistribute import Redistribution
from pdv.problem import Assignment, Problem, Solution, Storage
from pdv.rewrite.algebra import RULES
from pdv.rewrite.parallel_rules import ParallelRule
from pdv.search.assemble import rewritten_graph
from pdv.search.blocks import split_blocks, tied_params
from pdv.search.variants import apply_rules

Step = Mapping[str, Any]  # Any: JSON; docs/plan-format.md
STORE = "store-parameter"


def operators(graph: Graph) -> tuple[Node, ...]:
    """The nodes that sites number: everything but leaves, in program order."""
    return tuple(node for node in graph.nodes if not node.is_leaf)


def to_steps(solution: Solution) -> list[dict[str, Any]]:
    """The derivation of a solution, ready for JSON; equal steps at several sites are one entry."""
    steps: list[dict[str, Any]] = []
    for (rule, block), _ in itertools.groupby(solution.steps, key=lambda step: (step.rule, step.block)):
        steps.append({"rule": rule, "bindings": {}, "sites": [block]})
    return [*_merged(steps), *_parallel_steps(solution), *_storage_steps(solution)]


def _merged(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Algebraic steps by rule, in the order that a block takes them; blocks do not depend on each other."""
    by_rule: dict[str, list[int]] = {}
    for step in steps:
        by_rule.setdefault(step["rule"], []).extend(step["sites"])
    return [{"rule": rule, "bindings": {}, "sites": sites} for rule, sites in by_rule.items()]


def _parallel_steps(solution: Solution) -> list[dict[str, Any]]:
    sites: dict[tuple[str, str], list[int]] = {}
    for number, node in enumerate(operators(solution.graph)):
        for axis, split in zip(solution.problem.mesh.axes, solution.assignment.splits[node], strict=True):
            if split.label != "none":
                rule = ParallelRule(node.op.name, split)
                key = (rule.name if split.loop is not None else f"{rule.name}:{split.label}", axis.name)
                sites.setdefault(key, []).append(number)
    return [{"rule": rule, "bindings": {"axis": axis}, "sites": found} for (rule, axis), found in sites.items()]


def _storage_steps(solution: Solution) -> list[dict[str, Any]]:
    whole = invariant(solution.problem.mesh)
    sites: dict[Storage, list[str]] = {}
    for param in solution.graph.params:
        storage = solution.assignment.storage.get(param, Storage(whole))
        if storage != Storage(whole):
            sites.setdefault(storage, []).append(param.attr("name"))
    return [
        {
            "rule": STORE,
            "bindings": {"sharding": format_sharding(storage.sharding), "regather": storage.regather},
            "sites": found,
        }
        for storage, found in sites.items()
    ]


def replay(problem: Problem, steps: Sequence[Step]) -> Graph:
    """The PCG that ``steps`` make of ``problem.graph``.

    Raises:
        VerificationError: if a step does not apply (an unknown rule or site), or they make no legal PCG together.
    """
    try:
        _check_form(steps)
        rewritten = _replay_algebra(problem, steps)
        problem = replace(problem, graph=rewritten)
        assignment = _replay_parallel(problem, steps)
        pcg = derive(problem, assignment, Redistribution(problem.mesh, problem.axes)).pcg
        check_outputs(pcg, infer_shardings(pcg, problem.mesh))
    except (LookupError, AssertionError, ValueError, TypeError, ShardingError, ShapeError) as error:
        raise VerificationError(
            f"the derivation does not replay: {error!r}", "Steps as docs/plan-format.md says", "Plan the model again"
        ) from error
    return pcg


def replayed(problem: Problem, steps: Sequence[Step]) -> tuple[Graph, Assignment]:
    """The rewritten graph that ``steps`` make of ``problem.graph``, and what its nodes and parameters do.

    Raises:
        VerificationError: if a step does not apply.
    """
    try:
        _check_form(steps)
        graph = _replay_algebra(problem, steps)
        return graph, _replay_parallel(replace(problem, graph=graph), steps)
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError, PdvError) as error:
        raise VerificationError(f"the derivation does not replay: {error!r}", "", "Plan the model again") from error


def _check_form(steps: Sequence[Step]) -> None:
    """Every step has a rule, bindings and sites, of the types that JSON should give them."""
    for step in steps:
        rule, bindings, sites = step["rule"], step["bindings"], step["sites"]
        kind = str if rule == STORE else int
        _require(isinstance(rule, str) and isinstance(bindings, Mapping), f"step {step!r}")
        _require(isinstance(sites, list) and len(sites) > 0, f"the sites of {rule!r} are {sites!r}")
        _require(all(type(site) is kind for site in sites), f"the sites of {rule!r} are {sites!r}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _replay_algebra(problem: Problem, steps: Sequence[Step]) -> Graph:
    rules = {rule.name: rule for rule in RULES}
    blocks = split_blocks(problem.graph)
    taken: dict[int, list[str]] = {}
    for step in steps:
        if step["rule"] in rules:
            for block in step["sites"]:
                _require(0 <= block < len(blocks), f"there is no block {block}: there are {len(blocks)}")
                taken.setdefault(block, []).append(step["rule"])
    tied = tied_params(problem.graph)
    variants = [
        (block, apply_rules(block, tuple(rules[name] for name in taken.get(number, ())), tied))
        for number, block in enumerate(blocks)
    ]
    return rewritten_graph(problem.graph, variants)[0]


def _replay_parallel(problem: Problem, steps: Sequence[Step]) -> Assignment:
    nodes = operators(problem.graph)
    params = {param.attr("name"): param for param in problem.graph.params}
    labels: dict[tuple[int, str], str] = {}
    storage: dict[Node, Storage] = {}
    algebraic = {rule.name for rule in RULES}
    for step in steps:
        bindings = step["bindings"]
        if step["rule"] == STORE:
            storage.update(dict.fromkeys([params[name] for name in step["sites"]], _storage(bindings)))
        elif step["rule"] not in algebraic:
            axis = problem.mesh.axes[problem.mesh.index(bindings["axis"])].name
            for number in step["sites"]:
                _require(0 <= number < len(nodes), f"there is no operator {number}: there are {len(nodes)}")
                _require((number, axis) not in labels, f"operator {number} is split twice along {axis}")
                labels[number, axis] = step["rule"]
    splits = {
        node: tuple([_split(node, labels.get((number, axis.name))) for axis in problem.mesh.axes])
        for number, node in enumerate(nodes)
    }
    return Assignment(splits, storage)


def _storage(bindings: Mapping[str, Any]) -> Storage:
    sharding, regather = bindings["sharding"], bindings["regather"]
    _require(isinstance(sharding, str) and isinstance(regather, bool), f"the bindings of {STORE!r} are {bindings!r}")
    states = parse_sharding(sharding)
    _require(all(isinstance(state, Shard | Invariant) for state in states), f"no parameter rests as {sharding!r}")
    return Storage(states, regather)


def _split(node: Node, rule: str | None) -> Split:
    """The split of a node that a step names; that of no step is the same work on every device."""
    options = node.op.splits(node.loops)
    if rule is None:
        return options[0]
    name, _, label = rule.partition(":")
    for split in options:
        if ParallelRule(node.op.name, split).name == name and label in ("", split.label):
            return split
    raise ValueError(f"{rule!r} is no rule of {node!r}")
