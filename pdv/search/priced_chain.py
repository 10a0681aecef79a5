"""The best plan of a graph at a price of memory: equal blocks once, chained by min-plus over boundary shardings.

At each price, in seconds per byte, the chain is solved exactly (``refine``). Where more than five want one value,
prices are but bounded (``sharing``). Who chooses prices: ``chain``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ir.graph import Graph
from ir.proof.repeats import Repeat
from pdv.config import UNIFORM_GAP
from pdv.pcg.plan_cost import realize, whole_bytes
from pdv.problem import AlgebraicStep, Assignment, Problem, Realized
from pdv.search.assemble import VariantChoice, assemble
from pdv.search.beside import settle_beside
from pdv.search.blocks import repeats
from pdv.search.priced_blocks import LIMIT, BlockPricer
from pdv.search.refine import TOLERANCE, BlockChoice, Tables
from pdv.search.refusals import no_legal_plan
from pdv.search.solver.configs import ConfigTable, KnownConfigs
from pdv.search.solver.tables import Table, TooWideError
from pdv.search.solver.tied import TiedTable, reads
from pdv.search.solver.ties import Reading, Ties
from pdv.search.variants.backtrack import Deadline, Noticed
from pdv.search.variants.variants import SourceBlocks, Variant

FIXINGS = 4  # times that loose parameters are fixed anew, where their readers want them elsewhere


@dataclass(frozen=True)
class Made:
    """The rewritten graph of a plan, what its nodes do, and both made into a PCG."""

    graph: Graph
    steps: tuple[AlgebraicStep, ...]
    assignment: Assignment
    realized: Realized


@dataclass(frozen=True)
class Priced:
    """The best derivation found at one price, with its seconds and bytes.

    No derivation has less ``cost_s + price * memory_bytes`` than ``value``. ``parts`` are by block, ``states`` by tied
    parameter; ``tables`` are where they come from. ``made`` is there where it had to be made to know what it costs.
    """

    price: float
    value: float
    cost_s: float
    memory_bytes: float
    parts: tuple[BlockChoice, ...]
    states: tuple[int, ...]
    tables: Tables
    made: Made | None = None

    @property
    def priced(self) -> float:
        """Seconds, bytes priced."""
        return self.cost_s + self.price * self.memory_bytes

    def changes(self, repeats: Sequence[Repeat]) -> int:
        """How often a stretch that repeats does otherwise than the time before."""
        return sum(
            any(not self.parts[at].is_like(self.parts[at + one.period]) for at in range(start, start + one.period))
            for one in repeats
            for start in range(one.start, one.stop - one.period, one.period)
        )


class PricedChain:
    """One problem at any price; block tables are remembered across prices and across equal blocks."""

    def __init__(
        self,
        problem: Problem,
        late: Deadline = lambda: False,
        source: SourceBlocks | None = None,
        known: KnownConfigs | None = None,
        variants: Mapping[str, Sequence[Variant]] | None = None,
        limit: int = LIMIT,
        other: PricedChain | None = None,
    ) -> None:
        """When it is ``late``, no more rewrites and prices are tried; a plan is found nevertheless.

        A search that left rewrites out knows no bound: one of them may cost less than anything it saw. ``source``: the
        problem's blocks, where they were found before; ``known``: configurations of the problem, or of one that differs
        in its limits alone (where nothing is pinned, in its program too); ``variants``: of blocks by key, where none
        are to be looked for; ``limit``: entries of a table, beyond which it is bounded; ``other``: the same but for
        how outputs leave, whose blocks without outputs are not solved again.
        """
        assert not problem.undecided, "how outputs leave is decided first (pdv.search.strategies.together)"
        self.problem = problem
        self._late = Noticed(late)
        self._source = source or SourceBlocks(problem.graph, problem.rules)
        self._beside = tuple(block for block in self._source.blocks if block.beside)
        self.blocks = tuple(
            replace(block, key=block.key + problem.pins.mark(block.nodes))
            for block in self._source.blocks[len(self._beside) :]
        )
        self.repeats = repeats([block.key for block in self.blocks])
        known = known or KnownConfigs.of(problem)
        self.configs = ConfigTable(problem, self._source.tied, known)
        nodes = problem.graph.nodes
        self.tied = {param: TiedTable(self.configs, param, reads(nodes, param)) for param in self._source.tied}
        self.whole_bytes = whole_bytes(problem.graph) * problem.resting
        ties = Ties.of(self.tied, self.blocks, self.configs, problem.mesh)
        elsewhere = None if other is None else other.stages
        self._stages = BlockPricer(
            problem, self.blocks, self.configs, ties, self._late, known, limit, self._source, elsewhere
        )
        self._stages.variants |= {key: list(found) for key, found in (variants or {}).items()}
        self.plans: list[Priced] = []

    @property
    def stages(self) -> BlockPricer:
        """What prices its blocks."""
        return self._stages

    def at_price(self, price: float) -> Priced:
        """The exact optimum of seconds + price x bytes; ``plans`` are those found so far.

        Raises:
            NoPlanFitsError: if pins leave no legal assignment at all.
        """
        known = next((plan for plan in self.plans if plan.price == price), None)
        if known is None:
            known = self._at_price(price)
            self.plans.append(known)
        return known

    def least(self, price: float) -> float:
        """What no derivation takes less than, bytes priced: of ``at_price`` the bound that it begins with."""
        return self._stages.bounded(price).value + price * self.whole_bytes

    def least_of(self, key: str) -> float:
        """Seconds of a kind of block at least, by itself."""
        return self._stages.least(key)

    def steps(self, price: float) -> list[Table]:
        """By block [sinks of the one before, sinks], what it costs at least, bytes priced."""
        return self._stages.bounded(price).path.steps

    def _at_price(self, price: float) -> Priced:
        if not all(table.states for table in self.tied.values()):
            raise no_legal_plan(self.problem)
        bound = self._stages.bounded(price)
        if not np.isfinite(bound.value):
            raise no_legal_plan(self.problem, cut=self.cut)
        tables = Tables(self._stages, price, bound)
        settled = tables.settle()
        if settled is None:
            raise TooWideError("a block, close to its bound")
        states, parts = settled
        value = tables.value + price * self.whole_bytes + self._least_beside(price)
        if tables.ties.loose:
            return self._fix(price, value, tables.ties.settled(self._readings(parts), price))
        return self.assemble(parts, states, price, value, tables)

    def _least_beside(self, price: float) -> float:
        """What values beside the way cost at least: each operator at its cheapest, nothing moved, bytes priced."""
        every = [
            [seconds + price * held for seconds, held in (config.totals(price) for config in self.configs.of(node))]
            for block in self._beside
            for node in block.nodes
        ]
        return sum(min(costs, default=np.inf) for costs in every)

    def alike(self, plan: Priced) -> Priced:
        """A plan of the same price whose repeated blocks do alike, if it costs little more than this one; else this."""
        if not plan.changes(self.repeats):
            return plan
        most = plan.priced + UNIFORM_GAP * plan.cost_s
        for entered in (True, False):
            parts = plan.tables.settle_alike(plan.states, self.repeats, most, entered=entered)
            if parts is not None:
                found = self.assemble(parts, plan.states, plan.price, plan.value, plan.tables)
                if found.priced <= most and not found.changes(self.repeats):
                    return found
        return plan

    def _fix(self, price: float, value: float, ties: Ties) -> Priced:
        """The best plan with loose parameters fixed, each where its readers want it, until they want no other.

        Raises:
            TooWideError: if no plan was found, though there may be one.
        """
        best: Priced | None = None
        for _ in range(FIXINGS):
            found = self._with(price, value, ties) or (None if best else self._with(price, value, self._dive(price)))
            if found is None or (best is not None and found.priced >= best.priced * (1 - TOLERANCE)):
                break
            best, before = found, ties
            ties = self._stages.ties.settled(self._readings(found.parts), price)
            if ties.fixed == before.fixed or self.late:
                break
        if best is None:
            raise TooWideError("tied parameters, each settled in turn")
        return best

    def _with(self, price: float, value: float, ties: Ties) -> Priced | None:
        """The best plan with these parameters fixed; ``value`` is what every plan costs at least."""
        stages = self._stages.fixed(ties)
        bound = stages.bounded(price)
        if not np.isfinite(bound.value):
            return None
        tables = Tables(stages, price, bound)
        settled = tables.settle()
        return None if settled is None else self.assemble(settled[1], settled[0], price, value, tables)

    def _dive(self, price: float) -> Ties:
        """Loose parameters fixed one after another, each in the first of its cheapest states that leaves a plan.

        Raises:
            TooWideError: if one has no such state.
        """
        ties = self._stages.ties
        for param in ties.loose:
            costs = self.tied[param].own(price)
            tried = (ties.fixing(param, int(state)) for state in np.argsort(costs, kind="stable"))
            fitting = (one for one in tried if np.isfinite(self._stages.fixed(one).bounded(price).value))
            found = next(fitting, None)
            if found is None:
                raise TooWideError("tied parameters, each settled in turn")
            ties = found
        return ties

    def _readings(self, parts: Sequence[BlockChoice]) -> Counter[Reading]:
        """How often loose parameters are read, and as what, by what each block does."""
        loose, found = set(self._stages.ties.loose), Counter[Reading]()
        for block, part in zip(self.blocks, parts, strict=True):
            nodes = self._stages.variants[block.key][part.number].block.nodes
            for node, config in zip(nodes, part.configs, strict=True):
                for i, operand in enumerate(node.operands):
                    if operand in loose:
                        found[operand, config.needs[i], self.configs.keeps(node, i)] += 1
        return found

    @property
    def exact(self) -> bool:
        """True if no price so far was but a bound."""
        return self._stages.exact and not self._stages.ties.loose and not self._beside

    @property
    def cut(self) -> bool:
        """True if rewrites were left out because it was late; a bound then says nothing of these."""
        return self._stages.cut

    @property
    def complete(self) -> bool:
        """False if anything was left out because it was late."""
        return not self._late.noticed

    @property
    def variants(self) -> int:
        """How many variants of blocks were looked at."""
        return sum(len(variants) for variants in self._stages.variants.values())

    @property
    def late(self) -> bool:
        """True once no more should be tried."""
        return self._late()

    def assemble(
        self, parts: Sequence[BlockChoice], states: tuple[int, ...], price: float, value: float, tables: Tables
    ) -> Priced:
        """The plan made of these parts, with its own price: their sum, or if that is but a bound, the PCG's."""
        if not self.exact or not all(table.exact for table in self.tied.values()):
            made = self.made(parts, states, tables.ties)
            cost = made.realized.cost
            return Priced(price, value, cost.seconds, cost.memory_bytes, tuple(parts), states, tables, made)
        own_s, own_bytes = self.own(tables.ties, states)
        seconds = own_s + sum(part.seconds for part in parts)
        num_bytes = own_bytes + sum(part.num_bytes for part in parts)
        return Priced(price, value, seconds, num_bytes, tuple(parts), states, tables)

    def own(self, ties: Ties, states: Sequence[int]) -> tuple[float, float]:
        """(seconds, bytes) that belong to no block: tied parameters, and what is whole on every device."""
        seconds, held = ties.own_parts(states)
        return seconds, self.whole_bytes + held

    def made(self, parts: Sequence[BlockChoice], states: Sequence[int], ties: Ties) -> Made:
        """The rewritten graph of these parts, its assignment, and both made into a PCG."""
        choices = [
            VariantChoice(block, self._variant(number, part.number), part.configs, part.price)
            for number, (block, part) in enumerate(zip(self.blocks, parts, strict=True))
        ]
        for block in self._beside:
            choices.insert(0, settle_beside(block, choices, self.configs, parts[0].price))
        settled = {**dict(zip(ties.axes, states, strict=True)), **ties.fixed}
        for choice, part in zip(choices[len(self._beside) :], parts, strict=True):
            settled.update(zip(ties.inside(choice.variant.block.nodes), part.ties, strict=True))
        storage = {param: self.tied[param].states[state].storage for param, state in settled.items()}
        graph, assignment, steps = assemble(self.problem.graph, choices, storage)
        assignment = replace(assignment, leaving=self.problem.leaving)
        return Made(
            graph, steps, assignment, realize(replace(self.problem, graph=graph), assignment, self.configs.moves)
        )

    def _variant(self, block: int, number: int) -> Variant:
        """A variant of a block (both by number), which may have been found for an equal one."""
        return self._source.variant(
            block + len(self._beside), self._stages.variants[self.blocks[block].key][number].rules
        )
