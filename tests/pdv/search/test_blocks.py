"""Blocks: cut at bottlenecks, equal where only names differ."""

from __future__ import annotations

import itertools
from collections import Counter

from ir.builder import Builder
from ir.graph import Graph, Node
from pdv.search.blocks import Block, split_blocks, tied_params
from tests.pdv.worlds import attention_block, f32, mlp


def keys(blocks: tuple[Block, ...]) -> list[int]:
    """The blocks' keys as small numbers, in order of first appearance."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(block.key, len(numbers)) for block in blocks]


def chain(*widths: int, tie: bool = False, returned: int | None = None) -> Graph:
    """Layers of relu(W x) between the given widths; ``tie`` reads one weight in all of them."""
    k = Builder()
    x: Node = k.input("x", f32(4, widths[0]))
    ends: dict[str, Node] = {}
    for i, (before, after) in enumerate(itertools.pairwise(widths)):
        x = k.relu(k.linear(x, k.param("w" if tie else f"w{i}", f32(after, before))))
        if i == returned:
            ends["middle"] = x
    return k.graph({**ends, "y": x})


def test_every_operator_is_in_one_block_in_program_order() -> None:
    for graph in (mlp(layers=3), attention_block(), attention_block(fused=False), chain(4, 4, 4)):
        blocks = split_blocks(graph)
        inside = [node for block in blocks for node in block.nodes]
        assert inside == [node for node in graph.nodes if not node.is_leaf]
        assert blocks[0].source is None
        assert blocks[-1].sink is None
        assert all(after.source is before.sink for before, after in itertools.pairwise(blocks))


def test_nothing_but_the_source_is_read_from_outside() -> None:
    for graph in (mlp(layers=3), attention_block()):
        for block in split_blocks(graph):
            known = {block.source, *block.nodes}
            assert all(x.is_leaf or x in known for node in block.nodes for x in node.operands)


def test_equal_layers_share_a_key() -> None:
    blocks = split_blocks(mlp(layers=5))
    layers = [block for block in blocks if any(node.op.name == "add" for node in block.nodes)]
    assert len(layers) == 5
    assert len({block.key for block in layers[:-1]}) == 1
    assert layers[-1].key != layers[0].key, "the last one ends the program"


def test_layers_of_other_sizes_do_not() -> None:
    assert keys(split_blocks(chain(4, 4, 4, 4))) == [0, 1, 2, 1, 2, 3]
    assert len(set(keys(split_blocks(chain(4, 6, 8, 10))))) == 6


def test_a_tied_weight_sets_its_layers_apart() -> None:
    free, tied = split_blocks(chain(4, 4, 4, 4)), split_blocks(chain(4, 4, 4, 4, tie=True))
    assert not tied_params(chain(4, 4, 4, 4))
    assert [param.name for param in tied_params(chain(4, 4, 4, 4, tie=True))] == ["w"]
    assert {block.key for block in free[2:3]} != {block.key for block in tied[2:3]}


def test_a_value_that_is_returned_and_read_on_leaves_where_it_is_read() -> None:
    graph = chain(4, 4, 4, 4, returned=0)
    middle = dict(graph.outputs)["middle"]
    blocks = split_blocks(graph)
    (leaving,) = [block for block in blocks if middle in block.outputs]
    assert leaving.source is middle
    assert sum(len(block.outputs) for block in blocks) == 2
    assert leaving.key not in {block.key for block in blocks if block is not leaving}


def test_a_residual_stream_is_cut_between_its_layers_only() -> None:
    blocks = split_blocks(mlp(layers=2))
    assert [Counter(node.op.name for node in block.nodes)["add"] for block in blocks] == [0, 1, 1]
