"""From the choices of a chain to one rewritten graph with its assignment and the algebraic part of its derivation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.operator import Split
from pdv.problem import AlgebraicStep, Assignment, Storage
from pdv.search.blocks import Block
from pdv.search.solver.configs import Config
from pdv.search.variants.variants import Variant


@dataclass(frozen=True)
class VariantChoice:
    """One block of the graph: the variant taken, and the configuration of each of its nodes.

    ``price`` of memory (seconds per byte) says where its parameters rest.
    """

    block: Block
    variant: Variant
    configs: Sequence[Config]
    price: float = 0.0


def rewritten_graph(graph: Graph, variants: Sequence[tuple[Block, Variant]]) -> tuple[Graph, dict[Node, Node]]:
    """The graph with each block replaced by its variant, and where each node of a variant went."""
    k = Builder()
    new: dict[Node, Node] = {node: k.copy(node, ()) for node in graph.inputs}
    for block, variant in variants:
        for node in variant.block.nodes:
            for operand in node.operands:
                if operand.is_leaf and operand not in new:
                    new[operand] = k.copy(operand, ())
            new[node] = k.copy(node, tuple(new[operand] for operand in node.operands))
        for before, after in zip(block.outputs, variant.block.outputs, strict=True):
            new[before] = new[after]
        for before, after in zip(block.updates, variant.block.updates, strict=True):
            new[before] = new[after]
        if block.sink is not None and variant.block.sink is not None:
            new[block.sink] = new[variant.block.sink]
    for _, node in (*graph.outputs, *graph.updates):
        if node.is_leaf and node not in new:
            new[node] = k.copy(node, ())
    outputs = {name: new[node] for name, node in graph.outputs}
    updates = {name: new[node] for name, node in graph.updates}
    return k.graph(outputs, updates, graph.name), new


def assemble(
    graph: Graph, choices: Sequence[VariantChoice], tied: Mapping[Node, Storage]
) -> tuple[Graph, Assignment, tuple[AlgebraicStep, ...]]:
    """The rewritten graph, what each of its nodes and parameters does, and the rules applied per block."""
    rewritten, new = rewritten_graph(graph, [(choice.block, choice.variant) for choice in choices])
    splits: dict[Node, tuple[Split, ...]] = {}
    storage: dict[Node, Storage] = {new[param]: kept for param, kept in tied.items() if param in new}
    steps: list[AlgebraicStep] = []
    for number, choice in enumerate(choices):
        for node, config in zip(choice.variant.block.nodes, choice.configs, strict=True):
            splits[new[node]] = config.splits
            for operand, kept in config.storage(choice.price):
                storage.setdefault(new[node.operands[operand]], kept)
        steps += [AlgebraicStep(rule, number) for rule in choice.variant.rules]
    return rewritten, Assignment(splits, storage), tuple(steps)
