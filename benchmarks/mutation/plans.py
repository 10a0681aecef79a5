"""Right programs to make wrong: each model under random legal plans, on meshes whose axes differ."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.fuzz_programs_runs.assignment import AXES, draw_splits, problem_of
from benchmarks.fuzz_programs_runs.judge import planned
from benchmarks.fuzz_programs_runs.spec import PlanSpec
from benchmarks.mutation.models import MODELS, decoder, layers
from ir.graph import Graph
from ir.mesh import Mesh

MESHES: Sequence[tuple[int, ...]] = ((2, 3), (2, 4), (3, 2), (4, 2))
WIDE = (4, 2, 1)
THREE_AXES = ("tied", "means")
DEEP = {"layers": (layers, 8, 4), "decoder": (decoder, 6, 18)}  # the model, its layers, operators of each
MOST_NODES = 3  # of a plan, for each of its source: more would only take longer
FEWEST_MOVES = 4
DRAWS = 40


@dataclass(frozen=True)
class Right:
    """A model, and a plan of it that is right."""

    name: str
    source: Graph
    pcg: Graph
    mesh: Mesh


def right_programs(models: Sequence[str], seed: int, each: int) -> Iterator[Right]:
    """``each`` plans of each model; two models have one on three axes besides."""
    for number, name in enumerate(models):
        for turn in range(each):
            yield right_program(name, MESHES[(number + turn) % len(MESHES)], seed + turn)
        if name in THREE_AXES:
            yield right_program(name, WIDE, seed)


def right_program(name: str, sizes: tuple[int, ...], seed: int) -> Right:
    """The first plan drawn that moves something and is of a fair size."""
    rng = random.Random(f"{seed} {name} {sizes}")
    source = MODELS[name]()
    empty = PlanSpec(tuple(zip(AXES, sizes, strict=False)))
    for _ in range(DRAWS):
        plan = _repeated(name, empty, rng) if name in DEEP else draw_splits(source, empty, rng)
        pcg, _ = planned(source, plan)
        moves = sum(node.op.kind == "parallel" for node in pcg.nodes)
        if moves >= FEWEST_MOVES and len(pcg.nodes) <= MOST_NODES * len(source.nodes):
            break
    return Right(name, source, pcg, problem_of(source, plan).mesh)


def _repeated(name: str, empty: PlanSpec, rng: random.Random) -> PlanSpec:
    """A plan that treats all layers as one is drawn to be treated."""
    make, number, size = DEEP[name]
    plan = draw_splits(make(1), empty, rng)
    splits = (*plan.splits[:size] * number, *plan.splits[size:])
    return replace(plan, splits=splits, storage=_for_all(plan.storage, number))


def _for_all(storage: Mapping[str, tuple[str, bool]], number: int) -> dict[str, tuple[str, bool]]:
    return {name.replace("0", str(index)): rest for name, rest in storage.items() for index in range(number)}
