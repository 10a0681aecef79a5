"""What values beside the way do (``blocks``), once their readers are decided: whatever costs least for these.

All else was decided as if such a value could be read whole or cut at no cost, which no plan can better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ir.graph import Node
from ir.sharding import Sharding, invariant
from pdv.search.assemble import VariantChoice
from pdv.search.blocks import Block
from pdv.search.priced_blocks import LIMIT
from pdv.search.refusals import no_legal_plan
from pdv.search.solver.block_table import solve_model
from pdv.search.solver.configs import Config, ConfigTable
from pdv.search.solver.network import BlockModel
from pdv.search.solver.ties import Ties
from pdv.search.variants.variants import Variant

MOST_WANTS = 4  # of one value: one that is wanted in more ways is made whole


def settle_beside(block: Block, readers: Sequence[VariantChoice], configs: ConfigTable, price: float) -> VariantChoice:
    """The block beside the way, each of its operators cut as is cheapest for those who read it.

    Raises:
        NoPlanFitsError: if pins leave it nothing.
    """
    wants: dict[Node, dict[Sharding, None]] = {}
    inside = set(block.nodes)
    for choice in readers:
        for node, config in zip(choice.variant.block.nodes, choice.configs, strict=True):
            for operand, need in zip(node.operands, config.needs, strict=True):
                if operand in inside:
                    wants.setdefault(operand, {})[need] = None
    whole = invariant(configs.problem.mesh)
    wanted = {value: tuple(found) if len(found) <= MOST_WANTS else (whole,) for value, found in wants.items()}
    return VariantChoice(block, Variant(block), _solve(block, configs, wanted, price), price)


def _solve(
    block: Block, configs: ConfigTable, wanted: Mapping[Node, Sequence[Sharding]], price: float
) -> tuple[Config, ...]:
    model = BlockModel(block, configs, Ties({}, ()), ((),), optimistic=True, limit=LIMIT, wanted=wanted)
    solved = solve_model(model, price)
    if not (solved.table < float("inf")).all():
        raise no_legal_plan(configs.problem)
    values = solved.values_for(0, 0, {})
    return tuple(solved.configs[node][values[solved.variables[node]]] for node in block.nodes)
