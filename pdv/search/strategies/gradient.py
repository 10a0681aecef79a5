"""Gradient descent on an annealed softmax relaxation (Liu et al., "DARTS", ICLR'19; Jang et al., ICLR'17).

Every choice becomes a distribution over its values, softmax(logits / temperature), and a plan's cost its expectation
under these, a polynomial that torch differentiates. Cooling makes the distributions sharp; then each choice takes its
likeliest value, and single choices are bettered while they can be. Illegal entries cost as much as a poor plan.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pdv.search.solver.tables import Factor
from pdv.search.strategies.budget import Clock
from pdv.search.strategies.decode import find_start
from pdv.search.strategies.network import Flat, Values
from pdv.search.strategies.pricing import Minimized, NetworkTask, strategy

if TYPE_CHECKING:
    import torch

STEPS = 400
RESTARTS = 3
LEARNING_RATE = 0.1
HOTTEST, COLDEST = 2.0, 0.05  # temperatures
PENALTY = 0.02  # of an illegal entry, in costs of the first plan
NOISE = 0.1  # of the first logits
RAISED = 1.0  # of the logits of a plan to start from
ROUND_EVERY = 50
BESIDE = 1 << 16  # entries of tables laid side by side, at most (half a MB)


def minimize(task: NetworkTask) -> Minimized:
    """The best rounding of several relaxed descents; no bound is known."""
    flat = task.flat
    best = dict(task.start) if task.start is not None else find_start(flat)
    least = flat.value(best)
    task.offer(best, least)
    relaxed = _Relaxed(flat, penalty=PENALTY * least)
    for restart in range(RESTARTS):
        for values in relaxed.descend(task, task.clock.share(1 / (RESTARTS - restart)), {} if restart else best):
            polished = flat.polish(values, rounds=2)
            value = flat.value(polished)
            if value < least:
                best, least = polished, value
                task.offer(best, least)
    best = flat.polish(best)
    return Minimized(best if flat.value(best) < flat.illegal else None)


class _Relaxed:
    """Expected cost under independent distributions: one contraction for all factors of one shape.

    Where their tables together are too large to be laid side by side, one for all factors that share a table.
    """

    def __init__(self, flat: Flat, penalty: float) -> None:
        import torch

        self._flat = flat
        self._order = {variable: number for number, variable in enumerate(flat.sizes)}
        self._sizes = torch.tensor(list(flat.sizes.values()))
        shapes: defaultdict[tuple[int, ...], defaultdict[bytes, list[Factor]]]
        shapes = defaultdict(lambda: defaultdict(list))
        for factor in flat.factors:
            shapes[factor.table.shape][factor.table.tobytes()].append(factor)
        self._groups: list[tuple[torch.Tensor, torch.Tensor]] = []
        for shape, alike in shapes.items():
            every = [factor for factors in alike.values() for factor in factors]
            beside = len(every) * math.prod(shape) <= BESIDE
            for factors in [every] if beside else alike.values():
                tables = np.stack([factor.table for factor in factors[: len(factors) if beside else 1]])
                scaled = torch.tensor(np.where(np.isfinite(tables), tables, penalty) / penalty)
                scopes = [[self._order[variable] for variable in factor.variables] for factor in factors]
                self._groups.append((scaled, torch.tensor(scopes)))

    def descend(self, task: NetworkTask, clock: Clock, start: Values) -> Iterator[Values]:
        """Roundings on the way of one annealed descent from random logits, those of ``start`` raised."""
        import torch

        widest = int(self._sizes.max())
        outside = torch.arange(widest)[None] >= self._sizes[:, None]
        first = torch.tensor(task.rng.normal(0.0, NOISE, (len(self._order), widest)))
        for variable, value in start.items():
            first[self._order[variable], value] += RAISED
        logits = first.requires_grad_()
        optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE)
        steps = task.steps(STEPS)
        for step in range(1, steps + 1):
            over = max(step / steps, clock.spent)
            temperature = HOTTEST * (COLDEST / HOTTEST) ** over
            chances = torch.softmax((logits / temperature).masked_fill(outside, -torch.inf), dim=1)
            optimizer.zero_grad()
            self._expect(chances).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            if step % ROUND_EVERY == 0 or over >= 1.0:
                likeliest = chances.argmax(dim=1).tolist()
                yield {variable: likeliest[self._order[variable]] for variable in self._flat.choices}
            if over >= 1.0:
                return

    def _expect(self, chances: torch.Tensor) -> torch.Tensor:
        """A plan's mean cost, in units of the penalty."""
        import torch

        letters = "abcdefgh"
        total = torch.zeros((), dtype=torch.float64)
        for table, scopes in self._groups:
            operands = [chances[scopes[:, axis], :size] for axis, size in enumerate(table.shape[1:])]
            names = letters[: len(operands)]
            one = len(table) == 1  # for all of them
            equation = ",".join([names if one else f"n{names}", *(f"n{name}" for name in names)]) + "->"
            total = total + torch.einsum(equation, table[0] if one else table, *operands)
        return total


gradient = strategy(minimize)
