"""A plan as the list of substitutions that make it, written to JSON and replayed from it (docs/architecture.md).

Algebraic steps name a rule and where it is applied, at all sites at once: a site lists operators, in the order of the
rule's pattern, by number in the graph as it stands before the step. Parallel steps name ``split-<op>-<loop>``, an axis
and the operators (by number in the rewritten graph, leaves not counted). Storage steps say where a parameter rests, a
step of several outputs how they leave.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ir.errors import PdvError, ShapeError, ShardingError, VerificationError
from ir.graph import Graph, Node
from ir.operator import Split
from ir.sharding import Invariant, Shard, Sharding, format_sharding, invariant, parse_sharding
from ir.verify import check_returned, infer_shardings
from pdv.pcg.derive import derive
from pdv.pcg.redistribute import Redistribution
from pdv.plan.running import (
    ACCUMULATE,
    COMPILE,
    OFFLOAD,
    OFFLOAD_ACTIVATIONS,
    RECOMPUTE,
    ROUND,
    RUNNING,
    SCALE,
    SLICE,
    STAGE,
    TYPES,
    running_steps,
    type_steps,
)
from pdv.plan.steps import Step, operators, require
from pdv.problem import Assignment, Problem, Solution, Storage
from pdv.problem.workload import EMITTED, ONE_STAGE, Execution, Stages
from pdv.rewrite.match import Match, matches
from pdv.rewrite.parallel_rules import ParallelRule
from pdv.rewrite.rewriter import CircleError, RewriteBuilder, applies, rewritten, serve_alike, served
from pdv.rewrite.rule import Rule, by_name
from pdv.search.assemble import rewritten_graph
from pdv.search.blocks import split_blocks, tied_params
from pdv.search.variants.variants import Variant, trail

STORE = "store-parameter"
LEAVE = "leave-program"
BINDINGS = {
    STORE: {"sharding", "regather"},
    LEAVE: {"sharding"},
    ACCUMULATE: {"micro_batches"},
    STAGE: {"stage", "of", "order"},
    SLICE: {"slices"},
    RECOMPUTE: set(),
    OFFLOAD_ACTIVATIONS: {"to"},
    ROUND: {"to", "parameters", "gradients", "moments"},
    OFFLOAD: {"to"},
    SCALE: {"format"},
    COMPILE: set(),
}
MAY_BIND = {STAGE: {"ranks", "staleness"}}


def to_steps(solution: Solution, stages: Stages = ONE_STAGE, execution: Execution = EMITTED) -> list[dict[str, Any]]:
    """The derivation of a solution, and how it is run, ready for JSON; equal steps at several sites are one entry."""
    steps = [*_algebraic_steps(solution), *_parallel_steps(solution), *_storage_steps(solution)]
    steps += [*running_steps(solution.graph, stages, execution), *type_steps(solution.problem, solution.graph)]
    if solution.assignment.leaving is not None:
        bindings = {"sharding": format_sharding(solution.assignment.leaving)}
        steps.append({"rule": LEAVE, "bindings": bindings, "sites": [name for name, _ in solution.graph.outputs]})
    return steps


def _algebraic_steps(solution: Solution) -> list[dict[str, Any]]:
    """Rules by turns: what each block takes first, then second; each over all blocks that take it then."""
    if not solution.steps:
        return []
    problem = solution.problem
    tied = tied_params(problem.graph)
    rules = by_name(problem.rules)
    taken: dict[int, list[str]] = {}
    for step in solution.steps:
        taken.setdefault(step.block, []).append(step.rule)
    blocks = split_blocks(problem.graph, problem.rules)
    trails = {number: trail(blocks[number], [rules[name] for name in names], tied) for number, names in taken.items()}
    now = {number: Variant(block) for number, block in enumerate(blocks)}
    steps: list[dict[str, Any]] = []
    for turn in range(max(len(names) for names in taken.values())):
        for rule in dict.fromkeys(names[turn] for names in taken.values() if len(names) > turn):
            graph, new = rewritten_graph(problem.graph, [(block, now[i]) for i, block in enumerate(blocks)])
            number_of = {node: number for number, node in enumerate(operators(graph))}
            matched: list[Match] = []
            for block, (variants, found) in trails.items():
                if len(found) > turn and taken[block][turn] == rule:
                    matched += found[turn]
                    now[block] = variants[turn + 1]
            sites = [[number_of[new[node]] for node in match.nodes] for match in matched]
            steps.append({"rule": rule, "bindings": _shared_values(rules[rule], matched), "sites": sites})
    return steps


def _shared_values(rule: Rule, found: Sequence[Match]) -> dict[str, Any]:
    """Attribute values that all matches of a step have in common, for people who read the plan."""
    names = [name for name in rule.law.attr_uses if name in found[0].values]
    shared = [name for name in names if all(match.values[name] == found[0].values[name] for match in found)]
    return {name: list(value) if isinstance(value := found[0].values[name], tuple) else value for name in shared}


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
        problem = replace(problem, graph=_replay_algebra(problem, steps))
        assignment = _replay_parallel(problem, steps)
        pcg = derive(problem, assignment, Redistribution(problem.mesh, problem.axes)).pcg
        check_returned(pcg, infer_shardings(pcg, problem.mesh))
    except (CircleError, LookupError, AssertionError, ValueError, TypeError, ShardingError, ShapeError) as error:
        raise VerificationError(
            f"the derivation does not replay: {error!r}", "Steps as docs/plan-format.md says", "Plan the model again"
        ) from error
    return pcg


def replay_steps(problem: Problem, steps: Sequence[Step]) -> tuple[Graph, Assignment]:
    """The rewritten graph that ``steps`` make of ``problem.graph``, and what its nodes and parameters do.

    Raises:
        VerificationError: if a step does not apply.
    """
    try:
        _check_form(steps)
        graph = _replay_algebra(problem, steps)
        return graph, _replay_parallel(replace(problem, graph=graph), steps)
    except (ArithmeticError, AssertionError, CircleError, LookupError, TypeError, ValueError, PdvError) as error:
        raise VerificationError(f"the derivation does not replay: {error!r}", "", "Plan the model again") from error


def _check_form(steps: Sequence[Step]) -> None:
    """Every step has a rule, bindings and sites, of the types that JSON should give them."""
    for step in steps:
        rule, bindings, sites = step["rule"], step["bindings"], step["sites"]
        require(isinstance(rule, str) and isinstance(bindings, Mapping), f"step {step!r}")
        require(isinstance(sites, list) and len(sites) > 0, f"the sites of {rule!r} are {sites!r}")
        named = rule in (STORE, LEAVE, ACCUMULATE, SLICE, RECOMPUTE, OFFLOAD_ACTIVATIONS, *TYPES)
        kind = str if named else list if isinstance(sites[0], list) else int
        require(all(type(site) is kind for site in sites), f"the sites of {rule!r} are {sites!r}")
        require(kind is list or len(set(sites)) == len(sites), f"{rule!r} names a site twice: {sites!r}")
        known = BINDINGS.get(rule, {"axis"} if kind is int else set(bindings))
        require(set(bindings) - MAY_BIND.get(rule, set()) == known, f"the bindings of {rule!r} are {bindings!r}")


def _replay_algebra(problem: Problem, steps: Sequence[Step]) -> Graph:
    rules = by_name(problem.rules)
    tied = {param.attr("name") for param in tied_params(problem.graph)}
    graph = problem.graph
    for step in steps:
        if step["rule"] in rules:
            graph = _apply(graph, rules[step["rule"]], step, tied, train=problem.train)
    return graph


def _apply(graph: Graph, rule: Rule, step: Step, tied: Collection[str], *, train: bool) -> Graph:
    """The graph with a rule applied at all sites at once; a site lists operators in the order of the rule's pattern."""
    nodes = operators(graph)
    fixed = {param for param in graph.params if param.attr("name") in tied}
    serves = served(nodes, [node for _, node in graph.outputs])
    found: list[Match] = []
    for site in step["sites"]:
        require(len(site) == sum(rule.sizes), f"{rule.name} has {sum(rule.sizes)} operators, not {site}")
        require(all(type(x) is int and 0 <= x < len(nodes) for x in site), f"{site} of {len(nodes)} operators")
        at = [nodes[number] for number in site]
        match = next((m for m in matches(rule, at[0], graph.users, at=at) if applies(m, fixed, serves)), None)
        require(match is not None, f"{rule.name} does not match {site}")
        assert match is not None
        found.append(match)
    shared = _shared_values(rule, found)
    require(shared == step["bindings"], f"{rule.name} binds {shared}, not {step['bindings']}")
    roots = [root for match in found for root in match.roots]
    require(len(set(roots)) == len(roots), f"sites of {rule.name} overlap")
    k = RewriteBuilder(serves=serves)
    leaves = {node: k.copy(node, ()) for node in graph.inputs}

    def leaf(node: Node) -> Node:
        return leaves[node] if node in leaves else k.copy(node, ())

    new = rewritten(k, nodes, found, leaf)
    outputs = {name: new[node] if node in new else leaf(node) for name, node in graph.outputs}
    updates = {name: new[node] if node in new else leaf(node) for name, node in graph.updates}
    made = k.graph(outputs, updates, graph.name)
    alike = not train or serve_alike(served(operators(made), [node for _, node in made.outputs]), serves)
    require(alike, f"{rule.name} lets outputs depend on parameters of others")
    return made


