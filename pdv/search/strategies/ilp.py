"""Integer linear programming: Alpa's formulation (Zheng et al., OSDI'22, section 4.2), solved by HiGHS.

One-hot x_v says which configuration operator v has. What two of them cost together, x_u' T x_v, is made linear by
edge variables e_uv (one per entry of T) whose margins are x_u and x_v. Tables over a source, a helper and a reader
become two such edges: pairs of source and helper with margin x_source, and an edge from these to each reader. Equal
rows of tables share their edge variables, pairs that are nowhere better than another one of their source are left out,
and edge variables may be fractions, which they never are once x is whole. Equal blocks are not folded, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdv.search.solver.tables import Table, Variable
from pdv.search.strategies.network import Flat, Term, Values
from pdv.search.strategies.pricing import Minimized, NetworkTask, strategy

Indices = np.ndarray[Any, np.dtype[np.int64]]

# HiGHS takes differences below 1e-6 for none: costs are scaled so that a plan costs about this much
SCALE = 1e5


@dataclass
class _Program:
    """Columns, and rows ``sum of columns (+1, or -1) == right``."""

    cost: list[Table] = field(default_factory=list)
    columns: int = 0
    rows: list[tuple[Indices, Indices, Indices]] = field(default_factory=list)  # (row, column, sign)
    right: list[float] = field(default_factory=list)

    def add(self, cost: Table) -> Indices:
        """New columns, numbered as ``cost`` is shaped."""
        numbers = np.arange(self.columns, self.columns + cost.size).reshape(cost.shape)
        self.cost.append(cost.ravel())
        self.columns += cost.size
        return numbers

    def equal(self, parts: Indices, margin: Indices, right: float = 0.0) -> None:
        """The sum of ``parts`` less the sum of ``margin`` is ``right``."""
        columns = np.concatenate([parts, margin])
        row = np.full(len(columns), len(self.right))
        self.rows.append((row, columns, np.repeat([1, -1], [len(parts), len(margin)])))
        self.right.append(right)


def minimize(task: NetworkTask) -> Minimized:
    """The best plan that HiGHS finds in time, and the bound that it proves (its dual bound)."""
    flat = task.flat
    program = _Program()
    x = {variable: program.add(_own(flat, variable)) for variable in flat.choices}
    for columns in x.values():
        program.equal(columns, columns[:0], 1.0)
    whole = program.columns
    for term in flat.terms:
        if len(term.variables) > 1:
            _edges(program, term, x)
    least = sum(float(program.cost[number].min()) for number in range(len(x)))  # of the operators' own seconds
    scale = SCALE / least if least > 0 else SCALE
    best, bound = _solve(program, whole, flat.illegal, scale, max(0.1, task.clock.wall_left_s))
    if best is None:
        return Minimized(None, bound)
    values: Values = {variable: int(best[columns].argmax()) for variable, columns in x.items()}
    return Minimized(values, bound)


def _own(flat: Flat, variable: Variable) -> Table:
    """[values] what depends on this variable alone."""
    alone = [flat.terms[number] for number, _ in flat.touching[variable] if len(flat.terms[number].variables) == 1]
    return sum((term.along(0, {}) for term in alone), start=np.zeros(flat.sizes[variable]))


def _edges(program: _Program, term: Term, x: dict[Variable, Indices]) -> None:
    """The edge variables of one term: pairs of its first variable and h, and from these to each other variable.

    In a table over three choices, the second is h: pairs have margins to both.
    """
    own, to, second = _star(term, [len(x[variable]) for variable in term.variables])
    wide = np.concatenate([own[:, None], *to.values()], axis=1)  # [first, all others' values, h]
    rows, row_of = _distinct(wide.reshape(len(wide), -1))
    kinds, kind_of = _distinct(wide.reshape(-1, wide.shape[-1]).T)
    pairs = [(row, h) for row in rows for h in (kinds if second else _useful(wide[row]))]
    first, helper = np.array(pairs).T
    pair = program.add(own[first, helper])
    for row in rows:
        program.equal(pair[first == row], x[term.variables[0]][row_of == row])
    for kind in kinds if second else ():
        program.equal(pair[helper == kind], x[term.variables[1]][kind_of == kind])
    for p, table in to.items():
        costs = table[first, :, helper]
        columns, column_of = _distinct(costs.T)
        edges = program.add(costs[:, columns])
        for k in range(len(pairs)):
            program.equal(edges[k], pair[k : k + 1])
        for number, column in enumerate(columns):
            program.equal(edges[:, number], x[term.variables[p]][column_of == column])


def _star(term: Term, sizes: list[int]) -> tuple[Table, dict[int, Table], bool]:
    """([first, h] costs, by other position: [first, its values, h] costs, whether h is the second choice)."""
    parts = dict(term.parts)
    if (0, 1, 2) in parts:
        return np.zeros(sizes[:2]), {2: parts[0, 1, 2][..., 0].swapaxes(1, 2)}, True
    helpers = next(iter(parts.values())).shape[-1]
    own = parts.pop((0,), np.zeros((sizes[0], helpers)))
    to = {at[1]: table for at, table in parts.items() if at[0] == 0 and len(at) == 2}
    assert len(to) == len(parts) == len(sizes) - 1, f"not a star around its first variable: {term.variables}"
    if len(to) == 1:  # h depends on nothing else: take the best
        return np.zeros((sizes[0], 1)), {1: (own[:, None] + to[1]).min(axis=-1, keepdims=True)}, False
    return own, to, False


def _distinct(table: Table) -> tuple[list[int], Indices]:
    """The first of each kind of equal rows, and for each row the first that is equal to it."""
    first: dict[bytes, int] = {}
    of = [first.setdefault(row.tobytes(), number) for number, row in enumerate(np.ascontiguousarray(table))]
    return list(first.values()), np.array(of)


def _useful(table: Table) -> list[int]:
    """Of table [others' values, h], the h that no other h equals or beats everywhere."""
    kept: list[int] = []
    for h in np.argsort(table.sum(axis=0), kind="stable"):  # what beats another everywhere has the smaller sum
        if not any((table[:, other] <= table[:, h]).all() for other in kept):
            kept.append(int(h))
    return kept


def _solve(program: _Program, whole: int, illegal: float, scale: float, seconds: float) -> tuple[Table | None, float]:
    """(column values or None, dual bound in seconds)."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    cost = np.concatenate(program.cost)
    possible = cost < illegal
    row, column, sign = (np.concatenate(parts) for parts in zip(*program.rows, strict=True))
    matrix = coo_array((sign, (row, column)), shape=(len(program.right), program.columns)).tocsc()
    kept = np.flatnonzero(possible)
    right = np.array(program.right)
    result = milp(
        cost[kept] * scale,
        integrality=(kept < whole).astype(int),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix[:, kept], right, right),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    bound = float("-inf") if result.mip_dual_bound is None else float(result.mip_dual_bound) / scale
    if result.status == 2:  # infeasible
        return None, float("inf")
    if result.x is None:
        return None, bound
    found = np.zeros(program.columns)
    found[kept] = result.x
    return found, bound


ilp = strategy(minimize)
