"""Dynamic programming: OptCNN's elimination (Jia et al., "Exploring Hidden Dimensions in Parallelizing CNNs", ICML'18).

Node elimination takes an operator out of the graph and leaves, between its neighbours, a table of what it costs at
best; edge elimination adds up tables between the same operators. OptCNN stops where no operator has two neighbours or
less, and enumerates the rest; here the cheapest operator to eliminate goes next, whatever its neighbours, which is the
same on series-parallel graphs and exact on all. Unlike in the chain search, equal blocks are solved again and again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from pdv.search.solver.elimination import Elimination, eliminate
from pdv.search.solver.tables import Factor, Variable
from pdv.search.strategies.network import Values
from pdv.search.strategies.pricing import Minimized, NetworkTask, strategy


def minimize(task: NetworkTask) -> Minimized:
    """The least value there is: exact, and its own certificate. It is not cut short.

    Raises:
        TooWideError: if the graph is too wide for elimination.
    """
    values, value = minimize_exactly(task.flat.factors, task.flat.sizes)
    if not math.isfinite(value):
        return Minimized(None, value)
    return Minimized({variable: values[variable] for variable in task.flat.choices}, value)


def minimize_exactly(factors: Sequence[Factor], sizes: Mapping[Variable, int]) -> tuple[Values, float]:
    """The least sum of the factors and where it is.

    Raises:
        TooWideError: if a table would be too large.
    """
    touching: dict[Variable, dict[int, Factor]] = {variable: {} for variable in sizes}
    for number, factor in enumerate(factors):
        for variable in factor.variables:
            touching[variable][number] = factor
    count = len(factors)

    def width(variable: Variable) -> int:
        return math.prod(sizes[v] for v in {v for f in touching[variable].values() for v in f.variables})

    queue = [(width(variable), variable) for variable in sizes]
    heapq.heapify(queue)
    trace: list[tuple[tuple[Variable, ...], Elimination]] = []
    gone: set[Variable] = set()
    total = 0.0
    while queue:
        before, variable = heapq.heappop(queue)
        if variable in gone or before != width(variable):
            continue  # its neighbours have changed since: a newer entry follows
        gone.add(variable)
        group = touching.pop(variable)
        around = tuple(sorted({v for factor in group.values() for v in factor.variables} - {variable}))
        step = eliminate(list(group.values()), {v: sizes[v] for v in (*around, variable)}, around)
        trace.append((around, step))
        total += 0.0 if around else float(step.table)
        for number, factor in group.items():
            for other in set(factor.variables) - {variable}:
                del touching[other][number]
        for other in around:
            touching[other][count] = Factor(around, step.table)
        count += 1
        for other in around:
            heapq.heappush(queue, (width(other), other))
    values: Values = {}
    for around, step in reversed(trace):
        values |= step.recover({v: values[v] for v in around})
    return values, total


dp = strategy(minimize)