def _replay_parallel(problem: Problem, steps: Sequence[Step]) -> Assignment:
    nodes = operators(problem.graph)
    params = {param.attr("name"): param for param in problem.graph.params}
    labels: dict[tuple[int, str], str] = {}
    storage: dict[Node, Storage] = {}
    leaving: Sharding | None = None
    algebraic = by_name(problem.rules)
    for step in steps:
        bindings = step["bindings"]
        if step["rule"] == LEAVE:
            require(leaving is None, "the outputs leave twice")
            leaving = _leaving(problem, step)
        elif step["rule"] == STORE:
            storage.update(dict.fromkeys([params[name] for name in step["sites"]], _storage(bindings)))
        elif step["rule"] not in algebraic and step["rule"] not in RUNNING:
            axis = problem.mesh.axes[problem.mesh.index(bindings["axis"])].name
            for number in step["sites"]:
                require(0 <= number < len(nodes), f"there is no operator {number}: there are {len(nodes)}")
                require((number, axis) not in labels, f"operator {number} is split twice along {axis}")
                labels[number, axis] = step["rule"]
    splits = {
        node: tuple([_split(node, labels.get((number, axis.name))) for axis in problem.mesh.axes])
        for number, node in enumerate(nodes)
    }
    return Assignment(splits, storage, leaving)


def _leaving(problem: Problem, step: Step) -> Sharding:
    """How all outputs leave; a step that names others, or a way that is none of the problem's, does not apply."""
    outputs = [name for name, _ in problem.graph.outputs]
    require(step["sites"] == outputs, f"{LEAVE!r} is about {step['sites']}, the outputs are {outputs}")
    allowed = [format_sharding(way) for way in problem.exits]
    found = step["bindings"]["sharding"]
    require(found in allowed, f"outputs leave as one of {allowed}, not as {found!r}")
    return problem.exits[allowed.index(found)]


def _storage(bindings: Mapping[str, Any]) -> Storage:
    sharding, regather = bindings["sharding"], bindings["regather"]
    require(isinstance(sharding, str) and isinstance(regather, bool), f"the bindings of {STORE!r} are {bindings!r}")
    states = parse_sharding(sharding)
    require(format_sharding(states) == sharding, f"{sharding!r} is written {format_sharding(states)!r}")
    require(all(isinstance(state, Shard | Invariant) for state in states), f"no parameter rests as {sharding!r}")
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
