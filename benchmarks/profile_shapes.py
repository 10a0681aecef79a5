"""The shapes that `pdv profile` measures by default: every operator of the example models, whole and cut.

    python benchmarks/profile_shapes.py [--smoke] [-o FILE]

Models of the demo and of benchmarks/ranking.py as one core meets them, and GPT-2, Llama-3-8B, ViT and ResNet-50 as one
GPU of a few does. Written once, with the package; `--smoke` writes nothing.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measured.many_plans import program_of
from benchmarks.models.shapes import program
from ir.cost_model import Query
from ir.graph import Graph, Node
from ir.operator import local_loops
from ir.text import print_graph
from learned_cost.profile.programs.pieces import Piece
from learned_cost.profile.programs.planned import FILE, of_plan, segments

SMALL = ("gpt2", "mlp", "vit", "resnet")  # of benchmarks/ranking.py
LARGE = (("gpt2", 8, 1024), ("llama-3-8b", 2, 2048), ("vit", 32, 0), ("resnet50", 32, 0))


def main() -> None:
    """Derive the shapes, write them, and say how many there are."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="the smallest model alone, written nowhere")
    parser.add_argument("-o", "--output", type=Path, default=FILE)
    options = parser.parse_args()
    pieces: dict[Piece, None] = {}
    graphs: list[tuple[str, Graph]] = []
    for plan, graph, degrees in sources(smoke=options.smoke):
        found, parts = cuts(graph, plan, degrees), segments(graph)
        before = len(pieces)
        pieces |= {piece: None for piece in found if piece not in pieces}
        graphs += [(plan, part) for part in parts]
        print(f"{plan}: {len(pieces) - before} pieces, {len(parts)} segments")
    if not options.smoke:
        write(options.output, list(pieces), graphs)
        print(f"{options.output}: {len(pieces)} pieces, {options.output.stat().st_size} bytes")


def cuts(graph: Graph, plan: str, degrees: Sequence[int]) -> list[Piece]:
    """Every operator of the graph, whole and with up to two of its loops cut into ``degrees``, each once."""
    return of_plan((query for node in graph.nodes if not node.is_leaf for query in _queries(node, degrees)), plan)


def _queries(node: Node, degrees: Sequence[int]) -> Iterator[Query]:
    loops = [split.loop for split in node.op.splits(node.loops) if split.loop is not None]
    loops = [loop for loop in loops if loop != node.op.offset_loop]  # such a shard runs more than the library's kernel
    ways: list[dict[str, int]] = [{}]
    for i, loop in enumerate(loops):
        ways += [{loop: degree} for degree in degrees]
        ways += [{loop: 2, other: 2} for other in loops[:i]]
    for way in ways:
        if all(node.loops.extents[loop] % degree == 0 for loop, degree in way.items()):
            yield Query.of(node, local_loops(node.loops, way), train=True)


def write(path: Path, pieces: Sequence[Piece], graphs: Sequence[tuple[str, Graph]]) -> None:
    """Pieces and segments as compressed JSON, equal bytes for equal content."""
    data = {
        "pieces": [
            [p.op, [[list(t.shape), t.dtype.value] for t in p.operands], [list(pair) for pair in p.attrs],
             list(p.wanted), p.plan]
            for p in pieces
        ],
        "graphs": [[plan, print_graph(graph)] for plan, graph in graphs],
    }  # fmt: skip
    path.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0))


def sources(*, smoke: bool) -> list[tuple[str, Graph, tuple[int, ...]]]:
    """Name, graph and degrees of the cuts."""
    if smoke:
        return [("mlp", program_of("mlp").graph, (2, 4))]
    small = [(f"{name} on 4", program_of(name).graph, (2, 4)) for name in SMALL]
    demo = [("demo gpt2", program("gpt2", 4, 64).graph, (2, 4))]
    large = [(f"{name} x{batch}", program(name, batch, length).graph, (2, 4, 8)) for name, batch, length in LARGE]
    return [*small, *demo, *large]


if __name__ == "__main__":
    main()
